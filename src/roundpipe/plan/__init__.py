"""Decides which device runs which layers when: layer costs, execute plans, schedules and their simulation.

Pure functions of plain values, without tensors and threads. Reading order: cost, partition, execute_plan, predict,
search.
"""

from roundpipe.plan.cost import CostModel, LayerCost, ModelProfile, Phase
from roundpipe.plan.execute_plan import ModelExecutePlan, RunType, StageTask, TaskKind, build_schedule, deal
from roundpipe.plan.predict import simulate
from roundpipe.plan.search import choose_exact_plan, choose_plan

__all__ = [
    "CostModel",
    "LayerCost",
    "ModelExecutePlan",
    "ModelProfile",
    "Phase",
    "RunType",
    "StageTask",
    "TaskKind",
    "build_schedule",
    "choose_exact_plan",
    "choose_plan",
    "deal",
    "simulate",
]
