"""What travels from element to element: tensors by key, and a ledger that says how calls are made of them.

A value of this kind is what layers of a split model hand to each other. The ledger is never changed, only replaced: a
recomputation finds the one its forward had.

What a plan of a split depends on: the form of a call's inputs, and only where that misleads, more of them.

How a model's forward is cut: which modules are blocks, where its own code must run again, what that code reads.

Made by calibration, read by replays. Modules are named by their paths, so that a plan made on a small twin of a model
holds for the model. Pure data: no module, no tensor.

    call k      the k-th call of a block, a child of a repeated list of modules
    segment s   the model's own code between the return of call s - 1 and call s; the first is the prologue, the last
                the epilogue
    tap t       the t-th call of a module that runs wholly inside a segment: an embedding, a norm, a head
    point s     a segment whose code is replayed by an element of its own; the last point is the epilogue

Tensors that travel between elements have keys: ("in", i) the model's inputs, ("arg", s, n) made by the code of segment
s, ("out", k, j) returned by call k, ("cap", k, kind, i) captured in it, ("tap", t, j) returned by tap t.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from roundpipe.split.head_loss import FusedHead
from roundpipe.split.transformers import is_cache, is_filled
from roundpipe.split.values import Held, Key, map_leaves

_SMALL = 64
_COUNTS = frozenset(("num_items_in_batch",))  # numbers that are never a choice


class Detail(enum.IntEnum):
    """What of a call's tensors counts beside their dtype and number of dimensions."""

    FORMS = 0
    SIZES = 1
    VALUES = 2  # of small integer tensors, which may say how often something is done


def signature(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, detail: Detail = Detail.FORMS
) -> Hashable:
    """Equal for calls that one plan serves, as far as mode and inputs tell."""
    named = tuple((name, _named_form(name, kwargs[name], detail)) for name in sorted(kwargs))
    mode = (training, torch.is_grad_enabled())
    return (mode, tuple(_form(value, detail) for value in args), named)


def _named_form(name: str, value: Any, detail: Detail) -> Hashable:
    return "count" if name in _COUNTS and isinstance(value, int | float) else _form(value, detail)


def _form(value: Any, detail: Detail) -> Hashable:
    if isinstance(value, torch.Tensor):
        return _form_of_tensor(value, detail)
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int) and abs(value) <= _SMALL:  # more likely a choice than a size
        return ("int", value)
    if isinstance(value, int | float):
        return type(value).__name__
    if is_cache(value):
        return (type(value).__name__, is_filled(value))
    leaves, structure = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return type(value).__qualname__
    return (str(structure), tuple(_form(leaf, detail) for leaf in leaves))


def _form_of_tensor(tensor: torch.Tensor, detail: Detail) -> Hashable:
    if detail is Detail.FORMS:
        return (tensor.dtype, tensor.dim())
    if detail is Detail.VALUES and not tensor.is_floating_point() and tensor.numel() <= _SMALL:
        return (tensor.dtype, tuple(tensor.shape), tuple(tensor.flatten().tolist()))
    return (tensor.dtype, tuple(tensor.shape))


@dataclasses.dataclass(frozen=True)
class TapCall:
    path: str
    segment: int


