"""Low-precision models with high-precision optimizer copies, loss scaling and clipping equal plain arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    Models,
    StalenessReference,
    assert_same,
    assert_same_state,
    batch,
    call_reference,
    microbatches,
    mlp,
    mse,
    seeded,
)
from roundpipe import GradScaler, RoundPipe, clip_grad_norm_
from roundpipe.optim import AdamW


def float_mse(output: Tensor, label: Tensor) -> Tensor:
    return mse(output.float(), label.float())


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def our_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW(params, lr=0.01)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def call(model: RoundPipe, seed: int, loss_fn: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    x, y = (batch(8, 5, seed=2 * seed + i).to(dtype) for i in range(2))
    loss: Tensor = model.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=microbatches(3))
    return loss


def call_plain(module: nn.Module, seed: int, loss_fn: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    x, y = (batch(8, 5, seed=2 * seed + i).to(dtype) for i in range(2))
    loss: Tensor = call_reference(module, (x,), label=y, loss_fn=loss_fn, num_microbatch=3).loss
    return loss


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("make_optimizer", "dtype"),
    [(adam, torch.bfloat16), (our_adamw, torch.bfloat16), (sgd, torch.float16)],
    ids=["adam-bfloat16", "our_adamw-bfloat16", "sgd-float16"],
)
def test_float32_copies_of_a_low_precision_model_equal_a_reference_with_masters(
    models: Models,
    num_devices: int,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    dtype: torch.dtype,
    is_async: bool,
) -> None:
    module = seeded(mlp).to(dtype)
    model = models.wrap_copy(module, num_devices, optim_dtype=torch.float32)
    reference = StalenessReference(module, make_optimizer, torch.float32)
    optimizer = make_optimizer(list(model.optim_parameters()))
    for iteration in range(4):
        assert_same(call(model, iteration, float_mse, dtype), call_plain(module, iteration, float_mse, dtype))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
        reference.step(is_async)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model.model, module)
    assert_same(list(model.optim_parameters()), reference.masters)


def test_optimizer_copies_keep_what_low_precision_cannot_hold(models: Models) -> None:
    model = models.wrap(seeded(mlp).to(torch.bfloat16), 2, optim_dtype=torch.float32)
    before = [p.detach().clone() for p in model.optim_parameters()]
    assert all(p.dtype is torch.float32 for p in before)

    def nudge() -> None:
        with torch.no_grad():
            for p in model.optim_parameters():
                p.add_(1e-6)

    for _ in range(3):
        model.step(nudge)
    model.synchronize()
    after = list(model.optim_parameters())
    assert all(torch.equal(a, b + 1e-6 + 1e-6 + 1e-6) for a, b in zip(after, before, strict=True))
    for p, master in zip(model.parameters(), after, strict=True):
        assert torch.equal(p, master.to(torch.bfloat16))


def test_optim_dtype_defaults_to_the_parameters_dtype(models: Models) -> None:
    model = models.wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), 1)
    dtypes = [p.dtype for p in model.optim_parameters()]
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_clipping_in_step_fn_equals_clipping_the_reference(models: Models, num_devices: int, is_async: bool) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    norms: list[Tensor] = []
    expected_norms: list[Tensor] = []
    optimizer = adam(list(model.optim_parameters()))

    def step_fn() -> None:
        which = model if len(norms) % 2 else model.optim_parameters()
        norms.append(clip_grad_norm_(which, 0.1))
        optimizer.step()
        optimizer.zero_grad()

    def clipped(plain: torch.optim.Optimizer) -> None:
        params = [p for group in plain.param_groups for p in group["params"]]
        expected_norms.append(nn.utils.clip_grad_norm_(params, 0.1))
        plain.step()

    reference = StalenessReference(module, adam, run_step=clipped)
    for iteration in range(4):
        assert_same(call(model, iteration, mse, torch.float32), call_plain(module, iteration, mse, torch.float32))
        model.step(step_fn, is_async)
        reference.step(is_async)
    model.synchronize()
    reference.synchronize()
    assert_same(norms, expected_norms)
    assert_same_state(model.model, module)


def test_torchs_own_clipping_works_on_redirected_parameters(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    norms: list[Tensor] = []
    call(model, 0, mse, torch.float32)
    model.step(lambda: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1)), is_async=False)
    call_plain(module, 0, mse, torch.float32)
    assert_same(norms, [nn.utils.clip_grad_norm_(module.parameters(), 0.1)])


def test_loss_scaling_in_sync_steps_equals_torchs_scaler(models: Models, num_devices: int) -> None:
    """The scale begins so high that gradients overflow, falls until they do not, and grows again."""
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    options = {"init_scale": 2.0**120, "growth_interval": 2}
    ours, plain = GradScaler(**options), torch.amp.GradScaler("cpu", **options)
    optimizer, plain_optimizer = adam(list(model.optim_parameters())), adam(list(module.parameters()))

    def step_fn() -> None:
        ours.unscale_(optimizer)
        clip_grad_norm_(model, 0.5)
        ours.step(optimizer)
        optimizer.zero_grad()

    scales = [2.0**120]
    for iteration in range(8):
        loss = call(model, iteration, lambda o, y: ours.scale(1e3 * mse(o, y)), torch.float32)
        expected = call_plain(module, iteration, lambda o, y: plain.scale(1e3 * mse(o, y)), torch.float32)
        assert_same(loss, expected, f"iteration {iteration}")
        model.step(step_fn, is_async=False)
        ours.update(is_async=False)
        plain.unscale_(plain_optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        plain.step(plain_optimizer)
        plain_optimizer.zero_grad()
        plain.update()
        assert_same_state(model.model, module)
        assert ours.get_scale() == plain.get_scale()
        scales.append(ours.get_scale())
    assert any(after < before for before, after in itertools.pairwise(scales))
    assert any(after > before for before, after in itertools.pairwise(scales))


def test_loss_scaling_in_async_steps_equals_a_reference_one_update_late(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    scaler = GradScaler(init_scale=2.0**120, growth_interval=2)
    optimizer = sgd(list(model.optim_parameters()))
    scale, tracker = 2.0**120, 0
    overflowed: list[bool] = []

    def step_fn() -> None:
        scaler.step(optimizer)
        optimizer.zero_grad()

    def scaled_step(plain: torch.optim.Optimizer) -> None:
        grads = [p.grad for group in plain.param_groups for p in group["params"]]
        overflowed.append(not all(bool(g.isfinite().all()) for g in grads))
        for grad in grads:
            grad.mul_(1.0 / scale)
        if not overflowed[-1]:
            plain.step()

    reference = StalenessReference(module, sgd, run_step=scaled_step)
    for iteration in range(10):
        loss = call(model, iteration, lambda o, y: scaler.scale(1e3 * mse(o, y)), torch.float32)
        assert_same(
            loss, call_plain(module, iteration, lambda o, y, scale=scale: 1e3 * mse(o, y) * scale, torch.float32)
        )
        model.step(step_fn)
        scaler.update()
        reference.step(is_async=True)
        if iteration:  # the decision of the window before
            tracker = 0 if overflowed[-2] else tracker + 1
            scale *= 0.5 if overflowed[-2] else 1.0
            scale, tracker = (scale * 2, 0) if tracker == 2 else (scale, tracker)
        assert scaler.get_scale() == scale, f"iteration {iteration}"
    model.synchronize()
    reference.synchronize()
    assert_same_state(model.model, module)
    assert True in overflowed
    assert False in overflowed


def test_a_float16_model_with_a_scaler_equals_the_reference(models: Models, num_devices: int) -> None:
    module = seeded(mlp).half()
    model = models.wrap_copy(module, num_devices, optim_dtype=torch.float32)
    scaler = GradScaler(init_scale=2.0**10)
    optimizer = adam(list(model.optim_parameters()))
    reference = StalenessReference(
        module,
        adam,
        torch.float32,
        run_step=lambda plain: (
            [p.grad.mul_(2.0**-10) for group in plain.param_groups for p in group["params"]],
            plain.step(),
        ),
    )
    for iteration in range(4):
        call(model, iteration, lambda o, y: scaler.scale(float_mse(o, y)), torch.float16)
        call_plain(module, iteration, lambda o, y: float_mse(o, y) * 2.0**10, torch.float16)
        model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
        scaler.update()
        reference.step(is_async=True)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model.model, module)
    assert_same(list(model.optim_parameters()), reference.masters)
