"""Replays: running a model's own forward again for one point of a split plan.

A replay is the director of a stub tree, see split/stubs.py. The model's forward runs from its first line:
- Calls of blocks and taps before the point do not run again. They return the tensors that the state still holds, and
  placeholders for tensors that were dropped.
- Taps from the point on run.
- Calls of blocks from the point on do not run. Their arguments are recorded, and they return *markers*: tensors of the
  right shape in place of outputs that are not computed yet. Each marker has the key of the output that it replaces. If
  a later call gets the marker as an argument, that key is recorded.
- The forward is stopped at the next point, whose code depends on the values of block outputs.
Knows one plan and one microbatch.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ModelSplitError
from roundpipe.split.head_loss import HeadLoss, are_large
from roundpipe.split.observe import repeat_side_effects
from roundpipe.split.plan import CallOutline, CallRecord, KeepLogits, Ledger, State
from roundpipe.split.stubs import directed_by, unstubbed
from roundpipe.split.tiling import is_long, tiled
from roundpipe.split.transformers import Captured, active_collector, is_cache, wanted_captures
from roundpipe.split.values import (
    Held,
    Key,
    Outline,
    filled_in,
    map_leaves,
    may_hold_containers,
    placeholder,
)


class CallOrderChanged(ModelSplitError):
    """The model's forward called its modules in another order than the plan says. The call needs another plan."""


class _Reached(BaseException):
    """Stops the model's forward at the next point. Caught by `Replay.run`.

    A BaseException, so that an `except Exception` in the model's code does not catch it.
    """


