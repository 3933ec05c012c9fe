"""One run of a model over a stub tree with everything real, recorded: the truth that calibration compares with.

Keeps the choices of a router: a block that is recomputed sends each token to the experts its forward sent it to.

Used by block layers. Sums on a GPU need not come out the same twice, and where two experts are nearly equal the last
bit decides. So the indices of every top-k and of every largest value along a dimension are saved in a block's forward
and used again in its recomputation.

Runs one block apart from the model around it, and says everything it did: returned, wrote, captured.

Used by calibration and by block layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.split.determinism import ChoicesSeen
from roundpipe.split.head_loss import FusedHead, find_head
from roundpipe.split.plan import CallOutline, State
from roundpipe.split.stubs import directed_by, unstubbed
from roundpipe.split.transformers import Captured, active_collector, call_capturing, own_caches, wanted_captures
from roundpipe.split.values import (
    Key,
    Outline,
    containers_in,
    content_of,
    fill,
    is_changed,
    leaves_of,
    map_leaves,
    structure_of,
    tensors_of,
)


def call_block(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    captures: Mapping[str, int],
    *,
    has_containers: bool = True,
) -> tuple[dict[str, Any], Captured]:
    """{"ret": what it returned, "side": by position the new content of dicts and lists it changed}, and captures."""
    if not has_containers and not captures:  # as most
        return {"ret": block(*args, **kwargs), "side": {}}, {}
    containers = _containers(args, kwargs) if has_containers else []
    before = [content_of(container) for container in containers]
    returned, captured = call_capturing(lambda: block(*args, **kwargs), captures)
    after = zip(containers, before, strict=True)
    side = {i: content_of(container) for i, (container, old) in enumerate(after) if is_changed(container, old)}
    return {"ret": returned, "side": side}, captured


def repeat_side_effects(side: Mapping[int, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the caller's containers be what the block made of them."""
    if side:
        containers = _containers(args, kwargs)
        for position, content in side.items():
            fill(containers[position], content)


def _containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [container for value in (*args, *kwargs.values()) for container in containers_in(value)]


@dataclasses.dataclass
class RecordedCall:
    path: str
    arguments: list[Any]  # the very leaves
    argument_values: list[Any]  # their values when the call was made
    argument_versions: list[int | None]
    argument_structure: Any
    outputs: list[Any]
    output_values: list[Any]
    output_versions: list[int | None]
    captured: Captured
    captured_values: Captured
    outline: CallOutline
    has_side_effects: bool


@dataclasses.dataclass
class RecordedTap:
    path: str
    segment: int
    outputs: list[Any]
    output_values: list[Any]
    outline: Any


class Recording:
    """The director of such a run."""

    device = torch.device("cpu")

    def __init__(self, blocks: frozenset[str]) -> None:
        self.calls: list[RecordedCall] = []
        self.taps: list[RecordedTap] = []
        self._blocks = blocks
        self.losses: list[tuple[dict[str, Any], Any, Any]] = []
        self._linears: list[tuple[nn.Module, torch.Tensor, Any]] = []
        self._alive: list[Any] = []

    def run(self, tree: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with directed_by(self):
            return tree(*args, **kwargs)

    def loss(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = plain(*args, **kwargs)
        given = {**dict(zip(("logits", "labels", "vocab_size"), args, strict=False)), **kwargs}
        self.losses.append((given, value, plain))
        return value

    def head(self) -> FusedHead | None:
        """The head that can be computed together with the loss, if there is one loss and such a head."""
        if len(self.losses) != 1:
            return None
        given, loss, plain = self.losses[0]
        logits = given.get("logits")
        if not isinstance(logits, torch.Tensor) or not isinstance(loss, torch.Tensor) or loss.dim():
            return None
        return find_head(logits, loss, self._linears, given, plain)

    def call(self, stub: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        real = stub._modules["real"]
        assert real is not None
        if path in self._blocks:
            return self._block(real, path, args, kwargs)
        value = real(*args, **kwargs)
        leaves = leaves_of(value)
        inputs = tensors_of((args, kwargs))
        self._linears.append((real, inputs[0] if inputs else torch.empty(0), leaves[0]))
        self.taps.append(
            RecordedTap(path, len(self.calls), leaves, [_frozen(leaf) for leaf in leaves], outlined(value))
        )
        self._alive.append(value)
        return value

    def _block(self, block: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tuple(map(unstubbed, args)), {name: unstubbed(value) for name, value in kwargs.items()}
        arguments = leaves_of((args, kwargs))
        values, versions = [_frozen(leaf) for leaf in arguments], [_version(leaf) for leaf in arguments]
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
            tuple(_alike(leaf, arguments) for leaf in outputs),
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
                [_frozen(leaf) for leaf in outputs],
                [_version(leaf) for leaf in outputs],
                captured,
                {kind: [_frozen(leaf) for leaf in found] for kind, found in captured.items()},
                outline,
                bool(value["side"]),
            )
        )
        return value["ret"]

    # What a replay would find in its state.

    def candidates(self, point: int) -> State:
        """Copies of everything blocks and taps before `point` returned."""
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
        """Which block's output an argument is: the very object, unchanged since."""
        call = self.calls[k]
        leaf = call.arguments[position]
        for earlier, source in enumerate(self.calls[:k]):
            for j, output in enumerate(source.outputs):
                is_it = output is leaf and source.outline.same_as[j] is None
                if is_it and source.output_versions[j] == call.argument_versions[position]:
                    return ("out", earlier, j)
        return None


def outlined(value: Any) -> Any:
    return map_leaves(lambda leaf: Outline.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _frozen(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _version(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) else None


def _position_of(leaf: Any, arguments: list[Any]) -> int | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    return next((i for i, argument in enumerate(arguments) if argument is leaf), None)


def _alike(leaf: Any, arguments: list[Any]) -> int | None:
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