@dataclasses.dataclass(frozen=True)
class CallOutline:
    """What call k returned in calibration: the look-ahead hands on markers of this form.

    value: {"ret": ..., "side": ...} with an Outline for each tensor. same_as: by leaf, the argument leaf it *is*.
    like: by leaf, an argument leaf of the same shape and dtype. captured: as value, by kind.
    """

    value: Any
    same_as: tuple[int | None, ...]
    like: tuple[int | None, ...]
    captured: Mapping[str, list[Any]]
    changes_arguments: bool  # in place
    routes: bool  # chooses what is largest, as a router of experts does


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    calls: tuple[str, ...]  # the path of each call's block
    taps: tuple[TapCall, ...]
    outlines: tuple[CallOutline, ...]
    points: tuple[int, ...]
    reads: Mapping[int, frozenset[Key]]  # by point: the earlier tensors its code depends on
    needs: Mapping[int, frozenset[str]]  # by point: names of the parameters it must have
    copying: frozenset[int]  # points whose code changes what it reads in place
    reasons: Mapping[int, str]  # by point: why it is one
    head: FusedHead | None = None  # the head that can be computed together with the loss
    draws_globally: bool = False  # from generators that all threads share
    has_caches: bool = False  # among the arguments of its blocks
    tokenwise: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # by path: parts inside it

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    def point_before(self, call: int) -> int:
        return self.points[bisect.bisect_right(self.points, call) - 1]

    def end_of(self, point: int) -> int:
        """The first call whose arguments a replay of `point` does not know."""
        after = bisect.bisect_right(self.points, point)
        return self.points[after] if after < len(self.points) else self.num_calls + 1

    def taps_of(self, point: int) -> frozenset[str]:
        """The modules that a replay of `point` runs."""
        return frozenset(tap.path for tap in self.taps if point <= tap.segment < self.end_of(point))

    def read_after(self, done: float) -> frozenset[Key]:
        """What points after call `done` (or segment `done` + 0.5) read."""
        later = bisect.bisect_right(self.points, done)
        return self._read_from[max(later, 1)]

    @functools.cached_property
    def _read_from(self) -> list[frozenset[Key]]:
        """By position in `points`: what that point and all after it read."""
        found: list[frozenset[Key]] = [frozenset()]
        for point in reversed(self.points):
            found.append(found[-1] | self.reads.get(point, frozenset()))
        return found[::-1]

    @functools.cached_property
    def read_taps(self) -> frozenset[Key]:
        """Outputs of taps that are read after their segment."""
        return frozenset(key for read in self.reads.values() for key in read if key[0] == "tap")

    @functools.cached_property
    def blocks(self) -> frozenset[str]:
        return frozenset(self.calls)

    @property
    def stub_paths(self) -> frozenset[str]:
        return frozenset(self.calls) | {tap.path for tap in self.taps}


State = dict[Key, torch.Tensor]


class KeepLogits(enum.Enum):
    """Whether somebody will look at the logits of a model that computes its own loss."""

    ALWAYS = "always"
    UNLESS_LARGE = "unless large"
    NEVER = "never"


@dataclasses.dataclass(frozen=True, slots=True)
class CallRecord:
    """The arguments of a block call, with a Held for each tensor, and which outputs it shall capture."""

    arguments: Any
    keys: Sequence[Key]  # of the tensors in them
    captures: Mapping[str, int]
    has_containers: bool
    has_caches: bool
    is_long: bool  # so many tokens that parts of the block are tiled
    with_grad: bool  # the model calls it with grad enabled, if anything is


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    plan: SplitPlan
    placed: Any  # where the plan's elements are among the layers
    inputs: Any  # (args, kwargs) of the model with a Held for each tensor
    calls: Mapping[int, CallRecord]
    outputs: Mapping[int, Any]  # by call: (value, captured) with an Outline for each tensor
    taps: Mapping[int, Any]  # by tap: its value with an Outline for each tensor
    last_use: Mapping[Key, int]  # by key: the last call known to take it
    keeps_logits: KeepLogits = KeepLogits.ALWAYS
    fills_caches: bool = False  # caches in arguments are the caller's, and are to be filled

    @classmethod
    def begin(cls, plan: SplitPlan, placed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[State, Ledger]:
        state: State = {}

        def keep(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            key = ("in", len(state))
            state[key] = leaf
            return Held(key)

        inputs = map_leaves(keep, (tuple(args), dict(kwargs)))
        return state, cls(plan, placed, inputs, {}, {}, {}, {})

    def with_output(self, k: int, value: Any) -> Ledger:
        """After call k. Written out: dataclasses.replace takes ten times as long, and this is done for every layer."""
        return Ledger(
            self.plan,
            self.placed,
            self.inputs,
            self.calls,
            {**self.outputs, k: value},
            self.taps,
            self.last_use,
            self.keeps_logits,
            self.fills_caches,
        )


def without_dead(state: State, ledger: Ledger, done: float) -> State:
    """The state without tensors that nobody will ask for after call `done` (or segment `done` + 0.5)."""
    read_later = ledger.plan.read_after(done)
    last_use = ledger.last_use
    return {
        key: tensor
        for key, tensor in state.items()
        if key[0] == "in" or last_use.get(key, -1) > done or key in read_later
    }