class Replay:
    """One replay of a point, on one microbatch."""

    def __init__(self, ledger: Ledger, point: int, state: State, device: torch.device) -> None:
        self.device = device
        self.made: State = {}  # tensors made in this replay that later elements use
        # The tensors in `made`, each with its version counter at the time when it was added.
        self._made_versions: list[tuple[torch.Tensor, int]] = []
        self.calls: dict[int, CallRecord] = {}  # the calls whose arguments this replay recorded
        self.taps: dict[int, Any] = {}  # by tap run in this replay: the returned value with an Outline for each tensor
        self._ledger, self._plan, self._point, self._state = ledger, ledger.plan, point, state
        self._end = ledger.plan.end_of(point)
        self._blocks = ledger.plan.blocks
        self.num_calls = self._num_taps = 0  # numbers of block calls and taps that the forward has made so far
        self._head_loss: HeadLoss | None = None
        self._last_named: _Recorded | None = None
        self._placeholders: dict[Outline, torch.Tensor] = {}
        self._copies = point in ledger.plan.copying
        # By id of a tensor: its key, and its version counter when it got the key. If the counter differs later, the
        # code changed the tensor in place, and the key is no longer valid for it.
        self._known: dict[int, tuple[Key, int]] = {}
        self._alive: list[Any] = []  # references to the tensors in `_known`, so that their ids are not reused
        # Inputs are not in `_known`. An input that the code passes on to a block is stored again, under an "arg" key.
        for key, tensor in state.items():
            if key[0] != "in":
                self._known.setdefault(id(tensor), (key, tensor._version))

    def run(self, tree: nn.Module) -> Any:
        """Run the forward of the tree; returns its result, or None if it was stopped at the next point."""
        args, kwargs = filled_in(self._ledger.inputs, self._state)
        # Code that changes its inputs in place must not change the state: a recomputation starts from the same state.
        if self._copies:
            args, kwargs = map_leaves(
                lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
            )
        with directed_by(self):
            try:
                returned = tree(*args, **kwargs)
            except _Reached:
                return None
        if self.num_calls < self._plan.num_calls or self._num_taps < len(self._plan.taps):
            raise CallOrderChanged("its forward called fewer modules than the plan says")
        return returned if self._head_loss is None else self._head_loss.without_logits(returned)

    @property
    def has_guessed(self) -> bool:
        """Whether the code may have got a marker or placeholder. If not, the model itself raises any exception."""
        return self._point > 0 or bool(self.calls)

    def call(self, stub: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._block(path, args, kwargs) if path in self._blocks else self._tap(stub, path, args, kwargs)

    def handed_on(self) -> tuple[State, Ledger]:
        """Return the state and ledger after this replay."""
        last_use = dict(self._ledger.last_use)
        for k, record in self.calls.items():
            for key in record.keys:
                last_use[key] = max(k, last_use.get(key, -1))
        ledger = dataclasses.replace(
            self._ledger,
            calls={**self._ledger.calls, **self.calls},
            taps={**self._ledger.taps, **self.taps},
            last_use=last_use,
        )
        return {**self._state, **self.made}, ledger

    # Calls of taps and of the loss function.

    def _tap(self, stub: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a tap: recorded if the tap is before the point, else by running the tap."""
        t, self._num_taps = self._num_taps, self._num_taps + 1
        expected = self._plan.taps[t].path if t < len(self._plan.taps) else "no further module"
        if path != expected:
            raise CallOrderChanged(f"{path} was called where the plan expects {expected}")
        if self._plan.taps[t].segment < self._point:
            return self._recalled(self._ledger.taps[t], lambda j: ("tap", t, j))
        value = self._run_tap(t, stub, args, kwargs)
        position = -1

        def note(leaf: Any) -> Any:
            nonlocal position
            position += 1
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if ("tap", t, position) in self._plan.read_taps:
                self._make(("tap", t, position), leaf)
            return Outline.of(leaf)

        self.taps[t] = map_leaves(note, value)
        self._alive.append(value)
        return value

    def _run_tap(self, t: int, stub: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        real = stub._modules.get("real")
        if real is None:
            raise CallOrderChanged(
                f"{stub.__dict__['stub_path']} was called in a segment that does not have its weights"
            )
        head = self._plan.head
        if head is not None and head.tap == t and self._drops_logits(args[0], real):
            self._head_loss = HeadLoss(head)
            return self._head_loss.call_head(real, args, kwargs)
        if not is_long(args):
            return real(*args, **kwargs)
        with tiled(real, self._plan.tokenwise.get(self._plan.taps[t].path, ())):
            return real(*args, **kwargs)

    def _drops_logits(self, hidden: torch.Tensor, head: nn.Module) -> bool:
        """Whether to compute the loss directly from `hidden`, the input of the head, without keeping the logits."""
        match self._ledger.keeps_logits:
            case KeepLogits.ALWAYS:
                return False
            case KeepLogits.UNLESS_LARGE:
                return are_large(hidden, head)
            case KeepLogits.NEVER:
                return True

    def loss(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss. If the head returned a placeholder for the logits, the loss is computed without them."""
        fused = self._head_loss
        if fused is None or not fused.takes(args, kwargs):
            return plain(*args, **kwargs)
        return fused.loss(args, kwargs) if plain is fused.head.loss_function else fused.plain_loss(plain, args, kwargs)

    # Calls of blocks.

    def _block(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of a block; returns its output.

        A call before the point returns the output it had. Of a later call only the arguments are recorded; it returns
        markers. The last call before the next point raises _Reached instead, which ends the replay.
        """
        k, self.num_calls = self.num_calls, self.num_calls + 1
        expected = self._plan.calls[k] if k < len(self._plan.calls) else "no further block"
        if path != expected:
            raise CallOrderChanged(f"{path} was called where the plan expects {expected}")
        collector = active_collector()
        if k < self._point:
            value, captured = self._ledger.outputs[k]
            made = self._recalled(value, lambda j: ("out", k, j))
            if collector:
                self._hand_on(collector, k, captured, lambda leaf, key: self._recall(key, leaf))
        else:
            arguments = self._record(k, args, kwargs, collector)
            if k == self._end - 1:  # the code after this call belongs to the next point
                raise _Reached
            outline = self._plan.outlines[k]
            made = self._markers(k, outline, arguments)
            if collector:
                self._hand_on(collector, k, outline.captured, lambda leaf, key: self._marker(leaf, key))
        repeat_side_effects(made["side"], args, kwargs)
        return made["ret"]

    def _record(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any], collector: Captured | None) -> list[Any]:
        """Record the arguments of call k; returns their leaves."""
        # Most calls of blocks differ only in the hidden state, so the record of keyword arguments can be reused.
        if self._last_named is None or not self._last_named.are(kwargs):
            self._last_named = _Recorded(kwargs, self._key_of)
        first: _Recorded | _RecordedTensor
        if len(args) == 1 and type(args[0]) is torch.Tensor:  # a fast path for the common case
            first = _RecordedTensor(args[0], self._key_of(args[0]))
        else:
            first = _Recorded(args, self._key_of)
        named = self._last_named
        self.calls[k] = CallRecord(
            (first.template, named.template),
            [*first.keys, *named.keys],
            wanted_captures(collector),
            first.has_containers or named.has_containers,
            first.has_caches or named.has_caches,
            first.is_long or named.is_long,
            torch.is_grad_enabled(),
        )
        self._alive += (first, named)
        return [*first.leaves, *named.leaves]

    def _markers(self, k: int, outline: CallOutline, arguments: list[Any]) -> Any:
        """Return a value like that of `call_block` for call k, with a marker for each tensor that is no argument."""
        returned = outline.value["ret"]
        # A fast path for the common case: the block returned one new tensor and has no side effects.
        if type(returned) is Outline and not outline.value["side"] and outline.same_as[0] is None:
            like = outline.like[0]
            shaped = returned if like is None else Outline.of(arguments[like])
            return {"ret": self._marker(shaped, ("out", k, 0)), "side": {}}
        position = -1

        def mark(leaf: Any) -> Any:
            nonlocal position
            position += 1
            if type(leaf) is not Outline:
                return leaf
            same_as, like = outline.same_as[position], outline.like[position]
            if same_as is not None:
                return arguments[same_as]
            # The batch may have another size than in calibration. If the output had the shape of an argument there, it
            # has the shape of the same argument here.
            shaped = leaf if like is None else Outline.of(arguments[like])
            return self._marker(shaped, ("out", k, position))

        return map_leaves(mark, outline.value)

    def _marker(self, outline: Outline, key: Key) -> torch.Tensor:
        """Return a marker for the output with this key."""
        made = self.make_marker(outline)
        self._known[id(made)] = (key, made._version)
        self._alive.append(made)
        return made

    def make_marker(self, outline: Outline) -> torch.Tensor:
        # A new tensor object each time, because markers are identified by their ids. The code of a point that copies
        # may write into it, which torch refuses while all elements share their memory.
        unused = self._placeholder(outline)
        return unused.clone() if self._copies else unused.detach()

    def _placeholder(self, outline: Outline) -> torch.Tensor:
        """Return the placeholder for this outline; all uses in this replay share one tensor."""
        found = self._placeholders.get(outline)
        if found is None:
            found = self._placeholders[outline] = placeholder(outline, self.device)
        return found

    # Tensors and their keys.

    def _key_of(self, tensor: torch.Tensor) -> Key:
        """Return the key of a tensor that is an argument of a call; adds the tensor to `made` if it has no key."""
        known = self._known.get(id(tensor))
        if known is not None and known[1] == tensor._version:
            return known[0]
        return self._make(("arg", self._point, len(self.made)), tensor)

    def changed_what_it_made(self) -> bool:
        """Whether the code changed a tensor in `made` in place after it was added."""
        return any(tensor._version != version for tensor, version in self._made_versions)

    def _make(self, key: Key, tensor: torch.Tensor) -> Key:
        """Add a tensor to `made` under `key`, so that later elements get it; returns the key."""
        self.made[key] = tensor.clone() if self._copies else tensor
        self._made_versions.append((self.made[key], self.made[key]._version))
        self._known.setdefault(id(tensor), (key, tensor._version))
        self._alive.append(tensor)
        return key

    def _recalled(self, value: Any, key_of: Callable[[int], Key]) -> Any:
        """Return the output of a call or tap before the point.

        value: the output with an Outline in place of each tensor. key_of: returns the key of the leaf at a position.
        """
        # A fast path for the common case: the block returned one tensor and has no side effects.
        if type(value) is dict and type(value.get("ret")) is Outline and value.get("side") == {}:
            return {"ret": self._recall(key_of(0), value["ret"]), "side": {}}
        position = -1

        def recall(leaf: Any) -> Any:
            nonlocal position
            position += 1
            return self._recall(key_of(position), leaf) if type(leaf) is Outline else leaf

        return map_leaves(recall, value)

    def _recall(self, key: Key, outline: Outline) -> torch.Tensor:
        """Return the tensor that the state holds under `key`. If it was dropped as unused, return a placeholder."""
        tensor = self._state.get(key)
        if tensor is None:
            unused = self._placeholder(outline)
            return unused.clone() if self._copies else unused
        if self._copies:
            tensor = tensor.clone()
            self._known[id(tensor)] = (key, tensor._version)
            self._alive.append(tensor)
        return tensor

    def _hand_on(
        self,
        collector: Captured,
        k: int,
        captured: Mapping[str, list[Any]],
        make: Callable[[Outline, Key], torch.Tensor],
    ) -> None:
        """Add the captured outputs of call k to the collector of the running forward.

        make: returns the tensor for an outline and a key.
        """
        for kind, found in captured.items():
            if kind in collector:
                for i, leaf in enumerate(found):
                    collector[kind].append(make(leaf, ("cap", k, kind, i)) if type(leaf) is Outline else leaf)


class _Recorded:
    """The positional or the keyword arguments of a call: their template, tensor keys and properties."""

    def __init__(self, values: Any, key_of: Callable[[torch.Tensor], Key]) -> None:
        self.leaves: list[Any] = []
        self.keys: list[Key] = []

        def note(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                self.leaves.append(leaf)
                self.keys.append(key_of(leaf))
                return Held(self.keys[-1])
            self.leaves.append(unstubbed(leaf))  # a block runs outside of the stub tree, so it must not get a stub
            return self.leaves[-1]

        self._values = values
        self.template = map_leaves(note, values)
        self._versions = [(leaf, leaf._version) for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        own = values.values() if isinstance(values, dict) else values
        self.has_containers = any(map(may_hold_containers, own))
        self.has_caches = any(map(is_cache, self.leaves))
        self.is_long = is_long(self.leaves)

    def are(self, kwargs: dict[str, Any]) -> bool:
        """Whether `kwargs` are the same objects under the same names, unchanged since they were recorded."""
        return (
            not self.has_containers
            and self._values.keys() == kwargs.keys()
            and all(map(operator.is_, self._values.values(), kwargs.values()))
            and all(tensor._version == version for tensor, version in self._versions)
        )


class _RecordedTensor:
    """A faster replacement of `_Recorded` for a single positional argument that is a tensor."""

    has_containers = has_caches = False

    def __init__(self, tensor: torch.Tensor, key: Key) -> None:
        self.leaves, self.keys, self.template = (tensor,), (key,), (Held(key),)
        self.is_long = is_long(self.leaves)
