"""Optimizer state in files of a folder gives the bits of state in memory, leaves nothing behind, and fails by name."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import Models, assert_same, batch, mse, seeded
from roundpipe import RoundPipe, checkpoint, clip_grad_norm_
from roundpipe.checkpoint.save import PendingSave
from roundpipe.errors import ConfigError, HostMemoryError
from roundpipe.optim import SGD, Adam, AdamW, Lion, states
from roundpipe.optim.states import StateFolder
from roundpipe.store import host_memory

WIDTH = 130  # weights of 16,900 elements: 66 kB in float32, which is enough for a file
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam, amsgrad": lambda params, **more: Adam(params, lr=0.01, amsgrad=True, **more),
    "AdamW, 8 bits": lambda params, **more: AdamW(params, lr=0.01, moments="8bit", **more),
    "Lion": lambda params, **more: Lion(params, lr=0.001, **more),
    "SGD": lambda params, **more: SGD(params, lr=0.01, momentum=0.9, **more),
}


@pytest.fixture(autouse=True)
def _small_states_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateFolder, "least_bytes", 1 << 12)


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).to(torch.bfloat16)


def float_mse(output: Tensor, label: Tensor) -> Tensor:
    return mse(output.float(), label.float())


def train(model: RoundPipe, optimizer: torch.optim.Optimizer, steps: range, **options: Any) -> list[Tensor]:
    losses = []
    for seed in steps:
        x, y = (batch(6, WIDTH, seed=2 * seed + part).to(torch.bfloat16) for part in (0, 1))
        losses.append(model.forward_backward((x,), label=y, loss_fn=float_mse).detach().clone())

        def step() -> None:
            clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
            optimizer.zero_grad()

        model.step(step, **options)
    model.synchronize()
    return losses


def in_files(optimizer: torch.optim.Optimizer, folder: Path) -> list[Tensor]:
    """The state tensors that lie in files of the folder, by the system's list of mapped memory."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f" {folder}/" in line:
            start, end = line.split()[0].split("-")
            ranges.append(range(int(start, 16), int(end, 16)))
    tensors = [part for state in optimizer.state.values() for part in state.values() if isinstance(part, Tensor)]
    return [tensor for tensor in tensors if any(tensor.data_ptr() in addresses for addresses in ranges)]


needs_maps = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system does not list mapped memory")


@needs_maps
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_async", [False, True])
def test_training_equals_that_with_state_in_memory(models: Models, tmp_path: Path, kind: str, is_async: bool) -> None:
    found = []
    for more in ({}, {"state_folder": tmp_path / "states"}):
        model = models.wrap(seeded(network), 2, optim_dtype=torch.float32)
        optimizer = KINDS[kind](list(model.optim_parameters()), **more)
        losses = train(model, optimizer, range(4), is_async=is_async)
        found.append((losses, [param.detach().clone() for param in model.optim_parameters()]))
        large = [
            p for s in optimizer.state.values() for p in s.values() if isinstance(p, Tensor) and p.nbytes >= 1 << 12
        ]
        assert large
        assert len(in_files(optimizer, tmp_path / "states")) == (len(large) if more else 0)
    assert_same(found[0], found[1])
    assert not list((tmp_path / "states").iterdir()), "files have no names, so that nothing is left after a kill"


def test_ordinary_tensors_and_strided_ones(tmp_path: Path) -> None:
    weights = [torch.randn(80, 40), torch.randn(40, 80).t(), torch.randn(3)]
    found = []
    for more in ({}, {"state_folder": tmp_path}):
        params = [nn.Parameter(weight.clone(memory_format=torch.preserve_format)) for weight in weights]
        optimizer = AdamW(params, lr=0.1, moments="bfloat16", **more)
        for seed in range(3):
            for number, param in enumerate(params):
                values = batch(param.numel(), seed=10 * seed + number)
                param.grad = torch.empty_like(param).copy_(values.view(param.shape))
            optimizer.step()
        found.append([param.detach().clone() for param in params])
    assert_same(found[0], found[1])


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_checkpoint_moves_between_files_and_memory(models: Models, tmp_path: Path, before: bool, after: bool) -> None:
    def made(has_files: bool) -> tuple[RoundPipe, torch.optim.Optimizer]:
        model = models.wrap(seeded(network), 2, optim_dtype=torch.float32)
        more = {"state_folder": tmp_path / "states"} if has_files else {}
        return model, AdamW(list(model.optim_parameters()), lr=0.01, **more)

    model, optimizer = made(before)
    train(model, optimizer, range(2), is_async=False)
    checkpoint.save(tmp_path / "saved", model, optimizer).wait()
    expected = train(model, optimizer, range(2, 4), is_async=False)
    other, resumed = made(after)
    checkpoint.load(tmp_path / "saved", other, resumed)
    if os.path.exists("/proc/self/maps"):
        assert bool(in_files(resumed, tmp_path / "states")) is after
    assert_same(train(other, resumed, range(2, 4), is_async=False), expected)


