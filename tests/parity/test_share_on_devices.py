"""Training whose update runs partly on devices equals training with all of it on the host, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_faults import Boom, caught_from, notes_of
from helpers_parity import Models, assert_same, batch, mse, seeded
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, checkpoint, clip_grad_norm_
from roundpipe.devices import StreamKind
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.optim import SGD, Adam, AdamW, Lion, device_share

WIDTH, ROWS, NUM_MICROBATCH, PIECE = 66, 6, 3, 1024  # weights of 4,356 elements: four pieces and an incomplete one
SLOW = pytest.mark.slow
KINDS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda params, **more: AdamW(params, lr=0.01, weight_decay=0.1, **more),
    "AdamW, 8 bits": lambda params, **more: AdamW(params, lr=0.01, moments="8bit", **more),
    "Adam, bfloat16, amsgrad": lambda params, **more: Adam(params, lr=0.01, amsgrad=True, moments="bfloat16", **more),
    "Lion": lambda params, **more: Lion(params, lr=0.001, **more),
    "SGD": lambda params, **more: SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1, **more),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_share, "PIECE", PIECE)
    monkeypatch.setattr(device_share, "_SMALLEST", PIECE)
    monkeypatch.setattr(device_share._Helper, "_is_worth", lambda self, num_left, count: True)


class Tied(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def network() -> nn.Sequential:
    """Three layers, of which the first and the last share their weights."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(Tied(first), nn.Sequential(second, nn.Dropout(0.1)), Tied(first))


def data(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return batch(ROWS, WIDTH, seed=2 * seed).to(dtype), batch(ROWS, WIDTH, seed=2 * seed + 1).to(dtype)


def made(
    models: Models,
    kind: str,
    num_devices: int,
    on_devices: bool,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> tuple[RoundPipe, Any]:
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, loss_reduction="mean")
    module = seeded(network).to(dtype)
    model = models.wrap(module, num_devices, optim_dtype=torch.float32, model_run_config=config, **options)
    return model, KINDS[kind](list(model.optim_parameters()), on_devices=on_devices)


def train(
    model: RoundPipe,
    optimizer: Any,
    steps: range,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kinds_of_steps: tuple[bool, ...] = (False,),
    calls_per_step: int = 1,
    scaled: bool = False,
) -> list[Any]:
    """Losses, norms, weights and state. Each call draws dropout; gradients are clipped."""
    params = optimizer.param_groups[0]["params"]
    scaler = GradScaler(init_scale=8.0, growth_interval=2, enabled=scaled)
    losses: list[Any] = []
    norms: list[float] = []

    def step_fn() -> None:
        scaler.unscale_(optimizer)
        norms.append(float(clip_grad_norm_(params, 0.1)))
        scaler.step(optimizer)
        optimizer.zero_grad()

    torch.manual_seed(steps.start)
    for seed in steps:
        for part in range(calls_per_step):
            x, y = data(10 * seed + part, dtype)

            def loss_fn(output: Tensor, label: Tensor) -> Tensor:
                return scaler.scale(mse(output.float(), label.float()))

            losses.append(model.forward_backward((x,), label=y, loss_fn=loss_fn))
        is_async = kinds_of_steps[seed % len(kinds_of_steps)]
        model.step(step_fn, is_async)
        scaler.update(is_async=is_async)
    model.synchronize()
    masters = [param.detach().clone() for param in params]
    return [
        losses,
        norms,
        copy.deepcopy(dict(model.state_dict())),
        masters,
        copy.deepcopy(optimizer.state_dict()["state"]),
    ]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact": ({}, {}),
    "stale": ({}, {"kinds_of_steps": (True,)}),
    "both in turn": ({}, {"kinds_of_steps": (True, True, False)}),
    "by layer": ({"staleness": 0}, {"kinds_of_steps": (True,)}),
    "accumulated": ({"staleness": 0}, {"kinds_of_steps": (True,), "calls_per_step": 2}),
    "scaled": ({}, {"kinds_of_steps": (True,), "scaled": True}),
    "float16": ({"dtype": torch.float16}, {"dtype": torch.float16}),
    "float32": ({"dtype": torch.float32}, {"dtype": torch.float32, "kinds_of_steps": (True,)}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW), 4])
def test_every_kind_of_step_on_any_number_of_devices(models: Models, way: str, num_devices: int) -> None:
    options, how = WAYS[way]
    expected = train(*made(models, "AdamW", num_devices, False, **options), range(4), **how)
    model, optimizer = made(models, "AdamW", num_devices, True, **options)
    assert_same(train(model, optimizer, range(4), **how), expected)
    assert optimizer.device_share.num_elements >= 4 * 2 * (WIDTH**2 % PIECE)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "AdamW"])
