"""loss_reduction="mean": what loss_fn returns is weighed by rows, so that a mean over rows is that of the batch.

The arithmetic is `loss * (rows / all rows)`. A plain loop that does the same gives the same bits; plain PyTorch on the
whole batch the same numbers to rounding, which in float64 leaves no room for another weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import Models, assert_same, assert_same_grads, batch, call_reference, grads_of, mlp, mse, seeded
from roundpipe import ConfigError, GradScaler, RoundPipe, RoundPipeRunConfig
from roundpipe.microbatch import Chunk, Replicate, RoundPipePackedData

MEAN = RoundPipeRunConfig(loss_reduction="mean")
EXACT = 1e-13  # of numbers of size 1 in float64: a few roundings


def weighing(loss_fn: Callable[[Any, Any], Any], rows: list[int]) -> Callable[[Any, Any], Any]:
    """The loss function of the plain loop; `rows`: of each microbatch."""
    shares = iter([each / sum(rows) for each in rows])

    def weighed(output: Any, label: Any) -> Any:
        losses, share = loss_fn(output, label), next(shares)
        return losses * share if isinstance(losses, Tensor) else [loss * share for loss in losses]

    return weighed


def rows_of(size: int, count: int) -> list[int]:
    return [len(piece) for piece in torch.arange(size).tensor_split(count)]


def both(output: Tensor, label: Tensor) -> list[Tensor]:
    return [mse(output, label), (output - label).abs().mean()]


@pytest.mark.parametrize("loss_fn", [mse, both])
@pytest.mark.parametrize("num_rows", [1, 2, 10, 13])
def test_losses_and_gradients_are_those_of_the_weighed_plain_loop(
    models: Models, num_devices: int, num_rows: int, loss_fn: Callable[[Any, Any], Any]
) -> None:
    module = seeded(mlp)
    x, y = batch(num_rows, 5), batch(num_rows, 5, seed=8)
    reference = copy.deepcopy(module)
    count = min(num_rows, num_devices + 1)
    expected = call_reference(reference, (x,), {}, y, weighing(loss_fn, rows_of(num_rows, count)), count)
    model = models.wrap_copy(module, num_devices)
    loss, outputs = model.forward_backward((x,), label=y, loss_fn=loss_fn, return_outputs=True, run_config=MEAN)
    model.synchronize()
    assert_same(loss, expected.loss, "loss")
    assert_same(outputs.detach(), expected.outputs, "outputs")
    assert_same_grads(model.model, reference)


@pytest.mark.parametrize("num_rows", [1, 2, 10, 13])
def test_the_mean_of_losses_equals_the_whole_batch(models: Models, num_devices: int, num_rows: int) -> None:
    module = seeded(mlp).double()
    x, y = batch(num_rows, 5).double(), batch(num_rows, 5, seed=8).double()
    expected = mse(module(x), y)
    model = models.wrap_copy(module, num_devices, model_run_config=MEAN)
    expected.backward()
    loss = model.forward_backward((x,), label=y, loss_fn=mse)
    model.synchronize()
    torch.testing.assert_close(loss, expected.detach(), atol=EXACT, rtol=0)
    for name, grad in grads_of(model.model).items():
        torch.testing.assert_close(grad, module.get_parameter(name).grad, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("of_model", "of_call"), [(None, None), (None, "sum"), ("sum", None), ("mean", "sum")])
def test_the_sum_of_losses_equals_the_plain_loop(models: Models, of_model: str | None, of_call: str | None) -> None:
    module, x, y = seeded(mlp), batch(10, 5), batch(10, 5, seed=8)
    reference = copy.deepcopy(module)
    expected = call_reference(reference, (x,), {}, y, mse, 4)
    model = models.wrap_copy(module, 3, model_run_config=RoundPipeRunConfig(loss_reduction=of_model))
    config = RoundPipeRunConfig(loss_reduction=of_call)
    assert_same(model.forward_backward((x,), label=y, loss_fn=mse, run_config=config), expected.loss)
    model.synchronize()
    assert_same_grads(model.model, reference)


class Losses(nn.Module):
    """The last layer returns losses; the labels came with the inputs."""

    def forward(self, value: tuple[Tensor, Tensor]) -> list[Tensor]:
        return both(*value)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), label


def test_losses_that_the_last_layer_returns_are_weighed(models: Models) -> None:
    module = seeded(lambda: nn.Sequential(Doubled(), Losses()))
    x, y = batch(10, 5), batch(10, 5, seed=8)
    expected = call_reference(copy.deepcopy(module), (x, y), loss_fn=weighing(lambda out, _: out, [3, 3, 2, 2]))
    losses = models.wrap(module, 3).forward_backward((x, y), run_config=MEAN)
    assert_same(losses, expected.loss)


def uneven(args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> Any:
    return [(piece,) for piece in args[0].split([1, 7, 2])], [{}] * 3


WAYS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "along_another_dimension": ({"split_input": ((Chunk(-2),), None), "split_label": Chunk(0)}, [3, 3, 2, 2]),
    "by_a_function": ({"split_input": uneven, "split_label": lambda y, n: list(y.split([1, 7, 2]))}, [1, 7, 2]),
}


@pytest.mark.parametrize(("options", "rows"), WAYS.values(), ids=WAYS)
def test_rows_are_those_of_the_split(models: Models, options: dict[str, Any], rows: list[int]) -> None:
    module, x, y = seeded(mlp).double(), batch(10, 5).double(), batch(10, 5, seed=8).double()
    model = models.wrap_copy(module, 3)
    seen: list[int] = []

    def loss_fn(output: Tensor, label: Tensor) -> Tensor:
        seen.append(len(output))
        return mse(output, label)

    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=len(rows), **options)
    loss = model.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=config)
    torch.testing.assert_close(loss, mse(module(x), y).detach(), atol=EXACT, rtol=0)
    assert seen == rows


def test_packed_data_brings_its_rows_along(models: Models) -> None:
    first, second = seeded(mlp).double(), seeded(mlp, 4).double()
    x, y = batch(10, 5).double(), batch(10, 5, seed=8).double()
    ours = models.wrap_copy(first, 3), models.wrap_copy(second, 3)
    packed = ours[0](x, roundpipe_run_config=RoundPipeRunConfig(merge_output=False))
    assert isinstance(packed, RoundPipePackedData)
    loss = ours[1].forward_backward((packed,), label=y, loss_fn=mse, run_config=MEAN)
    torch.testing.assert_close(loss, mse(second(first(x)), y).detach(), atol=EXACT, rtol=0)


@pytest.mark.parametrize("num_rows", [2, 9])
def test_a_scaled_loss_is_weighed_like_any(models: Models, num_rows: int) -> None:
    scaler = GradScaler(init_scale=2.0**9)
    module, x, y = seeded(mlp), batch(num_rows, 5), batch(num_rows, 5, seed=8)
    grads = []
    losses = []
    for scale in (lambda loss: loss, scaler.scale):
        model = models.wrap_copy(module, 3)
        losses.append(
            model.forward_backward((x,), label=y, loss_fn=lambda out, y, s=scale: s(mse(out, y)), run_config=MEAN)
        )
        model.synchronize()
        grads.append(grads_of(model.model))
    assert_same(losses[1], losses[0] * 2.0**9)
    assert_same(grads[1], {name: grad * 2.0**9 for name, grad in grads[0].items() if grad is not None})


def test_where_rows_cannot_be_told_the_call_is_refused(models: Models) -> None:
    module, x = seeded(mlp), batch(10, 5)
    model = models.wrap_copy(module, 3)
    config = RoundPipeRunConfig(loss_reduction="mean", split_input=((Replicate,), None))
    with pytest.raises(ConfigError, match=r'how many each has cannot be told.*loss_reduction="sum" and weigh'):
        model.forward_backward((x,), loss_fn=lambda out, _: out.mean(), run_config=config)
    in_one = RoundPipeRunConfig(num_microbatch=1).over(config)
    loss = model.forward_backward((x,), loss_fn=lambda out, _: out.mean(), run_config=in_one)
    assert_same(loss, module(x).mean().detach(), "one microbatch is the whole batch")


@pytest.mark.parametrize("value", ["average", "", 1, True, torch.mean])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'loss_reduction must be "sum".*or "mean"'):
        RoundPipeRunConfig(loss_reduction=value)


def test_two_weights_for_one_loss_are_refused(models: Models) -> None:
    config = RoundPipeRunConfig(loss_reduction="mean", whole_batch_loss=True)
    model = models.wrap(seeded(mlp), 2, model_run_config=config)
    with pytest.raises(ConfigError, match="would weigh a loss twice"):
        model.forward_backward((batch(6, 5),), label=batch(6, 5), loss_fn=mse)


class OwnLoss(nn.Module):
    """A model of the user's that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        output = self.body(x)
        return {"loss": mse(output, label), "z_loss": output.square().mean(), "size": output.abs().mean()}