def anonymous_bytes() -> int:
    """Memory of this process that is no page of a file."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@needs_maps
def test_a_checkpoint_takes_no_memory_for_the_state(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured at each write, when a copy of what is written would exist."""
    width, seen = 1024, []
    blocks = seeded(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))).to(torch.bfloat16))
    model = models.wrap(blocks, 1, optim_dtype=torch.float32)
    optimizer = AdamW(list(model.optim_parameters()), state_folder=tmp_path / "states")
    x = batch(2, width).to(torch.bfloat16)
    model.forward_backward((x,), label=x, loss_fn=float_mse)
    model.step(optimizer.step, is_async=False)
    assert len(in_files(optimizer, tmp_path / "states")) == 4
    write_tensor = PendingSave._write_tensor

    def watched(save: PendingSave, source: Any, put: Callable[[memoryview], None]) -> None:
        def see(memory: memoryview) -> None:
            seen.append(anonymous_bytes())
            put(memory)

        write_tensor(save, source, see)

    monkeypatch.setattr(PendingSave, "_write_tensor", watched)
    checkpoint.save(tmp_path / "warm", model, optimizer).wait()
    seen.clear()
    before = anonymous_bytes()
    checkpoint.save(tmp_path / "saved", model, optimizer).wait()
    assert max(seen) - before < 4 * width**2, "less than one of the four moments"


@needs_maps
def test_a_state_dict_moves_into_files(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.randn(80, 80))]
    source, target = AdamW(params), AdamW(copy.deepcopy(params), state_folder=tmp_path)
    params[0].grad = torch.ones(80, 80)
    source.step()
    target.load_state_dict(source.state_dict())
    assert len(in_files(target, tmp_path)) == 2
    for own, other in zip(target.state.values(), source.state.values(), strict=True):
        assert_same(dict(own), dict(other))


@needs_maps
def test_the_next_layer_is_read_ahead(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.wrap(seeded(network), 1, optim_dtype=torch.float32)
    optimizer = AdamW(list(model.optim_parameters()), state_folder=tmp_path)
    train(model, optimizer, range(1), is_async=False)
    read: list[tuple[str, int]] = []
    monkeypatch.setattr(
        host_memory, "read_pages_ahead", lambda part: read.append((threading.current_thread().name, part.data_ptr()))
    )
    train(model, optimizer, range(1, 2), is_async=False)
    for thread in threading.enumerate():
        if thread.name.endswith("read-ahead"):
            thread.join()
    assert {name for name, _ in read} == {"roundpipe-read-ahead"}
    expected = [part.data_ptr() for part in in_files(optimizer, tmp_path)]
    assert len(expected) == 3 * 2 + 0
    assert len(read) == 4, "two moments of each weight but that of the layer which comes first"
    assert {address for _, address in read} < set(expected)


def test_a_full_disk_is_reported_before_anything_changes(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.wrap(seeded(network), 1, optim_dtype=torch.float32)
    optimizer = AdamW(list(model.optim_parameters()), state_folder=tmp_path)
    before = [param.detach().clone() for param in model.optim_parameters()]
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(states.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(HostMemoryError, match=r"state needs 0\.000 GB in .* Free space, choose another state_folder"):
        train(model, optimizer, range(1), is_async=False)
    assert_same([param.detach() for param in model.optim_parameters()], before)
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateFolder, "least_bytes", 1 << 12)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostMemoryError, match="No space left on device"):
        train(model, optimizer, range(1), is_async=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_hold_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state_folder='.*file' cannot hold files"):
        AdamW([nn.Parameter(torch.zeros(2))], state_folder=str(tmp_path / "file"))
