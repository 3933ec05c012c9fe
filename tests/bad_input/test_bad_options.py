"""Invalid run configs and execute plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_input_scene import NUM_LAYERS, Scene, refused

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.errors import ArgumentTypeError, ConfigError, DeviceError, PlanError, RoundPipeError

# ---- run configs -----------------------------------------------------------------------------------------------------


def test_fewer_than_one_microbatch(scene: Scene) -> None:
    for count in (0, -3):
        with refused(ConfigError, "num_microbatch must be at least 1", str(count)):
            scene.with_config(num_microbatch=count)


def test_a_number_of_microbatches_that_is_no_int(scene: Scene) -> None:
    for count in (True, 2.5, "4", [4], torch.tensor(4)):
        with refused(ArgumentTypeError, "num_microbatch must be an int", repr(count)):
            scene.with_config(num_microbatch=count)


def test_an_unknown_recompute_grain(scene: Scene) -> None:
    for grain in ("block", "Stage", 3, ["stage"]):
        with refused(ConfigError, "recompute_grain", '"stage" or "layer"', repr(grain)):
            scene.with_config(recompute_grain=grain)


def test_switches_that_are_no_bool(scene: Scene) -> None:
    for name in ("requires_grad", "preserve_rng_state"):
        for value in (1, "yes"):
            with refused(ArgumentTypeError, name, repr(value), "True, False or None"):
                scene.with_config(**{name: value})


def test_an_output_device_that_is_nonsense(scene: Scene) -> None:
    for device in ("gpu7", "", 3.5, ["cpu"], True):
        with refused(ConfigError, "output_device", repr(device), '"cuda:0"'):
            scene.with_config(output_device=device)


def test_an_output_device_that_does_not_exist(scene: Scene) -> None:
    for device in ("cuda:99", torch.device("cuda", 99)):
        with refused(DeviceError, "output_device", "cuda:99", "CUDA device(s) are visible"):
            scene.with_config(output_device=device)
        with refused(DeviceError, "cuda:99"):
            scene.model(scene.x, roundpipe_run_config=RoundPipeRunConfig(output_device=device))


def test_an_output_device_that_holds_no_values(scene: Scene) -> None:
    with refused(DeviceError, "output_device", "meta", "cpu"):
        scene.with_config(output_device="meta")


def test_a_plan_of_another_type_in_the_config(scene: Scene) -> None:
    for plan in ([range(5)], range(5), "auto"):
        with refused(ArgumentTypeError, "execute_plan must be a ModelExecutePlan", type(plan).__name__):
            scene.with_config(execute_plan=plan)


def test_a_call_config_of_another_type(scene: Scene) -> None:
    for config in (None, {"num_microbatch": 2}, 2):
        with refused(ArgumentTypeError, "RoundPipeRunConfig", type(config).__name__):
            scene.forward_backward(run_config=config)
        with refused(ArgumentTypeError, "RoundPipeRunConfig", type(config).__name__):
            scene.model(scene.x, roundpipe_run_config=config)


def test_an_unknown_option(scene: Scene) -> None:
    with pytest.raises(TypeError, match="num_microbatches"):
        scene.with_config(num_microbatches=4)


@pytest.mark.parametrize("variable", ["ROUNDPIPE_WATCHDOG_S", "ROUNDPIPE_WAIT_LIMIT_S"])
def test_a_limit_of_waits_that_is_no_number(variable: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "-1", "0", "nan"):
        monkeypatch.setenv(variable, text)
        with refused(ConfigError, f"{variable}={text!r}", "seconds"):
            scene.forward_backward()
    monkeypatch.delenv(variable)


# ---- plans -----------------------------------------------------------------------------------------------------------

ALL = range(NUM_LAYERS)


FAULTY_PLANS: list[tuple[Any, Any, list[str]]] = [
    ([range(0, 1), range(2, 4)], [range(4, 5), ALL[:4]], ["fwd_plan[1]", "hole", "layer 1"]),
    ([range(0, 4)], [range(4, 5), range(2, 4), range(0, 1)], ["bwd_plan[2]", "hole", "layer 1"]),
    ([range(0, 3), range(2, 4)], [range(4, 5), ALL[:4]], ["fwd_plan[1]", "overlaps", "layer 2 appears twice"]),
    ([range(2, 4), range(0, 2)], [range(4, 5), ALL[:4]], ["fwd_plan[0]", "wrong order", "ascending"]),
    ([range(0, 4)], [range(4, 5), range(0, 2), range(2, 4)], ["bwd_plan[1]", "wrong order", "descending"]),
    ([range(0, 3)], [range(4, 5), ALL[:4]], ["bwd_plan[0]", "fused stage", "at layer 3", "range(3, 5)"]),
    ([range(0, 3)], [range(3, 4), ALL[:3]], ["bwd_plan[0]", "last layer, 4"]),
    ([ALL], [range(0, 5)], ["fwd_plan ends at layer 4", "none for the fused stage"]),
    ([range(0, 4)], [], ["bwd_plan is empty", "range(4, 5)"]),
    ([range(0, 2)], [range(2, 5)], ["bwd_plan ends too early", "layers 0 to 1", "range(0, 2)"]),
    ([range(0, 7)], [range(7, 8)], ["fwd_plan[0]", "out of bounds", "0 to 4"]),
    ([range(0, 2)], [range(2, 3), range(0, 2)], ["bwd_plan[0]", "last layer, 4"]),
    ([range(3, -1, -1)], [range(4, 5), ALL[:4]], ["fwd_plan[0]", "step -1"]),
    ([range(0, 0)], [ALL], ["fwd_plan[0]", "empty"]),
    ([[0, 1, 2, 3]], [range(4, 5), ALL[:4]], ["fwd_plan[0]", "must be a range", "list"]),
    (range(0, 4), [range(4, 5), ALL[:4]], ["fwd_plan[0]", "must be a range", "int"]),
]


def test_a_plan_that_does_not_cover_the_model(scene: Scene) -> None:
    for fwd_plan, bwd_plan, fragments in FAULTY_PLANS:
        with refused(PlanError, *fragments):
            scene.with_config(execute_plan=ModelExecutePlan(fwd_plan, bwd_plan))


def test_a_fused_plan_given_to_other_calls(scene: Scene) -> None:
    config = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(0, 3)], [range(3, 5), range(0, 3)]))
    with refused(PlanError, "fwd_plan ends too early", "layers 3 to 4"):
        scene.model(scene.x, roundpipe_run_config=config)
    with torch.no_grad(), refused(PlanError, "fwd_plan ends too early"):
        scene.model(scene.x, roundpipe_run_config=config)


def test_a_plan_that_was_changed_for_the_worse(scene: Scene) -> None:
    plan = ModelExecutePlan([range(0, 3)], [range(3, 5), range(0, 3)])
    config = RoundPipeRunConfig(execute_plan=plan)
    plan.fwd_plan.append(range(4, 5))
    with refused(PlanError, "fwd_plan[1]", "hole", "layer 3"):
        scene.forward_backward(run_config=config)


def test_a_plan_made_of_no_list(scene: Scene) -> None:
    for plan in (5, None):
        with refused(ArgumentTypeError, "fwd_plan", "list of ranges", repr(plan)):
            scene.with_config(execute_plan=ModelExecutePlan(plan))  # type: ignore[arg-type]


def test_an_automatic_plan_from_bad_arguments(scene: Scene) -> None:
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[RoundPipeError], list[str]]] = [
        (("fast", scene.model), {}, PlanError, ["'fast'", "'fused'"]),
        ((3, scene.model), {}, ArgumentTypeError, ["run_type", "3"]),
        (("train",), {}, ConfigError, ["at least one model"]),
        (("train", torch.nn.Linear(2, 2)), {}, ArgumentTypeError, ["model 0", "Linear", "wrap it first"]),
        (("train", scene.model), {"min_stages": 0}, ConfigError, ["min_stages", "0"]),
        (("train", scene.model), {"min_stages": 1.5}, ArgumentTypeError, ["min_stages", "1.5"]),
        (("train", scene.model), {"min_stages": True}, ArgumentTypeError, ["min_stages", "True"]),
        (("train", scene.model), {"upper_threshold": 0.9}, ConfigError, ["upper_threshold", "0.9", "at least 1"]),
        (("train", scene.model), {"upper_threshold": "1"}, ArgumentTypeError, ["upper_threshold", "'1'"]),
        (("train", scene.model), {"upper_threshold": float("nan")}, ConfigError, ["upper_threshold", "nan"]),
        (("train", scene.model), {"model_memory_limit": -1}, ConfigError, ["model_memory_limit", "-1"]),
        (("train", scene.model), {"model_memory_limit": 1e-9}, PlanError, ["layer 0", "model_memory_limit", "raise"]),
    ]
    for args, options, kind, fragments in cases:
        with refused(kind, *fragments):
            ModelExecutePlan.auto(*args, **options)


def test_a_plan_checked_for_no_model(bystander: Scene) -> None:
    plan = ModelExecutePlan([range(1)], [range(1)])
    with refused(PlanError, "at least 1 layer", "0"):
        plan.check_valid(0, "train")
    with refused(ArgumentTypeError, "num_layers", "'5'"):
        plan.check_valid("5", "train")  # type: ignore[arg-type]
    with refused(PlanError, "'training'", "'train'"):
        plan.check_valid(1, "training")
