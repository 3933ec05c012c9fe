"""Models whose code changes the autograd graph: in layers the loss would be right, but gradients could be wrong.

Compared with the plain model as in test_splitting. A model that cannot be followed may be refused, but never be trained
on other gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers_split import WIDTH, Block, SplitModels, Toy, check_split, rows
from roundpipe.split import verify as verification


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


class Detaching(Toy):
    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.embed(x)).detach()
        for block in self.blocks[1:]:
            h = block(h)
        return self.head(h)


class Scale(torch.autograd.Function):
    """The identity, with three times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


class Scaling(Toy):
    def forward(self, x: Tensor) -> Tensor:
        h = Scale.apply(self.embed(x))
        for block in self.blocks:
            h = Scale.apply(block(h))
        return self.head(h)


class Checkpointed(Toy):
    """Checkpoints its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) * 1.5
        return self.head(h)


class WithoutGrad(Toy):
    """Its first block runs under no_grad, as a frozen tower does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        with torch.no_grad():
            h = self.blocks[0](h)
        for block in self.blocks[1:]:
            h = block(h)
        return self.head(h)


class Hooked(Toy):
    """Doubles the gradient of a hidden state with a hook."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            if h.requires_grad:
                h.register_hook(lambda gradient: gradient * 2)
        return self.head(h)


class FaintlyHooked(Toy):
    """The same, but only small gradients of one block pass the hook."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[1](self.blocks[0](self.embed(x)))
        aside = self.blocks[2](h.detach())
        if aside.requires_grad:
            aside.register_hook(lambda gradient: gradient * 2)
        return self.head(h) + 1e-4 * aside


class SometimesDetached(Toy):
    """One of two readers of a hidden state is cut off from it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h) + h.detach().tanh()
        return self.head(h)


FOLLOWED: dict[str, Callable[[], nn.Module]] = {
    "detach between blocks": Detaching,
    "an autograd function between blocks": Scaling,
    "blocks checkpointed by the model": Checkpointed,
    "a reader cut off": SometimesDetached,
}
FOLLOWED_OR_REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a block under no_grad": WithoutGrad,
    "a hook on a hidden state": Hooked,
    "a hook where gradients are small": FaintlyHooked,
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_gradients_are_the_plain_models(models: SplitModels, kind: str) -> None:
    check_split(models, seeded(FOLLOWED[kind]), {"x": rows()}, 2)


@pytest.mark.parametrize("kind", FOLLOWED_OR_REFUSED)
def test_a_model_is_refused_or_its_gradients_are_those_of_the_plain_model(models: SplitModels, kind: str) -> None:
    with contextlib.suppress(NotImplementedError):  # to be refused is as good
        check_split(models, seeded(FOLLOWED_OR_REFUSED[kind]), {"x": rows()}, 2)


@pytest.mark.parametrize("kind", [*FOLLOWED, *FOLLOWED_OR_REFUSED])
def test_gradients_of_large_weights_are_not_computed_in_verification(
    models: SplitModels, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The gradients of small weights still show whether the split is right."""
    monkeypatch.setattr(verification, "_LARGE", 0)
    module = seeded({**FOLLOWED, **FOLLOWED_OR_REFUSED}[kind])
    with contextlib.suppress(NotImplementedError) if kind in FOLLOWED_OR_REFUSED else contextlib.nullcontext():
        check_split(models, module, {"x": rows()}, 2)
    assert all(param.requires_grad for param in module.parameters())


# Code that cannot run in layers.


class ModuleAsArgument(Toy):
    """Passes a module with weights to its blocks."""

    class Block(Block):
        def forward(self, h: Tensor, shift: Any = None) -> Tensor:  # type: ignore[override]
            return super().forward(h, shift(h))

    def __init__(self) -> None:
        super().__init__(block=self.Block)
        self.shift = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, self.shift)
        return self.head(h)


class CheckpointedHead(Toy):
    """Checkpoints its own code, which then runs again in backward, outside of the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return checkpoint(lambda t: self.head(t).tanh(), h, use_reentrant=False)


class ReentrantBlocks(Toy):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.head(h)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a module with weights as an argument": ModuleAsArgument,
    "a checkpoint around the model's own code": CheckpointedHead,
    "reentrant checkpoints": ReentrantBlocks,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_code_that_cannot_be_split_is_refused_with_a_model_split_error(models: SplitModels, kind: str) -> None:
    """So that the model is wrapped part by part if the user does not insist on layers."""
    with pytest.raises(NotImplementedError, match="not split into layers"):
        models.wrap(seeded(REFUSED[kind]), {"x": rows()})
