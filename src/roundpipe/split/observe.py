"""Runs blocks and records what they do: returned values, changed containers, captured outputs.

`call_block` runs one block. `Recording` runs a whole model on a stub tree that includes all modules; calibration
compares every later run with this recording.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ModelSplitError
from roundpipe.module_copy import num_hooks
from roundpipe.split.determinism import ChoicesSeen
from roundpipe.split.head_loss import FusedHead, find_head, loss_arguments
from roundpipe.split.plan import CallOutline, State
from roundpipe.split.stubs import directed_by, unstubbed
from roundpipe.split.transformers import Captured, active_collector, call_capturing, own_caches, wanted_captures
from roundpipe.split.values import (
    Key,
    containers_in,
    content_of,
    fill,
    is_changed,
    leaves_of,
    outlined,
    structure_of,
    tensors_of,
)


def call_block(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    captures: Mapping[str, Any],
    *,
    has_containers: bool = True,
) -> tuple[dict[str, Any], Captured]:
    """Run a block; returns {"ret": its return value, "side": its side effects} and its captured outputs.

    Side effects are the new contents of the dicts and lists among the arguments that the block changed. Their keys are
    positions in the list of all dicts and lists among the arguments.
    captures: see `wanted_captures`. has_containers: False if the arguments contain no dict or list.
    """
    if not has_containers and not captures:  # a fast path for the common case
        return {"ret": block(*args, **kwargs), "side": {}}, {}
    containers = _containers(args, kwargs) if has_containers else []
    before = [content_of(container) for container in containers]
    returned, captured = call_capturing(lambda: block(*args, **kwargs), captures)
    after = zip(containers, before, strict=True)
    side = {i: content_of(container) for i, (container, old) in enumerate(after) if is_changed(container, old)}
    return {"ret": returned, "side": side}, captured


def repeat_side_effects(side: Mapping[int, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Apply side effects recorded by `call_block` to the dicts and lists among these arguments."""
    if side:
        containers = _containers(args, kwargs)
        for position, content in side.items():
            fill(containers[position], content)


def _containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [container for value in (*args, *kwargs.values()) for container in containers_in(value)]


@dataclasses.dataclass
class RecordedCall:
    """One call of a block. Lists have one entry per leaf of the arguments or outputs."""

    path: str
    arguments: list[Any]  # the objects that were passed
    argument_values: list[Any]  # copies of the arguments, made before the call
    argument_versions: list[int | None]  # version counters of tensors before the call; None for other objects
    argument_structure: Any
    outputs: list[Any]  # the objects that were returned
    output_values: list[Any]  # copies of the outputs, made after the call
    output_versions: list[int | None]  # version counters of tensors after the call; None for other objects
    captured_values: Captured
    outline: CallOutline


@dataclasses.dataclass
class RecordedTap:
    """One call of a tap. `output_values` has one entry per leaf of the tap's output."""

    path: str
    segment: int
    output_values: list[Any]  # copies of the outputs, made after the call
    outline: Any  # the output with an Outline in place of each tensor


