"""Wraps models of repeated blocks as layers, and compares what they compute with the plain model, bit for bit.

Used by tests/models. A toy is an nn.Module with a list of blocks and Python code between them; it returns a
tensor, or a dict with its own loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from helpers_parity import Outcome, PendingForward, assert_same, call_reference, total
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

WIDTH = 6
Inputs = dict[str, Any]


class Block(nn.Module):
    """A residual layer of two modules; `bias` is whatever the caller adds to its input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        mixed: Tensor = self.linear(self.norm(h if bias is None else h + bias))
        return h + mixed.tanh()


class Toy(nn.Module):
    """Embeds, runs its blocks and applies a head; subclasses say what happens between."""

    def __init__(self, num_blocks: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(num_blocks)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def rows(num: int = 6, *, seed: int = 5, width: int = WIDTH) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed))


def own_loss(output: Any, label: Any) -> Tensor:
    """The loss the model has computed; for a plain tensor, a loss that gives every element a different gradient."""
    if isinstance(output, Mapping):
        loss: Tensor = output["loss"]
        return loss
    return total(output, label)


class SplitModels:
    """Wraps models that must come out split into layers, and closes them."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def wrap(
        self, module: nn.Module, example: Mapping[str, Any] | Sequence[Any], num_devices: int = 1, **options: Any
    ) -> RoundPipe:
        options = {"use_sequential_preset": True, "devices": ["cpu"] * num_devices, **options}
        model = wrap_model_to_roundpipe(module, example_inputs=example, **options)
        self._open.append(model)
        assert isinstance(model, RoundPipe)
        return model

    def keep(self, model: Any) -> Any:
        self._open.append(model)
        return model

    def close(self) -> None:
        for model in reversed(self._open):
            model.close()
        self._open.clear()


def recomputing(model: RoundPipe, num_microbatch: int) -> RoundPipeRunConfig:
    """One stage per layer; all but the last are recomputed."""
    last = model.num_layers - 1
    stages = [range(i, i + 1) for i in range(last)]
    plan = ModelExecutePlan(stages, [range(last, last + 1), *reversed(stages)])
    return RoundPipeRunConfig(num_microbatch=num_microbatch, execute_plan=plan)


def plain_call(
    module: nn.Module,
    inputs: Inputs,
    loss_fn: Callable[[Any, Any], Tensor] = own_loss,
    label: Any = None,
    num_microbatch: int = 3,
) -> Outcome:
    return call_reference(module, (), copy.deepcopy(inputs), label, loss_fn, num_microbatch)


def train_call(
    model: RoundPipe,
    inputs: Inputs,
    loss_fn: Callable[[Any, Any], Tensor] = own_loss,
    label: Any = None,
    config: RoundPipeRunConfig | None = None,
) -> tuple[Any, Any]:
    config = config or RoundPipeRunConfig(num_microbatch=3)
    loss, outputs = model.forward_backward((), inputs, label, loss_fn, return_outputs=True, run_config=config)
    return loss, tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def assert_same_training(model: RoundPipe, reference: nn.Module, shared: Sequence[str] = ()) -> None:
    """Gradients, weights and buffers. `shared`: names of parameters that several layers use; those to rounding."""
    model.synchronize()
    for (name, param), (other_name, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other_name
        if name in shared:
            assert param.grad is not None, name
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)
        else:
            assert_same(param.grad, other.grad, f"gradient of {name}")
    assert_same(dict(model.state_dict()), dict(reference.state_dict()), "state_dict")


def layer_kinds(model: Any) -> list[str]:
    return [type(layer).__name__.removesuffix("Layer") for layer in model.model]


def check_split(
    models: SplitModels,
    module: nn.Module,
    inputs: Inputs,
    num_devices: int = 1,
    *,
    loss_fn: Callable[[Any, Any], Tensor] = own_loss,
    label: Any = None,
    num_microbatch: int = 3,
    shared: Sequence[str] = (),
    example: Any = None,
    **options: Any,
) -> RoundPipe:
    """Losses, outputs, gradients and buffers of a planned call, one with everything recomputed, and forward()."""
    reference = copy.deepcopy(module)
    model = models.wrap(copy.deepcopy(module), inputs if example is None else example, num_devices, **options)
    for config in (RoundPipeRunConfig(num_microbatch=num_microbatch), recomputing(model, num_microbatch)):
        expected = plain_call(reference, inputs, loss_fn, label, num_microbatch)
        loss, outputs = train_call(model, inputs, loss_fn, label, config)
        assert_same(loss, expected.loss, "loss")
        assert_same(outputs, expected.outputs, "outputs")
        assert_same_training(model, reference, shared)
    check_forward_of(model, reference, inputs, loss_fn, num_microbatch, shared)
    return model


def check_forward_of(
    model: RoundPipe,
    reference: nn.Module,
    inputs: Inputs,
    loss_fn: Callable[[Any, Any], Tensor] = own_loss,
    num_microbatch: int = 3,
    shared: Sequence[str] = (),
) -> None:
    """forward() and backward() onto the gradients so far; the loss is one of the merged outputs."""
    expected = PendingForward(reference, (), copy.deepcopy(inputs), num_microbatch)
    output = model(**inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=num_microbatch))
    loss_fn(expected.output, None).backward()
    expected.backward()
    loss_fn(output, None).backward()
    assert_same_training(model, reference, shared)
