"""forward() with and without grad, its backward, inputs that require grad, chained models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    DEVICE_COUNTS,
    Models,
    PendingForward,
    assert_same,
    assert_same_grads,
    assert_same_state,
    batch,
    call_reference,
    check_forward,
    grads_of,
    microbatches,
    mlp,
    mse,
    seeded,
    total,
)
from roundpipe import RoundPipePackedData, RoundPipeRunConfig
from roundpipe.errors import RoundPipeError

PACKED = RoundPipeRunConfig(num_microbatch=3, merge_output=False)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, other: Tensor | None = None, *, extra: dict[str, Tensor] | None = None) -> Tensor:
        y = self.linear(x)
        y = y if other is None else y * other
        return y if extra is None else y + extra["e"].sin()


def with_two_inputs() -> nn.Sequential:
    return nn.Sequential(TwoInputs(), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5))


@pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
def test_outputs_and_gradients_equal_the_reference(models: Models, num_devices: int) -> None:
    check_forward(models, seeded(mlp), num_devices, (batch(8, 5),))


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_several_forwards_may_be_pending(models: Models, num_devices: int, grain: str) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices, model_run_config=RoundPipeRunConfig(recompute_grain=grain))
    pending = []
    for call in range(3):
        x = batch(8, 5, seed=call)
        pending.append((model(x, roundpipe_run_config=microbatches(3)), PendingForward(module, (x,), {}, 3)))
    for output, expected in (pending[2], pending[0], pending[1]):
        total(output, None).backward()
        total(expected.output, None).backward()
        expected.backward()
    model.synchronize()
    assert_same_grads(model.model, module)


def test_one_loss_over_several_forwards(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    x, y = batch(8, 5), batch(8, 5, seed=1)
    (model(x) * model(y)).sum().backward()
    (module(x) * module(y)).sum().backward()
    model.synchronize()
    torch.testing.assert_close(grads_of(model.model), grads_of(module))  # which comes first is autograd's choice


def test_a_graph_that_is_dropped_leaves_no_trace(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    for call in range(3):
        model(batch(8, 5, seed=call))
    expected = PendingForward(module, (batch(8, 5),), {}, 3)
    output = model(batch(8, 5), roundpipe_run_config=microbatches(3))
    for either in (output, expected.output):
        total(either, None).backward()
    expected.backward()
    model.synchronize()
    assert_same_grads(model.model, module)


def test_forward_and_backward_train_with_steps(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    ours = torch.optim.Adam(model.optim_parameters(), lr=0.01)
    plain = torch.optim.Adam(module.parameters(), lr=0.01)
    for iteration in range(4):
        x, y = batch(8, 5, seed=iteration), batch(8, 5, seed=50 + iteration)
        mse(model(x, roundpipe_run_config=microbatches(3)), y).backward()
        model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        expected = PendingForward(module, (x,), {}, 3)
        mse(expected.output, y).backward()
        expected.backward()
        plain.step()
        plain.zero_grad()
        assert_same_state(model.model, module)


def test_fused_and_plain_calls_add_to_the_same_gradients(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    for _ in range(2):
        call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
        model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
        expected = PendingForward(module, (batch(8, 5),), {}, 3)
        output = model(batch(8, 5), roundpipe_run_config=microbatches(3))
        for either in (output, expected.output):
            total(either, None).backward()
        expected.backward()
    model.synchronize()
    assert_same_grads(model.model, module)


# Without grad.


@pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_equals_the_reference_and_carries_no_graph(models: Models, num_devices: int, mode: Any) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    with mode():
        output = model(batch(8, 5), roundpipe_run_config=microbatches(3))
        assert_same(output, torch.cat([module(x) for x in batch(8, 5).tensor_split(3)]))
    assert not output.requires_grad


def test_training_goes_on_after_inference_mode(models: Models, num_devices: int) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)))
    model = models.wrap_copy(module, num_devices)
    for _ in range(2):
        with torch.inference_mode():
            model(batch(8, 5), roundpipe_run_config=microbatches(3))
        with torch.no_grad():
            for x in batch(8, 5).tensor_split(3):
                module(x)
        call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
        model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
    model.synchronize()
    assert_same_grads(model.model, module)
    assert_same_state(model.model, module)


def test_requires_grad_in_the_config_decides_over_the_grad_mode(models: Models, num_devices: int) -> None:
    model = models.wrap(seeded(mlp), num_devices)
    assert not model(batch(8, 5), roundpipe_run_config=RoundPipeRunConfig(requires_grad=False)).requires_grad


def test_inference_between_async_steps_sees_the_weights_of_calls(models: Models, num_devices: int) -> None:
    model = models.wrap(seeded(mlp), num_devices)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    outputs = []
    for _ in range(3):
        model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        with torch.no_grad():
            outputs.append(model(batch(8, 5)))
            again = model(batch(8, 5))
        assert torch.equal(outputs[-1], again)
    assert not torch.equal(outputs[1], outputs[2])


# Inputs that require grad.


def test_a_leaf_input_gets_its_gradient_from_a_fused_call(models: Models, num_devices: int) -> None:
    module = seeded(with_two_inputs)
    model = models.wrap_copy(module, num_devices)
    inputs = [batch(8, 5, seed=seed).requires_grad_() for seed in range(3)]
    mirrored = copy.deepcopy(inputs)
    for _ in range(2):
        args, kwargs = (inputs[0], inputs[1]), {"extra": {"e": inputs[2]}}
        model.forward_backward(args, kwargs, loss_fn=total, run_config=microbatches(3))
        args, kwargs = (mirrored[0], mirrored[1]), {"extra": {"e": mirrored[2]}}
        call_reference(module, args, kwargs, loss_fn=total, num_microbatch=3)
    assert_same([x.grad for x in inputs], [x.grad for x in mirrored])
    model.synchronize()
    assert_same_grads(model.model, module)


def test_a_leaf_input_gets_its_gradient_from_backward(models: Models, num_devices: int) -> None:
    module = seeded(with_two_inputs)
    model = models.wrap_copy(module, num_devices)
    x, other = batch(8, 5).requires_grad_(), batch(8, 5, seed=1)
    mirror = copy.deepcopy(x)
    output = model(x, other, roundpipe_run_config=microbatches(3))
    expected = PendingForward(module, (mirror, other), {}, 3)
    for either in (output, expected.output):
        total(either, None).backward()
    expected.backward()
    assert_same(x.grad, mirror.grad)


@pytest.mark.parametrize("call", ["fused", "forward"])
def test_a_non_leaf_input_passes_its_gradient_on(models: Models, num_devices: int, call: str) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    before = seeded(lambda: nn.Linear(5, 5))
    mirror = copy.deepcopy(before)
    reached, expected = before(batch(8, 5)).exp(), mirror(batch(8, 5)).exp()
    cut = expected.detach().requires_grad_()
    if call == "fused":
        model.forward_backward((reached,), loss_fn=total, run_config=microbatches(3))
        call_reference(module, (cut,), loss_fn=total, num_microbatch=3)
    else:
        total(model(reached, roundpipe_run_config=microbatches(3)), None).backward()
        pending = PendingForward(module, (cut,), {}, 3)
        total(pending.output, None).backward()
        pending.backward()
    expected.backward(cut.grad)
    assert_same_grads(before, mirror)


def test_an_input_used_twice_gets_both_gradients(models: Models, num_devices: int) -> None:
    module = seeded(with_two_inputs)
    model = models.wrap_copy(module, num_devices)
    x = batch(8, 5).requires_grad_()
    mirror = copy.deepcopy(x)
    model.forward_backward((x, x), loss_fn=total, run_config=microbatches(3))
    call_reference(module, (mirror, mirror), loss_fn=total, num_microbatch=3)
    assert_same(x.grad, mirror.grad)


def test_an_input_that_does_not_reach_the_loss_keeps_no_gradient(models: Models, num_devices: int) -> None:
    class Ignoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
            return self.linear(x)

    model = models.wrap(nn.Sequential(Ignoring(), nn.Tanh()), num_devices)
    x, ignored = batch(8, 5).requires_grad_(), batch(8, 5).requires_grad_()
    model.forward_backward((x, ignored), loss_fn=total)
    assert x.grad is not None
    assert ignored.grad is None


def test_a_replicated_input_gathers_the_gradients_of_all_microbatches(models: Models, num_devices: int) -> None:
    module = seeded(with_two_inputs)
    model = models.wrap_copy(module, num_devices)
    scale = torch.tensor(1.5, requires_grad=True)
    mirror = copy.deepcopy(scale)
    model.forward_backward((batch(8, 5), scale), loss_fn=total, run_config=microbatches(4))
    call_reference(module, (batch(8, 5), mirror), loss_fn=total, num_microbatch=4)
    torch.testing.assert_close(scale.grad, mirror.grad)  # a sum over microbatches by autograd, in its order


# Chains.


def test_two_models_chained_pass_gradients_through(models: Models, num_devices: int) -> None:
    first, second = seeded(mlp, 1), seeded(mlp, 2)
    ours = [models.wrap_copy(module, num_devices) for module in (first, second)]
    middle = ours[0](batch(8, 5), roundpipe_run_config=microbatches(3))
    total(ours[1](middle, roundpipe_run_config=microbatches(2)), None).backward()
    expected_first = PendingForward(first, (batch(8, 5),), {}, 3)
    expected_second = PendingForward(second, (expected_first.output,), {}, 2)
    total(expected_second.output, None).backward()
    expected_second.backward()
    expected_first.backward()
    for model, module in zip(ours, (first, second), strict=True):
        model.synchronize()
        assert_same_grads(model.model, module)


@pytest.mark.parametrize("kind", ["tensor", "tuple"])
def test_packed_outputs_are_the_next_models_microbatches(models: Models, num_devices: int, kind: str) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x if kind == "tensor" else (x, {"d": x * 2, "n": 1})

    class FromPair(nn.Module):
        def forward(self, value: Any) -> Tensor:
            return value if kind == "tensor" else value[0] * value[1]["d"]

    first = seeded(lambda: nn.Sequential(*mlp(2), Pair()), 1)
    second = seeded(lambda: nn.Sequential(FromPair(), *mlp(2)), 2)
    ours = [models.wrap_copy(module, num_devices) for module in (first, second)]
    packed = ours[0](batch(8, 5), roundpipe_run_config=PACKED)
    leaf = packed if kind == "tensor" else packed[0]
    assert isinstance(leaf, RoundPipePackedData)
    assert len(leaf) == 3
    output = ours[1](packed, roundpipe_run_config=microbatches(7))  # the packed data decides: 3 microbatches
    first_parts = [first(x) for x in batch(8, 5).tensor_split(3)]
    expected = torch.cat([second(part) for part in first_parts])
    assert_same(output.detach(), expected.detach())
    total(output, None).backward()
    weights = torch.arange(expected.numel(), dtype=torch.float32).view_as(expected).cos()
    for part, weight in zip(first_parts, weights.tensor_split(3), strict=True):
        torch.autograd.backward(second(part), weight)
    for model, module in zip(ours, (first, second), strict=True):
        model.synchronize()
        assert_same_grads(model.model, module)


def test_packed_outputs_feed_a_fused_call(models: Models, num_devices: int) -> None:
    first, second = seeded(mlp, 1), seeded(mlp, 2)
    ours = [models.wrap_copy(module, num_devices) for module in (first, second)]
    packed = ours[0](batch(8, 5), roundpipe_run_config=PACKED)
    loss = ours[1].forward_backward((packed,), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
    expected = call_reference(nn.Sequential(first, second), (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
    assert_same(loss, expected.loss)
    for model, module in zip(ours, (first, second), strict=True):
        model.synchronize()
        assert_same_grads(model.model, module)


def test_packed_data_without_grad_is_readable_after_synchronize(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    with torch.no_grad():
        packed = model(batch(8, 5), roundpipe_run_config=PACKED)
        packed.synchronize()
        assert_same(list(packed), [module(x) for x in batch(8, 5).tensor_split(3)])


def test_output_device_gives_the_same_values(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    config = RoundPipeRunConfig(num_microbatch=3, output_device=torch.device("cpu"))
    loss, output = model.forward_backward(
        (batch(8, 5),), label=batch(8, 5), loss_fn=mse, return_outputs=True, run_config=config
    )
    expected = call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
    assert_same((loss, output), (expected.loss, expected.outputs))


# What is refused.


def test_double_backward_and_autograd_grad_are_refused(models: Models) -> None:
    model = models.wrap(seeded(mlp), 2)
    x = batch(8, 5).requires_grad_()
    with pytest.raises(RoundPipeError):
        torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(RoundPipeError):
        model(x).sum().backward(create_graph=True)
    output = model(x).sum()
    output.backward(retain_graph=True)
    with pytest.raises(RoundPipeError):
        output.backward()
    model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)


def test_backward_after_the_weights_have_changed_is_refused(models: Models) -> None:
    model = models.wrap(seeded(mlp), 2)
    output = model(batch(8, 5))
    model.step(lambda: None, is_async=False)
    with pytest.raises(RoundPipeError, match="updated between"):
        output.sum().backward()
