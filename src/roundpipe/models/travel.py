"""What travels from element to element: tensors by key, and a ledger that says how calls are made of them.

A value of this kind is what layers of a split model hand to each other. The ledger is never changed, only replaced: a
recomputation finds the one its forward had.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundpipe.models.split_plan import SplitPlan
from roundpipe.models.values import Held, Key, map_leaves

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
