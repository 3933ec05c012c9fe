"""A resumed run takes the same compiled code for the same inputs, whichever sizes come first after the resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_checkpoint import rewrite_state
from helpers_parity import Models, assert_same, batch, microbatches, seeded, total
from roundpipe import RoundPipe, checkpoint
from roundpipe.errors import CheckpointError


@pytest.fixture
def models() -> Any:
    models = Models()
    yield models
    models.close()


def rounds_otherwise(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend whose code for variable sizes rounds otherwise than that for constant sizes."""
    factor = 1.0 if all(isinstance(each, Tensor) and _is_constant(each) for each in inputs) else 1.0 + 2**-20
    return lambda *args: [each * factor if each.is_floating_point() else each for each in graph.forward(*args)]


def _is_constant(tensor: Tensor) -> bool:
    return all(type(size) is int for size in tensor.shape)


def build() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)])


class Run:
    def __init__(self, models: Models, num_devices: int = 2) -> None:
        self.model: RoundPipe = models.wrap(seeded(build), num_devices, compile={"backend": rounds_otherwise})
        self.optimizer = torch.optim.SGD(self.model.optim_parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(5)

    def steps(self, lengths: Sequence[int]) -> list[Any]:
        losses = []
        for length in lengths:
            x = batch(2, length, 6, seed=length)
            losses.append(self.model.forward_backward((x,), loss_fn=total, run_config=microbatches(2)))
            self.model.step(self._update, is_async=False)
        return losses

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.model, self.optimizer).wait()

    def load(self, folder: Path) -> None:
        checkpoint.load(folder, self.model, self.optimizer)


@pytest.mark.parametrize("lengths_after", [(7, 5, 7), (9, 7, 5)])
def test_a_resumed_run_equals_an_unbroken_one(models: Models, tmp_path: Path, lengths_after: Sequence[int]) -> None:
    unbroken = Run(models)
    unbroken.steps((5, 7))
    unbroken.save(tmp_path / "a")
    expected = unbroken.steps(lengths_after)
    resumed = Run(models, num_devices=3)
    resumed.load(tmp_path / "a")
    assert_same(resumed.steps(lengths_after), expected)
    fresh = Run(models)
    fresh.load(tmp_path / "a")
    for member in fresh.model._engine.group.members:
        assert member.compiling is not None
        member.compiling.take_over({})
    assert not all(map(torch.equal, fresh.steps(lengths_after), expected)), "the order of sizes has no effect here"


def test_a_resumed_run_that_begins_with_a_size_after_the_first_four_equals_an_unbroken_one(
    models: Models, tmp_path: Path
) -> None:
    unbroken = Run(models)
    unbroken.steps((5, 7, 9, 11, 13))
    unbroken.save(tmp_path / "a")
    expected = unbroken.steps((13, 15))
    resumed = Run(models, num_devices=3)
    resumed.load(tmp_path / "a")
    assert_same(resumed.steps((13, 15)), expected)


def test_a_checkpoint_of_an_eager_run_and_one_without_sizes_can_be_loaded(models: Models, tmp_path: Path) -> None:
    eager = models.wrap(seeded(build), 1)
    checkpoint.save(tmp_path / "a", eager).wait()
    compiled = Run(models)
    checkpoint.load(tmp_path / "a", compiled.model)
    compiled.steps((5,))
    checkpoint.save(tmp_path / "b", compiled.model).wait()
    checkpoint.load(tmp_path / "b", eager)


def test_sizes_of_another_form_are_refused(models: Models, tmp_path: Path) -> None:
    run = Run(models)
    run.steps((5,))
    run.save(tmp_path / "a")
    rewrite_state(tmp_path / "a", lambda state: state.update(compiled=[{"FUSED": 3}]))
    with pytest.raises(CheckpointError, match="does not have the expected content"):
        Run(models).load(tmp_path / "a")
