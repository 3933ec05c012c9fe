"""A share of the update on a real GPU has the bits of the host alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig, clip_grad_norm_
from roundpipe.devices import Device, open_devices, parse_devices
from roundpipe.optim import SGD, Adam, AdamW, Lion, device_share

WIDTH = 96
KINDS: dict[str, Any] = {
    "AdamW": lambda params, **more: AdamW(params, lr=0.01, weight_decay=0.1, **more),
    "AdamW, 8 bits": lambda params, **more: AdamW(params, lr=0.01, moments="8bit", **more),
    "Adam, bfloat16, amsgrad": lambda params, **more: Adam(params, lr=0.01, amsgrad=True, moments="bfloat16", **more),
    "Lion": lambda params, **more: Lion(params, lr=0.001, **more),
    "SGD": lambda params, **more: SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True, **more),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_share, "PIECE", 1024)
    monkeypatch.setattr(device_share, "_SMALLEST", 1024)
    monkeypatch.setattr(device_share, "HUGE_PAGE_BYTES", 4096)
    monkeypatch.setattr(device_share._Helper, "_is_worth", lambda self, num_left, count: True)


def train(kind: str, devices: list[str], on_devices: bool, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(7)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).to(dtype)
    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
    model = RoundPipe(module, optim_dtype=torch.float32, devices=devices, model_run_config=config, **options)
    params = list(model.optim_parameters())
    optimizer = KINDS[kind](params, on_devices=on_devices)
    x, y = torch.randn(4, WIDTH).to(dtype), torch.randn(4, WIDTH).to(dtype)

    def step_fn() -> None:
        clip_grad_norm_(params, 0.1)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(6):
        model.forward_backward(
            (x,), label=y, loss_fn=lambda out, label: nn.functional.mse_loss(out.float(), label.float())
        )
        model.step(step_fn)
    model.synchronize()
    assert bool(on_devices and optimizer.device_share.num_elements) is on_devices
    states = [part for state in optimizer.state.values() for part in state.values()]
    found = [tensor.detach().clone() for tensor in (*model.parameters(), *params, *states)]
    model.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0"] * 2], ids=len)
@pytest.mark.parametrize("is_under_stress", [False, True])
def test_training_has_the_bits_of_the_host(
    kind: str, devices: list[str], is_under_stress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype, options in (
        (torch.bfloat16, {}),
        (torch.bfloat16, {"staleness": 0, "pin_model": "off"}),
        (torch.float16, {}),
        (torch.float32, {"staleness": 0}),
    ):
        expected = train(kind, ["cuda:0"], False, dtype, **options)
        with monkeypatch.context() as patch:
            if is_under_stress:
                patch.setenv("ROUNDPIPE_STRESS", "1")
            found = train(kind, devices, True, dtype, **options)
        gc.collect()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_multiply_add_rounds_once() -> None:
    (device,) = open_devices(parse_devices(["cuda:0"]))
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 1 << 20), generator=generator).to(torch.int32).view(torch.float32)
    normal = torch.randn(3, 1 << 20, generator=generator)
    for a, b, c in (bits, normal, torch.stack([normal[0], normal[1], -(normal[0] * normal[1])])):
        with device.computing():
            there = [values.cuda() for values in (a, b, c)]
            compiled, in_float64 = device.multiply_add(*there), Device.multiply_add(device, *there)
        assert torch.equal(compiled.cpu().nan_to_num(7.0), in_float64.cpu().nan_to_num(7.0))
    device.close()
