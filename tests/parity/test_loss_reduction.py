"""loss_reduction="mean": what loss_fn returns is weighed by rows, so that a mean over rows is that of the batch.

Losses that a plain module returns in its output are recognised, or weighed with a warning.

The arithmetic is `loss * (rows / all rows)`. A plain loop that does the same gives the same bits; plain PyTorch on the
whole batch the same numbers to rounding, which in float64 leaves no room for another weight.
"""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers_parity import Models, assert_same, assert_same_grads, batch, call_reference, grads_of, mlp, mse, seeded
from roundpipe import ConfigError, GradScaler, RoundPipe, RoundPipeRunConfig
from roundpipe.microbatch import Chunk, Reducer, Replicate, RoundPipePackedData
from roundpipe.runtime.rng import draw_call_seed

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


# Losses in the outputs of plain modules: whether they are means or sums is found out by trials.


class Regression(nn.Module):
    """Returns a loss over rows, reduced as `reduce` says."""

    def __init__(self, reduce: Callable[[Tensor, Any], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.body, self.dropout = mlp(), nn.Dropout(dropout)
        self.reduce = reduce
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, label: Tensor, num_items_in_batch: int | None = None) -> dict[str, Tensor]:
        self.calls += 1
        self.seen += len(x)
        errors = (self.body(self.dropout(x)) - label).square().mean(1)
        return {"loss": self.reduce(errors, num_items_in_batch), "errors": errors}


REDUCED: dict[str, tuple[Callable[[Tensor, Any], Tensor], dict[str, Any]]] = {
    "mean": (lambda errors, _: errors.mean(), {}),
    "sum": (lambda errors, _: errors.sum(), {}),
    "divided by a count": (lambda errors, count: errors.sum() / count, {"num_items_in_batch": 10}),
    "nothing": (lambda errors, _: 0.0 * errors.sum(), {}),
}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("reduce", "more"), REDUCED.values(), ids=REDUCED)
@pytest.mark.parametrize("first", ["forward", "forward_backward"])
def test_means_and_sums_of_plain_modules_are_those_of_the_batch(
    models: Models, caplog: pytest.LogCaptureFixture, reduce: Any, more: dict[str, Any], first: str
) -> None:
    """Whichever call comes first, and without a trace of the trial."""
    module = seeded(lambda: Regression(reduce)).double()
    x, y = batch(10, 5).double(), batch(10, 5, seed=8).double()
    expected = module(x, y, **more)["loss"]
    expected.backward()
    model = models.wrap_copy(module, 3)
    model.model.calls = 0
    model.model.seen.zero_()
    random.seed(2)
    np.random.seed(3)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].copy()
    for call in ("forward", "forward_backward") if first == "forward" else ("forward_backward", "forward"):
        model.zero_grad()
        if call == "forward":
            loss = model(x, y, **more)["loss"]
            loss.backward()
        else:
            loss = model.forward_backward((x, y), more)
        model.synchronize()
        torch.testing.assert_close(loss.detach(), expected.detach(), atol=EXACT, rtol=EXACT)
        for name, grad in grads_of(model.model).items():
            torch.testing.assert_close(grad, module.get_parameter(name).grad, atol=EXACT, rtol=0)
    assert warnings_in(caplog) == []
    assert (model.model.calls, float(model.model.seen)) == (8, 20.0)
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    drawn = torch.rand(3)
    torch.manual_seed(1)
    for _ in range(2):
        draw_call_seed()  # each call has drawn one number, and trials none
    assert_same(drawn, torch.rand(3))


