"""The execute plan: which layers run together as one stage, forward and backward.

Written by users or by the planner, checked by the api before every use. Knows layers by number; knows no devices and
no microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never, overload

from roundpipe.errors import ArgumentTypeError, PlanError
from roundpipe.plan.auto import balanced_lists
from roundpipe.plan.cost import Plannable
from roundpipe.plan.ranges import Order, check_cover, check_form
from roundpipe.plan.run_type import RunType, as_run_type

__all__ = ["ModelExecutePlan", "RunType"]


class ModelExecutePlan:
    """Two lists of ascending ranges: ``fwd_plan`` from the first layers to the last, ``bwd_plan`` the other way.

    ``infer`` needs the forward list only, ``train`` both over all layers. ``fused``: ``bwd_plan[0]`` continues where
    ``fwd_plan`` ends and runs forward, loss and backward of the last layers together; the others run backward only.
    """

    __hash__ = None  # type: ignore[assignment]  # the lists are the user's to change

    def __init__(self, fwd_plan: Iterable[range] = (), bwd_plan: Iterable[range] = ()) -> None:
        for name, plan in (("fwd_plan", fwd_plan), ("bwd_plan", bwd_plan)):
            if not isinstance(plan, Iterable):
                raise ArgumentTypeError(f"{name} must be a list of ranges, such as [range(0, 3)], got {plan!r}")
        self.fwd_plan = list(fwd_plan)
        self.bwd_plan = list(bwd_plan)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelExecutePlan):
            return NotImplemented
        return self.fwd_plan == other.fwd_plan and self.bwd_plan == other.bwd_plan

    def __repr__(self) -> str:
        return f"ModelExecutePlan(fwd_plan={self.fwd_plan}, bwd_plan={self.bwd_plan})"

    def check_valid(self, num_layers: int, run_type: str | RunType) -> None:
        """Raises a `PlanError` that names the first fault, if the plan cannot run a model of so many layers."""
        kind = as_run_type(run_type)
        if isinstance(num_layers, bool) or not isinstance(num_layers, int):
            raise ArgumentTypeError(f"num_layers must be an int, not {type(num_layers).__name__} ({num_layers!r})")
        if num_layers < 1:
            raise PlanError(f"a plan needs a model with at least 1 layer, not {num_layers}")
        match kind:
            case RunType.INFER:
                self._check_forward(num_layers)
            case RunType.TRAIN:
                self._check_forward(num_layers)
                self._check_backward(num_layers)
            case RunType.FUSED:
                self._check_fused(num_layers)
            case _:
                assert_never(kind)

    def _check_forward(self, num_layers: int) -> None:
        check_form("fwd_plan", self.fwd_plan, num_layers)
        if not self.fwd_plan:
            raise PlanError(f"fwd_plan is empty; give the forward stages, e.g. [range(0, {num_layers})]")
        check_cover("fwd_plan", self.fwd_plan, range(num_layers), Order.ASCENDING)

    def _check_backward(self, num_layers: int) -> None:
        check_form("bwd_plan", self.bwd_plan, num_layers)
        if not self.bwd_plan:
            raise PlanError(f"bwd_plan is empty; give the backward stages, e.g. [range(0, {num_layers})]")
        check_cover("bwd_plan", self.bwd_plan, range(num_layers), Order.DESCENDING)

    def _check_fused(self, num_layers: int) -> None:
        check_form("fwd_plan", self.fwd_plan, num_layers)
        fused_start = self.fwd_plan[-1].stop if self.fwd_plan else 0
        check_cover("fwd_plan", self.fwd_plan, range(fused_start), Order.ASCENDING)
        if fused_start == num_layers:
            raise PlanError(
                f"fwd_plan ends at layer {num_layers - 1}, the last one, and leaves none for the fused stage; "
                "end it earlier, it may be empty"
            )
        check_form("bwd_plan", self.bwd_plan, num_layers)
        fused = range(fused_start, num_layers)
        if not self.bwd_plan:
            raise PlanError(f"bwd_plan is empty; its first range must be the fused stage {fused}")
        self._check_fused_stage(fused)
        check_cover("bwd_plan", self.bwd_plan, range(num_layers), Order.DESCENDING)

    def _check_fused_stage(self, fused: range) -> None:
        found = self.bwd_plan[0]
        if found.stop != fused.stop:
            raise PlanError(
                f"bwd_plan[0] = {found} is the fused stage and must end with the last layer, {fused.stop - 1}: "
                f"use {fused}"
            )
        if found.start != fused.start:
            raise PlanError(
                f"bwd_plan[0] = {found} is the fused stage and must start where fwd_plan ends, at layer {fused.start}: "
                f"use {fused}"
            )

    @overload
    @classmethod
    def auto(
        cls,
        run_type: str | RunType,
        model: Plannable,
        /,
        *,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan: ...

    @overload
    @classmethod
    def auto(
        cls,
        run_type: str | RunType,
        *models: Plannable,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | list[ModelExecutePlan]: ...

    @classmethod
    def auto(
        cls,
        run_type: str | RunType,
        *models: Plannable,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | list[ModelExecutePlan]:
        """One plan for one model, a list for several, balanced together to one target stage time.

        No stage takes longer than ``upper_threshold`` times max(slowest layer, total / ``min_stages``). Among such
        plans: the fewest stages (``min_stages`` at least, if the layers suffice), then the shortest slowest stage.
        ``min_stages`` (default: the number of devices) counts all models together, in one pass: ``train`` has a forward
        and a backward pass, ``fused`` a single one. ``model_memory_limit``: GB (1e9 bytes) of weights, in backward
        stages also gradients, in one stage. Without it a stage takes up to half the device, where layers allow: the
        next stage's weights arrive while one computes.
        """
        lists = balanced_lists(
            as_run_type(run_type),
            models,
            min_stages=min_stages,
            upper_threshold=upper_threshold,
            model_memory_limit=model_memory_limit,
        )
        plans = [cls(fwd_plan, bwd_plan) for fwd_plan, bwd_plan in lists]
        return plans[0] if len(plans) == 1 else plans