def test_every_optimizer_and_form(models: Models, kind: str) -> None:
    how: dict[str, Any] = {"kinds_of_steps": (True, True, False)}
    expected = train(*made(models, kind, 2, False), range(4), **how)
    model, optimizer = made(models, kind, 2, True)
    assert_same(train(model, optimizer, range(4), **how), expected)
    assert optimizer.device_share.num_elements


def test_masters_of_24_bits_stay_on_the_host(models: Models) -> None:
    expected = train(*made(models, "AdamW", 2, False, master_bits=24), range(3))
    model, optimizer = made(models, "AdamW", 2, True, master_bits=24)
    assert_same(train(model, optimizer, range(3)), expected)
    assert not optimizer.device_share.num_elements


def test_the_plain_loop(models: Models) -> None:
    found = []
    for on_devices in (False, True):
        model, optimizer = made(models, "AdamW", 2, on_devices)
        torch.manual_seed(0)
        for seed in range(3):
            x, y = data(seed, torch.bfloat16)
            mse(model(x).float(), y.float()).backward()
            clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach().clone() for param in model.optim_parameters()])
    assert_same(found[1], found[0])
    assert optimizer.device_share.num_elements


def test_a_checkpoint_while_steps_go_on(models: Models, tmp_path: Path) -> None:
    model, optimizer = made(models, "AdamW, 8 bits", 2, True, staleness=0)
    train(model, optimizer, range(2), kinds_of_steps=(True,))
    saving = checkpoint.save(tmp_path / "saved", model, optimizer)
    expected = train(model, optimizer, range(2, 4), kinds_of_steps=(True,))
    saving.wait()
    for on_devices in (False, True):
        other, resumed = made(models, "AdamW, 8 bits", 3, on_devices, staleness=0)
        checkpoint.load(tmp_path / "saved", other, resumed)
        assert_same(train(other, resumed, range(2, 4), kinds_of_steps=(True,)), expected)


# Failures.


def fail_once(monkeypatch: pytest.MonkeyPatch, *, allocating: bool) -> None:
    """Let the first allocation for an update fail, or else the second copy of results to the host."""
    allocate, copy_plain, calls, is_there = VirtualDevice.device_empty_strided, VirtualDevice.copy, [], set()

    def device_empty_strided(self: VirtualDevice, *args: Any) -> Tensor:
        if args[-1] is StreamKind.UPDATES and allocating and not calls:
            calls.append(None)
            raise Boom
        made = allocate(self, *args)
        is_there.add(made.untyped_storage().data_ptr())
        return made

    def copy_(self: VirtualDevice, destination: Tensor, source: Tensor, stream: StreamKind) -> None:
        is_down = stream is StreamKind.UPDATES and destination.untyped_storage().data_ptr() not in is_there
        if is_down and not allocating:
            calls.append(None)
            if len(calls) == 2:
                raise Boom
        copy_plain(self, destination, source, stream)

    monkeypatch.setattr(VirtualDevice, "device_empty_strided", device_empty_strided)
    monkeypatch.setattr(VirtualDevice, "copy", copy_)


def test_a_device_without_memory_leaves_its_share_to_the_host(
    models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(*made(models, "AdamW", 2, False), range(3))
    model, optimizer = made(models, "AdamW", 2, True)
    fail_once(monkeypatch, allocating=True)
    assert_same(train(model, optimizer, range(3)), expected)
    assert caplog.text.count("takes no part in the updates of the optimizer any more") == 1


@pytest.mark.parametrize(("is_async", "staleness"), [(False, 1), (True, 1), (True, 0)])
def test_results_that_do_not_come_down_fail_the_step(
    models: Models, monkeypatch: pytest.MonkeyPatch, is_async: bool, staleness: int
) -> None:
    model, optimizer = made(models, "AdamW", 1, True, staleness=staleness)
    train(model, optimizer, range(2), kinds_of_steps=(is_async,))
    with monkeypatch.context() as patch:
        fail_once(patch, allocating=False)
        error = caught_from(lambda: train(model, optimizer, range(2, 4), kinds_of_steps=(is_async,)))
    assert isinstance(error, Boom)
    assert any("while updating a share of a layer on cpu:0" in note for note in notes_of(error))
    assert any("optimizer step 3" in note for note in notes_of(error))
    caught_from(model.synchronize)
    seen = train(model, optimizer, range(4, 6), kinds_of_steps=(is_async,))
    assert all(torch.isfinite(loss).all() for loss in seen[0])
