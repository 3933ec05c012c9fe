"""Decides what runs where: plans, costs, schedules and their simulation. Pure: no tensors, no threads.

Reading order: run_type, cost, ranges, partition, auto, execute_plan, schedule, memory, simulator,
exact_step, planner.
"""

from roundpipe.plan.cost import CostModel, LayerCost, ModelProfile, Phase
from roundpipe.plan.execute_plan import ModelExecutePlan, RunType
from roundpipe.plan.memory import stage_bytes
from roundpipe.plan.schedule import StageTask, TaskKind, build_schedule, deal
from roundpipe.plan.search import choose_exact_plan, choose_plan
from roundpipe.plan.simulator import simulate

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
    "stage_bytes",
]