def run_all_ways(model: RoundPipe, x: Tensor, y: Tensor, config: RoundPipeRunConfig) -> list[Any]:
    """(loss, gradients) of forward_backward and of forward, and the loss in outputs and in evaluation."""
    loss, outputs = model.forward_backward((x, y), return_outputs=True, run_config=config)
    model.synchronize()
    fused = (loss, grads_of(model.model))
    model.zero_grad()
    with torch.no_grad():
        evaluated = model(x, y, roundpipe_run_config=config)["loss"]
    output = model(x, y, roundpipe_run_config=config)["loss"]
    output.backward()
    model.synchronize()
    found = [fused, (output.detach(), grads_of(model.model)), outputs["loss"].detach(), evaluated]
    model.zero_grad()
    return found


def test_a_loss_in_the_output_of_any_model_is_that_of_the_batch_in_every_way(models: Models) -> None:
    module = seeded(OwnLoss).double()
    x, y = batch(10, 5).double(), batch(10, 5, seed=8).double()
    plain = module(x, y)
    plain["loss"].backward()
    model = models.wrap_copy(module, 3)
    fused, unfused, in_outputs, evaluated = run_all_ways(model, x, y, RoundPipeRunConfig())
    assert_same(unfused, fused)
    assert_same((in_outputs, evaluated), (fused[0], fused[0]))
    torch.testing.assert_close(fused[0], plain["loss"].detach(), atol=EXACT, rtol=0)
    for name, grad in fused[1].items():
        torch.testing.assert_close(grad, module.get_parameter(name).grad, atol=EXACT, rtol=0)