def test_dropout_does_not_hide_what_a_loss_is(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    for reduce in (REDUCED["mean"][0], REDUCED["sum"][0]):
        model = models.wrap(seeded(lambda reduce=reduce: Regression(reduce, 0.4)), 3)
        torch.manual_seed(5)
        loss, outputs = model.forward_backward((batch(10, 5), batch(10, 5, seed=8)), return_outputs=True)
        torch.testing.assert_close(loss, reduce(outputs["errors"], None))
    assert warnings_in(caplog) == []


class Tokens(nn.Module):
    """A mean over the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.body(x).flatten(0, 1), targets.flatten())}


@pytest.mark.parametrize("first", ["forward", "forward_backward"])
def test_a_mean_over_the_labels_of_a_plain_module_is_weighed_by_labels(
    models: Models, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    """The first rows have equally many labels, later ones have not."""
    module = seeded(Tokens).double()
    model = models.wrap_copy(module, 3)
    x, targets = batch(8, 6, 5).double(), torch.arange(48).view(8, 6) % 7
    if first == "forward":
        model(x, targets)
    targets = targets.clone()
    for row in range(8):
        targets[row, : row % 6] = -100
    expected = module(x, targets)["loss"]
    expected.backward()
    loss = model.forward_backward((x, targets))
    model.synchronize()
    torch.testing.assert_close(loss, expected.detach(), atol=EXACT, rtol=EXACT)
    for name, grad in grads_of(model.model).items():
        torch.testing.assert_close(grad, module.get_parameter(name).grad, atol=EXACT, rtol=0)
    assert_same(model(x, targets=targets)["loss"].detach(), loss)
    assert warnings_in(caplog) == []


class Masked(Tokens):
    """A mean over the tokens that a mask shows. What a mask means to a loss cannot be counted."""

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        errors = self.body(x).square().mean(-1)
        return {"loss": (errors * mask).sum() / mask.sum()}


class Contrastive(nn.Module):
    """Every row is compared with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        logits = self.body(x) @ label.t()
        return {"loss": nn.functional.cross_entropy(logits, torch.arange(len(x)))}


UNKNOWN = {
    "masked": (Masked, batch(8, 4, 5), torch.ones(8, 4)),
    "contrastive": (Contrastive, batch(8, 5), batch(8, 5, seed=8)),
}


@pytest.mark.parametrize(("build", "x", "y"), UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_that_is_not_recognised_is_weighed_with_one_warning(
    models: Models, caplog: pytest.LogCaptureFixture, build: Callable[[], nn.Module], x: Tensor, y: Tensor, fused: bool
) -> None:
    module = seeded(build).double()
    x = x.double()
    y = y.double() if y.is_floating_point() else y
    model = models.wrap_copy(module, 3)
    for _ in range(3):
        loss = model.forward_backward((x, y)) if fused else model(x, y)["loss"].detach()
    parts = [module(*piece)["loss"].detach() for piece in zip(x.tensor_split(4), y.tensor_split(4), strict=True)]
    torch.testing.assert_close(loss, sum(parts) / 4, atol=EXACT, rtol=EXACT)
    (message,) = warnings_in(caplog)
    for part in ("weighed by their rows", "num_microbatch=1", "whole_batch_loss=False", 'loss_reduction="sum"'):
        assert part in message


@pytest.mark.parametrize(
    "config",
    [
        RoundPipeRunConfig(num_microbatch=1),
        RoundPipeRunConfig(whole_batch_loss=False, loss_reduction="mean"),
        RoundPipeRunConfig(whole_batch_loss=False, loss_reduction="sum"),
        RoundPipeRunConfig(merge_output={"loss": Reducer(torch.tensor(0.0), torch.add)}),
    ],
    ids=["one microbatch", "mean", "sum", "reducer"],
)
def test_what_the_warning_names_silences_it(
    models: Models, caplog: pytest.LogCaptureFixture, config: RoundPipeRunConfig
) -> None:
    model = models.wrap(seeded(Contrastive), 3, model_run_config=config)
    x, y = batch(8, 5), batch(8, 5, seed=8)
    model(x, y)["loss"].backward()
    if config.merge_output is None:
        model.forward_backward((x, y))
    assert warnings_in(caplog) == []


class OnlyOnDevices(Regression):
    """Cannot run where trials run."""

    def forward(self, x: Tensor, label: Tensor, num_items_in_batch: int | None = None) -> dict[str, Tensor]:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("needs a device")
        return super().forward(x, label, num_items_in_batch)


def test_a_module_that_cannot_run_on_the_host_is_weighed_by_rows_with_a_warning(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    module = seeded(lambda: OnlyOnDevices(REDUCED["mean"][0]))
    loss = models.wrap(module, 3).forward_backward((batch(10, 5), batch(10, 5, seed=8)))
    expected = mse(module.body(batch(10, 5)), batch(10, 5, seed=8)).detach()
    torch.testing.assert_close(loss, expected)
    (message,) = warnings_in(caplog)
    assert "RuntimeError('needs a device')" in message
    assert "num_microbatch=1" in message


# A spec or function of the user gets losses as the module returns them.


def raw(module: nn.Module, x: Tensor, y: Tensor, num_microbatch: int) -> list[Tensor]:
    pieces = zip(x.tensor_split(num_microbatch), y.tensor_split(num_microbatch), strict=True)
    return [module(*piece)["loss"] for piece in pieces]


def largest(outputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"loss": torch.stack([output["loss"] for output in outputs]).max()}


def added(losses: RoundPipePackedData) -> Tensor:
    losses.synchronize()
    return sum(losses[1:], losses[0])


OWN_MERGES: dict[str, tuple[Any, Callable[[Any], Tensor], Callable[[list[Tensor]], Tensor]]] = {
    "reducer": ({"loss": Reducer(torch.tensor(0.0), torch.add), "errors": None}, lambda o: o["loss"], sum),
    "product": ({"loss": Reducer(torch.tensor(1.0), torch.mul), "errors": None}, lambda o: o["loss"], torch.prod),
    "function": (largest, lambda o: o["loss"], torch.max),
    "packed": (False, lambda o: added(o["loss"]), sum),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("spec", "take", "expected"), OWN_MERGES.values(), ids=OWN_MERGES)
def test_a_users_merge_gets_raw_losses_and_decides_the_gradients(
    models: Models,
    caplog: pytest.LogCaptureFixture,
    reduction: str,
    spec: Any,
    take: Callable[[Any], Tensor],
    expected: Callable[[Any], Tensor],
) -> None:
    module = seeded(lambda: Regression(REDUCED[reduction][0]))
    x, y = batch(10, 5), batch(10, 5, seed=8)
    model = models.wrap_copy(module, 3, model_run_config=RoundPipeRunConfig(merge_output=spec))
    loss = take(model(x, y))
    loss.backward()
    model.synchronize()
    losses = raw(module, x, y, 4)
    plain = expected(losses) if expected is sum else expected(torch.stack(losses))
    plain.backward()
    torch.testing.assert_close(loss.detach(), plain.detach())
    for name, grad in grads_of(model.model).items():
        torch.testing.assert_close(grad, module.get_parameter(name).grad)
    assert warnings_in(caplog) == []


def test_a_spec_that_leaves_the_loss_out_leaves_it_to_the_automatic_merge(models: Models) -> None:
    module = seeded(lambda: Regression(REDUCED["mean"][0]))
    x, y = batch(10, 5), batch(10, 5, seed=8)
    for spec in ({"loss": None, "errors": Chunk(0)}, Chunk(0), True):
        config = RoundPipeRunConfig(merge_output=spec)
        loss = models.wrap_copy(module, 3, model_run_config=config)(x, y)["loss"]
        torch.testing.assert_close(loss, module(x, y)["loss"])


def test_outputs_returned_beside_the_loss_are_raw_for_a_users_merge(models: Models) -> None:
    module = seeded(lambda: Regression(REDUCED["sum"][0]))
    x, y = batch(10, 5), batch(10, 5, seed=8)
    config = RoundPipeRunConfig(merge_output=OWN_MERGES["reducer"][0], whole_batch_loss=True)
    for loss_fn in (None, lambda output, _: output["loss"]):
        model = models.wrap_copy(module, 3, model_run_config=config)
        options: dict[str, Any] = {} if loss_fn is None else {"loss_fn": loss_fn}
        loss, outputs = model.forward_backward((x, y), return_outputs=True, **options)
        torch.testing.assert_close(loss, module(x, y)["loss"].detach())
        torch.testing.assert_close(outputs["loss"].detach(), sum(raw(module, x, y, 4)).detach())


class Ignoring(nn.Module):
    """Its loss is a mean over the labels that are not `ignored`."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)
        self.criterion = nn.CrossEntropyLoss(ignore_index=ignored)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.criterion(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("ignored", [-100, -1, 0, 3])
def test_the_label_that_a_loss_module_ignores_does_not_count(
    models: Models, caplog: pytest.LogCaptureFixture, ignored: int
) -> None:
    module = seeded(lambda: Ignoring(ignored).double())
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(9, (7, 6), generator=generator) for _ in range(2))
    labels[torch.rand(7, 6, generator=generator) < 0.5] = ignored
    labels[0, 1:] = ignored
    model = models.wrap_copy(module, 3)
    loss = module(ids, labels)["loss"]
    loss.backward()
    torch.testing.assert_close(model.forward_backward((ids, labels)), loss.detach(), rtol=EXACT, atol=EXACT)
    model.synchronize()
    torch.testing.assert_close(grads_of(model.model), grads_of(module), rtol=EXACT, atol=EXACT)
    assert warnings_in(caplog) == []


# A warning of the default, which adds what loss_fn returns.


def test_results_of_loss_fn_that_are_added_by_default_are_warned_of_once(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.wrap(seeded(mlp), 6, name="mine")
    for _ in range(3):
        model.forward_backward((batch(10, 5),), label=batch(10, 5), loss_fn=mse)
    (message,) = warnings_in(caplog)
    for part in ("mine:", "7 microbatches", "loss_reduction was never set", 'loss_reduction="mean"', '"sum"'):
        assert part in message


def test_bare_losses_of_the_last_layer_are_warned_of_too(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    model = models.wrap(seeded(lambda: nn.Sequential(Doubled(), Losses())), 3)
    for _ in range(2):
        model.forward_backward((batch(10, 5), batch(10, 5, seed=8)))
    (message,) = warnings_in(caplog)
    assert "loss_reduction was never set" in message


def test_a_label_that_nothing_reads_is_warned_of_once(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    model = models.wrap(seeded(lambda: nn.Sequential(Doubled(), Losses())), 1, model_run_config=MEAN, name="mine")
    inputs = batch(10, 5), batch(10, 5, seed=8)
    expected = model.forward_backward(inputs)
    assert warnings_in(caplog) == []
    for _ in range(2):
        assert_same(model.forward_backward(inputs, label=torch.zeros(10)), expected)
    (message,) = warnings_in(caplog)
    for part in ("mine:", "label", "without loss_fn", "input_kwargs"):
        assert part in message


@pytest.mark.parametrize(
    ("of_model", "of_call"),
    [
        ({"loss_reduction": "sum"}, {}),
        ({"loss_reduction": "mean"}, {}),
        ({}, {"loss_reduction": "sum"}),
        ({}, {"loss_reduction": "mean"}),
        ({"num_microbatch": 1}, {}),
    ],
)
def test_a_decision_of_the_user_is_not_warned_of(
    models: Models, caplog: pytest.LogCaptureFixture, of_model: dict[str, Any], of_call: dict[str, Any]
) -> None:
    model = models.wrap(seeded(mlp), 3, model_run_config=RoundPipeRunConfig(**of_model))
    config = RoundPipeRunConfig(**of_call)
    model.forward_backward((batch(10, 5),), label=batch(10, 5), loss_fn=mse, run_config=config)
    assert warnings_in(caplog) == []


# Modules that compute one row from others.


def normalising() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5)))


def test_normalising_over_microbatches_is_warned_of_once(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    model = models.wrap(seeded(normalising), 3, model_run_config=MEAN)
    x, y = batch(10, 5), batch(10, 5, seed=8)
    for _ in range(2):
        mse(model(x), y).backward()
        model.forward_backward((x,), label=y, loss_fn=mse)
    (message,) = warnings_in(caplog)
    assert "BatchNorm" in message
    assert "num_microbatch=1" in message


@pytest.mark.parametrize("way", ["evaluation", "frozen", "one microbatch"])
def test_normalising_with_running_statistics_or_at_once_is_not_warned_of(
    models: Models, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    config = RoundPipeRunConfig(num_microbatch=1 if way == "one microbatch" else None).over(MEAN)
    model = models.wrap(seeded(normalising), 3, model_run_config=config)
    if way == "frozen":
        model.model[1][0].eval()
    if way == "evaluation":
        model.eval()
    with torch.set_grad_enabled(way != "evaluation"):
        model(batch(10, 5))
    assert warnings_in(caplog) == []
