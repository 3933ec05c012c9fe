"""The split plan of a model, the signature of the calls it serves, and the values that travel between its layers.

A split plan says how a model's forward is divided: which modules are blocks, where the model's own code must run
again, and what that code reads. Modules are named by their paths, so a plan made on a copy of a model holds for the
model. A plan contains no module and no tensor.

    call k      the k-th call of a block; a block is an element of a repeated list of modules
    segment s   the model's own code between the return of call s - 1 and call s. The first segment is the prologue, the
                last one is the epilogue
    tap t       the t-th call of a module inside a segment: an embedding, a norm, a head
    point s     a segment whose code is replayed by a layer. Other segments need no layer, because the replay of an
                earlier point already knows the arguments of the calls after them. The epilogue is always a point
    element     a point or a call: the part of a plan that one layer carries out

Layers pass on a state and a ledger. The state holds tensors by key:

    ("in", i)            the model's inputs
    ("arg", s, n)        made by the code of segment s
    ("out", k, j)        returned by call k
    ("cap", k, kind, i)  captured in call k, see [Note: captured outputs] in split/transformers.py
    ("tap", t, j)        returned by tap t

The ledger says how the arguments of calls are made of them. A ledger is never changed, only replaced, so that a
recomputation gets the ledger that its forward pass got.
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
    """What call k returned in calibration. A replay continues with markers of these shapes before call k has run."""

    value: Any  # {"ret": ..., "side": ...} as of call_block, with an Outline for each tensor
    same_as: tuple[int | None, ...]  # by leaf of the value: the position of the argument that is this very tensor
    like: tuple[int | None, ...]  # by leaf of the value: the position of an argument of the same shape and dtype
    captured: Mapping[str, list[Any]]  # by kind: captured outputs, with an Outline for each tensor
    changes_arguments: bool  # in place
    routes: bool  # calls top-k or argmax, as a router of experts does


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """How a model's forward is divided into elements. See the module's docstring for the terms."""

    calls: tuple[str, ...]  # by call: the path of its block
    taps: tuple[TapCall, ...]
    outlines: tuple[CallOutline, ...]  # by call
    points: tuple[int, ...]
    reads: Mapping[int, frozenset[Key]]  # by point: the earlier tensors its code depends on
    needs: Mapping[int, frozenset[str]]  # by point: names of the parameters it must have
    copying: frozenset[int]  # points that work on copies: their code changes in place what it reads or hands on
    reasons: Mapping[int, str]  # by point: why it must be one
    head: FusedHead | None = None  # the head that can be fused with the loss
    draws_globally: bool = False  # the model uses Python's or numpy's global generators
    has_caches: bool = False  # blocks get caches of transformers as arguments
    # By path of a block or tap: the paths of tokenwise modules inside it.
    tokenwise: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    def end_of(self, point: int) -> int:
        """Return the first call whose arguments a replay of `point` does not know."""
        after = bisect.bisect_right(self.points, point)
        return self.points[after] if after < len(self.points) else self.num_calls + 1

    def taps_of(self, point: int) -> frozenset[str]:
        """Return the paths of the taps that a replay of `point` runs."""
        return frozenset(tap.path for tap in self.taps if point <= tap.segment < self.end_of(point))

    def read_after(self, done: float) -> frozenset[Key]:
        """Return the keys that points after call `done` read. After the point of segment s, `done` is s - 0.5."""
        later = bisect.bisect_right(self.points, done)
        return self._read_from[max(later, 1)]

    @functools.cached_property
    def _read_from(self) -> list[frozenset[Key]]:
        """By position in `points`: the keys that this point and all later ones read."""
        found: list[frozenset[Key]] = [frozenset()]
        for point in reversed(self.points):
            found.append(found[-1] | self.reads.get(point, frozenset()))
        return found[::-1]

    @functools.cached_property
    def read_taps(self) -> frozenset[Key]:
        """The outputs of taps that later points read."""
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
    """The arguments of a call of a block, as a replay found them."""

    arguments: Any  # (args, kwargs) with a Held for each tensor
    keys: Sequence[Key]  # of the tensors in the arguments
    captures: Mapping[str, int]  # see wanted_captures
    has_containers: bool  # there may be dicts or lists among the arguments
    has_caches: bool
    is_long: bool  # has so many tokens that tokenwise modules of the block are tiled
    with_grad: bool  # grad mode is enabled at the call; a model may disable it for some blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """What is known of one call of the model, besides tensors."""

    plan: SplitPlan
    placed: Any  # the PlacedPlan: which layer carries out which element
    inputs: Any  # (args, kwargs) of the model with a Held for each tensor
    calls: Mapping[int, CallRecord]
    outputs: Mapping[int, Any]  # by call: (value, captured) with an Outline for each tensor
    taps: Mapping[int, Any]  # by tap: its value with an Outline for each tensor
    last_use: Mapping[Key, int]  # by key: the last call that is known to take the tensor
    keeps_logits: KeepLogits = KeepLogits.ALWAYS
    fills_caches: bool = False  # blocks must fill the caller's caches, not copies of them

    @classmethod
    def begin(cls, plan: SplitPlan, placed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[State, Ledger]:
        """Return the state and ledger of a call before its first segment."""
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
    """Return the state without tensors that no element after `done` uses. `done`: see SplitPlan.read_after.

    Inputs are always kept, because each replay calls the model's forward with them.
    """
    read_later = ledger.plan.read_after(done)
    last_use = ledger.last_use
    return {
        key: tensor
        for key, tensor in state.items()
        if key[0] == "in" or last_use.get(key, -1) > done or key in read_later
    }


_SMALL = 64  # integers up to this size, and integer tensors of up to this many elements, may control the forward
_COUNTS = frozenset(("num_items_in_batch",))  # numbers that never control the forward


class Detail(enum.IntEnum):
    """What a signature contains of a call's tensors, besides dtype and number of dimensions."""

    FORMS = 0
    SIZES = 1
    VALUES = 2  # also the values of small integer tensors, which may say how often something is done


def signature(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, detail: Detail = Detail.FORMS
) -> Hashable:
    """Return the form of a call: calls with equal signatures, as far as is known, follow the same plan.

    Contains the training mode, the grad mode and a description of each input.
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