class Recording:
    """A director, see split/stubs.py, that runs every block and tap of a forward pass and records their calls."""

    device = torch.device("cpu")

    def __init__(self, blocks: frozenset[str], modules: Mapping[str, nn.Module]) -> None:
        """blocks: paths of the blocks. modules: by path, the modules of blocks and taps, before the forward runs."""
        self.calls: list[RecordedCall] = []
        self.taps: list[RecordedTap] = []
        self._blocks = blocks
        self._num_hooks = {path: num_hooks(module) for path, module in modules.items()}
        # For each call of the loss function: its arguments, its result, and the function.
        self._losses: list[tuple[dict[str, Any], Any, Any]] = []
        # For each tap: its module, its first input tensor, and the first leaf of its output.
        self._taps_run: list[tuple[nn.Module, torch.Tensor, Any]] = []

    def run(self, tree: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with directed_by(self):
            return tree(*args, **kwargs)

    def loss(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = plain(*args, **kwargs)
        self._losses.append((loss_arguments(args, kwargs), value, plain))
        return value

    def head(self) -> FusedHead | None:
        """Return the head that can be fused with the model's loss, or None."""
        if len(self._losses) != 1:
            return None
        given, loss, plain = self._losses[0]
        logits = given.get("logits")
        if not isinstance(logits, torch.Tensor) or not isinstance(loss, torch.Tensor) or loss.dim():
            return None
        return find_head(logits, loss, self._taps_run, given, plain)

    def call(self, stub: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        real = stub._modules["real"]
        assert real is not None
        if num_hooks(real) != self._num_hooks[path]:
            raise ModelSplitError(
                f"its forward registers hooks on {path} while it runs, as adapters with settings for each row do "
                "(aLoRA, adapter_names)"
            )
        return self._block(real, path, args, kwargs) if path in self._blocks else self._tap(real, path, args, kwargs)

    def _tap(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = module(*args, **kwargs)
        leaves = leaves_of(value)
        inputs = tensors_of((args, kwargs))
        self._taps_run.append((module, inputs[0] if inputs else torch.empty(0), leaves[0]))
        values = [_copied(leaf) for leaf in leaves]
        self.taps.append(RecordedTap(path, len(self.calls), values, outlined(value)))
        return value

    def _block(self, block: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tuple(map(unstubbed, args)), {name: unstubbed(value) for name, value in kwargs.items()}
        arguments = leaves_of((args, kwargs))
        values, versions = [_copied(leaf) for leaf in arguments], [_version(leaf) for leaf in arguments]
        structure = structure_of((args, kwargs))
        collector = active_collector()
        with ChoicesSeen() as choices:
            value, captured = call_block(block, *own_caches(args, kwargs), wanted_captures(collector))
        for kind, found in captured.items():
            assert collector is not None
            collector[kind].extend(found)
        outputs = leaves_of(value)
        changed = any(_version(leaf) != version for leaf, version in zip(arguments, versions, strict=True))
        outline = CallOutline(
            outlined(value),
            tuple(_position_of(leaf, arguments) for leaf in outputs),
            tuple(_position_of_like(leaf, arguments) for leaf in outputs),
            {kind: [outlined(leaf) for leaf in found] for kind, found in captured.items()},
            changed,
            choices.seen,
        )
        self.calls.append(
            RecordedCall(
                path,
                arguments,
                values,
                versions,
                structure,
                outputs,
                [_copied(leaf) for leaf in outputs],
                [_version(leaf) for leaf in outputs],
                {kind: [_copied(leaf) for leaf in found] for kind, found in captured.items()},
                outline,
            )
        )
        return value["ret"]

    def candidates(self, point: int) -> State:
        """Return copies of all tensors that `point` may read: the outputs of all blocks and taps before it."""
        state: State = {}
        for k, call in enumerate(self.calls[:point]):
            for j, leaf in enumerate(call.output_values):
                if isinstance(leaf, torch.Tensor):
                    state["out", k, j] = leaf.clone()
            for kind, found in call.captured_values.items():
                for i, leaf in enumerate(found):
                    if isinstance(leaf, torch.Tensor):
                        state["cap", k, kind, i] = leaf.clone()
        for t, tap in enumerate(self.taps):
            if tap.segment < point:
                for j, leaf in enumerate(tap.output_values):
                    if isinstance(leaf, torch.Tensor):
                        state["tap", t, j] = leaf.clone()
        return state

    def key_of_argument(self, k: int, position: int) -> Key | None:
        """Return the key of the argument at `position` of call k if this argument is the output of an earlier call.

        Returns None if it is not, or if it was changed in place after the earlier call returned it.
        """
        call = self.calls[k]
        leaf = call.arguments[position]
        for earlier, source in enumerate(self.calls[:k]):
            for j, output in enumerate(source.outputs):
                # A block may return one of its arguments. Such an output keeps the key that it had as an argument.
                is_it = output is leaf and source.outline.same_as[j] is None
                if is_it and source.output_versions[j] == call.argument_versions[position]:
                    return ("out", earlier, j)
        return None


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _version(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) else None


def _position_of(leaf: Any, arguments: list[Any]) -> int | None:
    """Return the position of the argument that is the same object as the tensor `leaf`, or None."""
    if not isinstance(leaf, torch.Tensor):
        return None
    return next((i for i, argument in enumerate(arguments) if argument is leaf), None)


def _position_of_like(leaf: Any, arguments: list[Any]) -> int | None:
    """Return the position of the first argument with the shape and dtype of the tensor `leaf`, or None."""
    if not isinstance(leaf, torch.Tensor):
        return None
    return next(
        (
            i
            for i, other in enumerate(arguments)
            if isinstance(other, torch.Tensor) and other.shape == leaf.shape and other.dtype == leaf.dtype
        ),
        None,
    )
