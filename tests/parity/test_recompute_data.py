"""save_for_recompute, get_recompute_data and doing_recompute in the phases of a layer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import Models, assert_same, assert_same_grads, batch, call_reference, microbatches, seeded, total
from roundpipe import ModelExecutePlan, RoundPipeRunConfig, doing_recompute, get_recompute_data, save_for_recompute
from roundpipe.errors import RecomputeError

RECOMPUTED = ModelExecutePlan([range(2)], [range(2, 3), range(2)])
ONE_STAGE = ModelExecutePlan([], [range(3)])


class Saving(nn.Module):
    """Computes something costly once, keeps it, and finds it again; writes down what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.log: list[tuple[bool, Any]] = []
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        if doing_recompute():
            scale, nested = get_recompute_data()
        else:
            scale, nested = x.detach().mean(0) * 2, {"list": [x.detach().sum(), 3, "text", None]}
            save_for_recompute(scale, nested)
        with self.lock:
            self.log.append((doing_recompute(), (scale.clone(), nested["list"][0].clone(), nested["list"][1:])))
        y: Tensor = self.linear(x) * scale
        return y


class Plain(Saving):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * (x.detach().mean(0) * 2)
        return y


def build(layer: type[Saving]) -> nn.Sequential:
    return nn.Sequential(layer(), nn.Tanh(), layer())


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_the_data_comes_back_for_its_layer_and_microbatch(models: Models, num_devices: int, grain: str) -> None:
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=RECOMPUTED, recompute_grain=grain)
    model = models.wrap(seeded(lambda: build(Saving)), num_devices, model_run_config=config)
    reference = seeded(lambda: build(Plain))
    for call in range(2):
        x = batch(8, 5, seed=call)
        loss = model.forward_backward((x,), loss_fn=total)
        assert_same(loss, call_reference(reference, (x,), loss_fn=total, num_microbatch=3).loss)
        model.synchronize()  # so that the log of one call is whole before the next one writes into it
    assert_same_grads(model.model, reference)
    first, fused = model.model[0].log, model.model[2].log
    saved = [values for recompute, values in first if not recompute]
    assert_same([values for recompute, values in first if recompute], saved)
    assert len(saved) == 6
    assert [recompute for recompute, _ in fused] == [False] * 6


def test_pending_forwards_keep_their_data_apart(models: Models, num_devices: int) -> None:
    model = models.wrap(seeded(lambda: build(Saving)), num_devices)
    outputs = [model(batch(8, 5, seed=seed), roundpipe_run_config=microbatches(3)) for seed in range(3)]
    for output in reversed(outputs):
        total(output, None).backward()
    model.synchronize()
    for layer in (model.model[0], model.model[2]):
        saved = [values for recompute, values in layer.log if not recompute]
        recalled = [values for recompute, values in layer.log if recompute]
        assert_same(recalled, saved[6:] + saved[3:6] + saved[:3])


def test_in_the_fused_stage_and_without_grad_nothing_is_recomputed(models: Models, num_devices: int) -> None:
    model = models.wrap(seeded(lambda: build(Saving)), num_devices)
    with torch.no_grad():
        model(batch(8, 5))
    model.forward_backward((batch(8, 5),), loss_fn=total, run_config=RoundPipeRunConfig(execute_plan=ONE_STAGE))
    model.synchronize()
    assert not any(recompute for layer in (model.model[0], model.model[2]) for recompute, _ in layer.log)


def test_outside_a_layer_nothing_is_being_recomputed() -> None:
    assert not doing_recompute()
    save_for_recompute(torch.ones(1))
    with pytest.raises(RecomputeError):
        get_recompute_data()


class Misusing(nn.Module):
    def __init__(self, misuse: str) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.misuse = misuse

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.misuse == "twice":
            save_for_recompute(1)
            save_for_recompute(2)
        elif self.misuse == "requires grad":
            save_for_recompute({"y": [y]})
        elif self.misuse == ("nothing saved" if doing_recompute() else "in forward"):
            get_recompute_data()
        return y


@pytest.mark.parametrize("misuse", ["twice", "requires grad", "nothing saved", "in forward"])
def test_misuse_is_refused_and_the_model_goes_on(models: Models, num_devices: int, misuse: str) -> None:
    module = nn.Sequential(Misusing(misuse), nn.Tanh(), nn.Linear(5, 5))
    config = RoundPipeRunConfig(execute_plan=RECOMPUTED)
    model = models.wrap(module, num_devices, model_run_config=config)

    def call() -> None:
        model.forward_backward((batch(8, 5),), loss_fn=total)
        model.synchronize()

    with pytest.raises(RecomputeError):
        call()
    module[0].misuse = "none"
    call()
    assert all(p.grad is not None for p in model.parameters())


def test_an_empty_save_comes_back_as_an_empty_tuple(models: Models) -> None:
    seen: list[Any] = []

    class SavesNothing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if doing_recompute():
                seen.append(get_recompute_data())
            else:
                save_for_recompute()
            return super().forward(x)

    model = models.wrap(nn.Sequential(SavesNothing(5, 5), nn.Tanh(), nn.Linear(5, 5)), 2)
    model.forward_backward((batch(8, 5),), loss_fn=total, run_config=RoundPipeRunConfig(execute_plan=RECOMPUTED))
    model.synchronize()
    assert seen == [(), (), ()]
