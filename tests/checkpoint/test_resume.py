"""A run that is resumed from a checkpoint equals the run that was not interrupted, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers_checkpoint import MakeOptimizer, Training, assert_same_bits, momentum
from roundpipe import ModelExecutePlan, checkpoint, optim
from roundpipe.checkpoint.format import read_manifest
from roundpipe.store import OptimizerCopy

STEPS = 6


def torch_adamw(params: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, amsgrad=True)


def two_groups(params: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    every = list(params)
    return optim.Adam([{"params": every[:2], "lr": 1e-3}, {"params": every[2:], "weight_decay": 0.1}], lr=lr)


def resumed_equals_whole(folder: Path, open_one: list[Training]) -> None:
    """The first training runs through; each of the others resumes after another number of steps."""
    whole, *others = open_one
    losses = whole.train(STEPS, save_in=folder)
    end = whole.bits()
    whole.model.close()
    for start, other in zip((2, 4, 2), others, strict=False):
        other.load(folder / f"step-{start}")
        assert other.step == start
        assert other.train(STEPS - start, save_in=folder / "again") == losses[start:]
        assert_same_bits(other.bits(), end)
        other.model.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "stale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_on_other_numbers_of_devices(tmp_path: Path, dtype: torch.dtype, is_async: bool, scaled: bool) -> None:
    counts = (2, 1, 3)
    resumed_equals_whole(
        tmp_path, [Training(dtype=dtype, is_async=is_async, scaled=scaled, num_devices=count) for count in counts]
    )


def test_with_other_plans(tmp_path: Path) -> None:
    plans = [
        None,
        ModelExecutePlan([range(0, 1), range(1, 2)], [range(2, 4), range(0, 2)]),
        ModelExecutePlan([], [range(0, 4)]),
    ]
    resumed_equals_whole(tmp_path, [Training(plan=plan) for plan in plans])


def our_sgd(params: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return optim.SGD(params, lr=lr, momentum=0.9, dampening=0.3, weight_decay=0.01)


def lion(params: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return optim.Lion(params, lr=lr / 10, weight_decay=0.1)


@pytest.mark.parametrize("make_optimizer", [torch_adamw, momentum, two_groups, lion, our_sgd])
@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "stale"])
def test_with_other_optimizers(tmp_path: Path, make_optimizer: MakeOptimizer, is_async: bool) -> None:
    made = [Training(is_async=is_async, make_optimizer=make_optimizer) for _ in range(2)]
    resumed_equals_whole(tmp_path, made)


def test_into_a_run_that_has_trained_already(tmp_path: Path) -> None:
    whole, other = Training(), Training()
    losses = whole.train(STEPS, save_in=tmp_path)
    other.train(5)
    other.load(tmp_path / "step-2")
    assert other.train(STEPS - 2, save_in=tmp_path / "again") == losses[2:]
    assert_same_bits(other.bits(), whole.bits())


def test_before_the_first_step(tmp_path: Path) -> None:
    whole, other = Training(), Training()
    pending = whole.save(tmp_path / "start")
    losses = whole.train(2)
    pending.wait()
    torch.manual_seed(99)
    other.load(tmp_path / "start")
    assert other.train(2) == losses


def test_masters_that_have_memory_for_their_values_resume_as_halves(tmp_path: Path) -> None:
    """An operation of torch on the masters makes them whole tensors; the file then holds these."""
    whole, other = Training(), Training()
    whole.train(2)
    sizes = [float(master.detach().abs().sum()) for master in whole.model.optim_parameters()]
    whole.save(tmp_path / "whole").wait()
    other.load(tmp_path / "whole")
    assert all(
        isinstance(master, OptimizerCopy) and master.halves is not None for master in other.model.optim_parameters()
    )
    assert [float(master.detach().abs().sum()) for master in other.model.optim_parameters()] == sizes
    assert_same_bits(other.bits(), whole.bits())


def test_halves_resume_in_masters_that_have_memory(tmp_path: Path) -> None:
    whole = Training()
    whole.train(2)
    whole.save(tmp_path / "halves").wait()
    names = read_manifest(tmp_path / "halves").tensors["optimizer"]
    assert any(name.startswith("master.low/") for name in names)
    assert not any(name.startswith("master/") for name in names), "a halved master was widened"
    other = Training()
    for master in other.model.optim_parameters():
        assert isinstance(master, OptimizerCopy)
        master.take_memory()
    other.load(tmp_path / "halves")
    assert_same_bits(other.bits(), whole.bits())


def test_masters_half_way_between_two_weights(tmp_path: Path) -> None:
    """Their low half does not tell which of the two weights is theirs, so a bit of their own does."""

    def unmoved(params: Any, lr: float) -> torch.optim.Optimizer:
        return optim.AdamW(params, lr=0.0, weight_decay=0.0)

    whole = Training(make_optimizer=unmoved)
    with torch.no_grad():
        for master in whole.model.optim_parameters():
            bits = (master.detach().clone().view(torch.int32) & -0x10000) | 0x8000
            master.copy_(bits.view(torch.float32))
    whole.train(2)  # the masters are halves again
    assert all("ties" in vars(master.halves) for master in whole.model.optim_parameters())
    assert any(bool(master.halves.ties.any()) for master in whole.model.optim_parameters())
    whole.save(tmp_path / "ties").wait()
    other = Training(make_optimizer=unmoved)
    other.load(tmp_path / "ties")
    assert_same_bits(other.bits(), whole.bits())


def test_all_generators_are_restored(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    training = Training()
    training.save(tmp_path / "one").wait()
    drawn = [torch.rand(3).tolist(), random.random(), numpy.random.rand(2).tolist()]
    for restore in (lambda: training.load(tmp_path / "one"), lambda: checkpoint.load_rng(tmp_path / "one")):
        restore()
        assert [torch.rand(3).tolist(), random.random(), numpy.random.rand(2).tolist()] == drawn


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    training = Training()
    extra = {
        "numbers": [1, 2.5, 1e-300, float("inf"), True, None],
        "tuple": (1, ("a",)),
        "keys": {1: "one", (2, 3): "pair"},
        "tensor": torch.arange(4, dtype=torch.bfloat16).view(2, 2),
        "bytes": b"\x00\xff",
        "text": "text",
    }
    checkpoint.save(tmp_path / "one", training.model, extra=extra).wait()
    assert_same_bits(checkpoint.load(tmp_path / "one", training.model), extra)
