"""Layers at the edge of what a module may do: aliases of weights and buffers, graphs inside, graphs cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers_parity import Models, batch, check_forward, check_fused, seeded, total
from roundpipe import ModelExecutePlan, RoundPipeRunConfig

EACH = ModelExecutePlan([range(i, i + 1) for i in range(3)], [range(i, i + 1) for i in reversed(range(4))])
TOGETHER = ModelExecutePlan([range(3)], [range(3, 4), range(3)])
ONE_STAGE = ModelExecutePlan([], [range(4)])
PLANS = {"each": EACH, "together": TOGETHER, "one stage": ONE_STAGE}


class WithWeight(nn.Module):
    """Hands its own weight on, as models do that use it again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


class UsesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(value[0]).tanh(), value[1]


class Unembeds(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] @ value[1].t()


class HandsOnBuffer(nn.Module):
    """Counts in a buffer and hands it, or a view of it, on."""

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("counts", torch.zeros(5))
        self.is_view = is_view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.counts.add_(1)
        return self.linear(x), self.counts[:] if self.is_view else self.counts


class UsesCounts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(value[0]) * value[1], value[1]


class Multiplies(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] * value[1]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return output


class Energy(nn.Module):
    """Its output is a derivative: a graph inside the forward, differentiated again by the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.linear(x).tanh().square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


class CutsGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).detach()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class CustomFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Double.apply(x)
        return output


class ListAttribute(nn.Module):
    """Keeps its layers and parameters in plain containers too."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.scales = nn.ParameterList([torch.ones(5), torch.full((5,), 0.5)])
        self.by_name = nn.ParameterDict({"shift": torch.zeros(5)})
        self.plain = [self.parts[1], self.parts[0]]

    def forward(self, x: Tensor) -> Tensor:
        for part, scale in zip(self.plain, self.scales, strict=True):
            x = part(x) * scale + self.by_name["shift"]
        return x


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "own weight as output": lambda: nn.Sequential(WithWeight(), UsesWeight(), UsesWeight(), Unembeds()),
    "own buffer as output": lambda: nn.Sequential(HandsOnBuffer(False), UsesCounts(), UsesCounts(), Multiplies()),
    "view of own buffer as output": lambda: nn.Sequential(
        HandsOnBuffer(True), UsesCounts(), UsesCounts(), Multiplies()
    ),
    "checkpoint": lambda: nn.Sequential(nn.Linear(5, 5), Checkpointed(False), Checkpointed(False), nn.Linear(5, 5)),
    "reentrant checkpoint": lambda: nn.Sequential(
        nn.Linear(5, 5), Checkpointed(True), Checkpointed(True), nn.Linear(5, 5)
    ),
    "derivative": lambda: nn.Sequential(nn.Linear(5, 5), Energy(), Energy(), nn.Linear(5, 5)),
    "cut graph": lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), CutsGraph(), nn.Linear(5, 5)),
    "custom function": lambda: nn.Sequential(nn.Linear(5, 5), CustomFunction(), nn.Linear(5, 5), CustomFunction()),
    "containers": lambda: nn.Sequential(ListAttribute(), nn.Tanh(), ListAttribute(), nn.Linear(5, 5)),
}


@pytest.mark.parametrize("num_devices", [1, 2, 5])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", MODELS)
def test_fused_equals_the_reference(models: Models, num_devices: int, kind: str, plan: str) -> None:
    config = RoundPipeRunConfig(execute_plan=PLANS[plan])
    check_fused(models, seeded(MODELS[kind]), num_devices, (batch(8, 5),), loss_fn=total, model_run_config=config)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if "buffer" not in kind])  # there plain torch refuses
def test_forward_and_backward_equal_the_reference(models: Models, kind: str, grain: str) -> None:
    for num_devices in (1, 3):
        check_forward(
            models,
            seeded(MODELS[kind]),
            num_devices,
            (batch(8, 5),),
            model_run_config=RoundPipeRunConfig(recompute_grain=grain),
        )


def test_outputs_without_any_grad_are_handed_over_as_such(models: Models, num_devices: int) -> None:
    class Classifying(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x, "class": x.argmax(1)}

    module = seeded(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Classifying()))
    check_forward(models, module, num_devices, (batch(8, 5),), loss_of=lambda output: total(output["logits"], None))
    frozen = models.wrap_copy(module.requires_grad_(False), num_devices)
    output = frozen(batch(8, 5))
    assert not output["logits"].requires_grad
    assert not output["class"].requires_grad


@dataclasses.dataclass
class Unregistered:
    hidden: Tensor


@pytest.mark.parametrize("plan", PLANS)
def test_an_object_that_hides_tensors_with_grad_is_refused(models: Models, num_devices: int, plan: str) -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Unregistered:
            return Unregistered(self.linear(x))

    class Opens(nn.Module):
        def forward(self, value: Unregistered) -> Tensor:
            return value.hidden

    module = seeded(lambda: nn.Sequential(nn.Linear(5, 5), Hides(), Opens(), nn.Linear(5, 5)))
    config = RoundPipeRunConfig(execute_plan=PLANS[plan])
    model = models.wrap(module, num_devices)
    with pytest.raises(TypeError, match="Unregistered"):
        model.forward_backward((batch(8, 5),), loss_fn=total, run_config=config)
    with torch.no_grad():
        assert model(batch(8, 5)).shape == (8, 5)  # without grad there is nothing to lose