def test_without_the_switch_losses_in_outputs_are_added_or_averaged_as_loss_reduction_says(models: Models) -> None:
    module, x, y = seeded(OwnLoss), batch(10, 5), batch(10, 5, seed=8)
    parts = [module(*piece)["loss"].detach() for piece in zip(x.tensor_split(4), y.tensor_split(4), strict=True)]
    model = models.wrap_copy(module, 3)
    added = RoundPipeRunConfig(whole_batch_loss=False)
    averaged = RoundPipeRunConfig(whole_batch_loss=False, loss_reduction="mean")
    weighed = [part * (rows / 10) for part, rows in zip(parts, (3, 3, 2, 2), strict=True)]
    for config, expected in ((added, parts), (averaged, weighed)):
        fused, unfused, *others = run_all_ways(model, x, y, config)
        assert_same(unfused, fused)
        assert_same([fused[0], *others], [sum(expected[1:], expected[0])] * 3)


def test_other_losses_in_the_output_are_averaged_by_rows_and_other_numbers_plainly(models: Models) -> None:
    module, x, y = seeded(OwnLoss), batch(10, 5), batch(10, 5, seed=8)
    parts = [module(*piece) for piece in zip(x.tensor_split(4), y.tensor_split(4), strict=True)]
    with torch.no_grad():
        found = models.wrap_copy(module, 3)(x, y)
    first, *rest = [part["z_loss"].detach() * (rows / 10) for part, rows in zip(parts, (3, 3, 2, 2), strict=True)]
    assert_same(found["z_loss"], sum(rest, first))
    assert_same(found["size"], torch.stack([part["size"].detach() for part in parts]).mean())


def test_a_loss_in_outputs_is_refused_where_rows_cannot_be_told(models: Models) -> None:
    module, x, y = seeded(OwnLoss), batch(10, 5), batch(10, 5, seed=8)
    whole = RoundPipeRunConfig(split_input=((Replicate, Replicate), None), num_microbatch=2)
    model = models.wrap_copy(module, 3)
    with pytest.raises(ConfigError, match=r"returns a `loss`.*Set whole_batch_loss=False"):
        model(x, y, roundpipe_run_config=whole)
    added = model(x, y, roundpipe_run_config=RoundPipeRunConfig(whole_batch_loss=False).over(whole))
    assert_same(added["loss"].detach(), 2 * module(x, y)["loss"].detach())
