"""The split plan of a model, the signature of the calls it serves, and the values that travel between its layers.

A split plan says how a model's forward is divided: which modules are blocks, where the model's own code must run
again, and what that code reads. A plan names modules by their paths, so a plan that was made on a copy of a model is
valid for the model itself. A plan contains no module and no tensor.

    call k      the k-th call of a block; a block is an element of a repeated list of modules
    segment s   the model's own code between the return of call s - 1 and call s. The first segment is the prologue, the
                last one is the epilogue
    tap t       the t-th call of a module inside a segment: an embedding, a norm, a head
    point s     a segment s whose code is replayed by a layer. Another segment needs no layer, because the replay of an
                earlier point already determines the arguments of the call that follows the segment. The prologue and
                the epilogue are always points
    element     a point or a call: the part of a plan that one layer carries out

Layers pass on a state and a ledger. The state holds tensors by key:

    ("in", i)            an input of the model
    ("arg", s, n)        an argument of a call, made by the replay of point s
    ("out", k, j)        returned by call k
    ("cap", k, kind, i)  captured in call k, see [Note: captured outputs] in split/transformers.py
    ("tap", t, j)        returned by tap t

The ledger says how the arguments of calls are built from these tensors. A ledger is never changed, only replaced, so
that a recomputation gets the same ledger as its forward pass.
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

State = dict[Key, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class TapCall:
    """One tap of a plan: the path of its module and the segment that calls it."""

    path: str
    segment: int


@dataclasses.dataclass(frozen=True)
class CallOutline:
    """The structure of what one call of a block returned in calibration.

    A replay that runs before this call uses markers of the same structure as the call's outputs.
    """

    value: Any  # {"ret": ..., "side": ...} as returned by `call_block`, with an Outline in place of each tensor
    # One entry per leaf of `value`: the position of the argument that is the same tensor object, or None.
    same_as: tuple[int | None, ...]
    # One entry per leaf of `value`: the position of the first argument with the same shape and dtype, or None.
    like: tuple[int | None, ...]
    captured: Mapping[str, list[Any]]  # by kind: captured outputs, with an Outline in place of each tensor
    changes_arguments: bool  # whether the block changes its arguments in place
    routes: bool  # whether the block calls top-k or argmax, as a router of experts does


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """How a model's forward is divided into elements. See the module's docstring for the terms."""

    calls: tuple[str, ...]  # for each call: the path of the called block
    taps: tuple[TapCall, ...]
    outlines: tuple[CallOutline, ...]  # one entry per call
    points: tuple[int, ...]  # the numbers of the segments that are points, in ascending order
    reads: Mapping[int, frozenset[Key]]  # by point: the keys of earlier tensors that the point's code depends on
    needs: Mapping[int, frozenset[str]]  # by point: the names of the parameters that the point's code uses
    # Points that work on copies of tensors, because their code changes in place what it reads or passes on.
    copying: frozenset[int]
    reasons: Mapping[int, str]  # by point: why this segment must be a point
    head: FusedHead | None = None  # the head that can be fused with the loss
    draws_globally: bool = False  # whether the model draws from Python's or numpy's global generators
    has_caches: bool = False  # whether blocks get transformers caches as arguments
    # By path of a block or tap: the paths of the tokenwise modules inside this block or tap, see split/tiling.py.
    tokenwise: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    def end_of(self, point: int) -> int:
        """Return the first call after `point` whose arguments a replay of `point` does not determine.

        This number is the next point, or num_calls + 1 for the epilogue.
        """
        after = bisect.bisect_right(self.points, point)
        return self.points[after] if after < len(self.points) else self.num_calls + 1

    def taps_of(self, point: int) -> frozenset[str]:
        """Return the paths of the taps that a replay of `point` runs."""
        return frozenset(tap.path for tap in self.taps if point <= tap.segment < self.end_of(point))

    def read_after(self, done: float) -> frozenset[Key]:
        """Return the keys of the tensors that are read after `done`.

        done: a position in the order of execution. Call k of a block is at position k. The segment of point s runs
            between calls s - 1 and s, so it is at position s - 0.5.
        """
        later = bisect.bisect_right(self.points, done)
        return self._read_from[max(later, 1)]

    @functools.cached_property
    def _read_from(self) -> list[frozenset[Key]]:
        """For each position in `points`: the keys that the point at this position and all later points read."""
        found: list[frozenset[Key]] = [frozenset()]
        for point in reversed(self.points):
            found.append(found[-1] | self.reads.get(point, frozenset()))
        return found[::-1]

    @functools.cached_property
    def read_taps(self) -> frozenset[Key]:
        """The keys of the tap outputs that later points read."""
        return frozenset(key for read in self.reads.values() for key in read if key[0] == "tap")

    @functools.cached_property
    def blocks(self) -> frozenset[str]:
        return frozenset(self.calls)

    @property
    def stub_paths(self) -> frozenset[str]:
        """The paths of blocks and taps."""
        return self.blocks | {tap.path for tap in self.taps}


class KeepLogits(enum.Enum):
    """Whether a model that computes its own loss must return its logits, too."""

    ALWAYS = "always"
    UNLESS_LARGE = "unless large"
    NEVER = "never"


@dataclasses.dataclass(frozen=True, slots=True)
class CallRecord:
    """The arguments of one call of a block, as recorded by a replay."""

    arguments: Any  # (args, kwargs) with a Held in place of each tensor
    keys: Sequence[Key]  # the keys of the tensors in `arguments`
    captures: Mapping[str, Any]  # the kinds of output that the block must capture, see `wanted_captures`
    has_containers: bool  # whether the arguments may contain dicts or lists
    has_caches: bool  # whether the arguments contain transformers caches
    is_long: bool  # whether the arguments have so many tokens that tokenwise modules of the block are tiled
    with_grad: bool  # whether grad mode is enabled at the call; a model may disable it for some blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """What layers pass on about one call of the model, besides the tensors of the state."""

    plan: SplitPlan
    placed: Any  # the PlacedPlan: which layer carries out which element
    inputs: Any  # (args, kwargs) of the model with a Held in place of each tensor
    calls: Mapping[int, CallRecord]  # the calls whose arguments are recorded so far
    outputs: Mapping[int, Any]  # by call: (value, captured) with an Outline in place of each tensor
    taps: Mapping[int, Any]  # by tap: the returned value with an Outline in place of each tensor
    last_use: Mapping[Key, int]  # by key: the last of the recorded calls that has the tensor as an argument
    keeps_logits: KeepLogits = KeepLogits.ALWAYS
    fills_caches: bool = False  # whether blocks fill the caller's caches instead of copies of them

    @classmethod
    def begin(cls, plan: SplitPlan, placed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[State, Ledger]:
        """Return the state and ledger with which a call of the model starts."""
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
        """Return the ledger after call k, which returned `value`."""
        # dataclasses.replace takes ten times as long, and this runs for every layer and microbatch.
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
    """Return the state without the tensors that no later element uses. done: see `SplitPlan.read_after`.

    Inputs are always kept, because each replay calls the model's forward with them.
    """
    read_later = ledger.plan.read_after(done)
    last_use = ledger.last_use
    return {
        key: tensor
        for key, tensor in state.items()
        if key[0] == "in" or last_use.get(key, -1) > done or key in read_later
    }


# Integers up to this absolute value, and integer tensors with at most this many elements, may control which code the
# forward runs.
_SMALL = 64
_COUNTS = frozenset(("num_items_in_batch",))  # names of numbers that never control which code the forward runs


class Detail(enum.IntEnum):
    """What a signature contains about each tensor of a call, besides dtype and number of dimensions."""

    FORMS = 0  # nothing more
    SIZES = 1  # the shape
    VALUES = 2  # the shape, and the values of small integer tensors, which may say how often something is done


def signature(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, detail: Detail = Detail.FORMS
) -> Hashable:
    """Return the form of a call. Calls with equal signatures are assumed to follow the same plan.

    The signature contains the training mode, the grad mode and a description of each input.
    """
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
    if isinstance(value, int) and abs(value) <= _SMALL:  # more likely an option than a size
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
