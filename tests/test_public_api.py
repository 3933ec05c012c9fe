"""The public names, signatures and defaults, exactly as documented: scripts depend on them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import roundpipe
from roundpipe import errors

DOCUMENTED_NAMES = {
    "AutoRoundPipe",
    "GradScaler",
    "ModelExecutePlan",
    "OptimizerCtx",
    "RoundPipe",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "clip_grad_norm_",
    "doing_recompute",
    "get_recompute_data",
    "optim",
    "save_for_recompute",
    "load",
    "wrap_model_to_roundpipe",
}
EXCEPTION_NAMES = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
}
PUBLIC_METHODS = {
    "RoundPipe": [
        "forward",
        "forward_backward",
        "optim_parameters",
        "optim_named_parameters",
        "parameters",
        "named_parameters",
        "step",
        "synchronize",
        "set_original_model",
        "state_dict",
        "load_state_dict",
        "zero_grad",
        "timeline",
        "close",
    ],
    "GradScaler": [
        "scale",
        "unscale_",
        "step",
        "update",
        "get_scale",
        "get_growth_factor",
        "set_growth_factor",
        "get_backoff_factor",
        "set_backoff_factor",
        "get_growth_interval",
        "set_growth_interval",
        "state_dict",
        "load_state_dict",
    ],
    "ModelExecutePlan": ["check_valid", "auto"],
    "RoundPipePackedData": ["synchronize"],
}
REQUIRED = inspect.Parameter.empty
EMPTY_CONFIG = roundpipe.RoundPipeRunConfig()

# Parameter names in order, with their defaults. `*args` and `**kwargs` stand under those names.
SIGNATURES: dict[str, dict[str, Any]] = {
    "RoundPipe": {
        "model": REQUIRED,
        "optim_dtype": None,
        "name": None,
        "model_run_config": EMPTY_CONFIG,
        "pin_model": "alloc",
        "devices": None,
        "process_group": None,
        "staleness": 1,
        "compile": False,
        "master_bits": 32,
    },
    "RoundPipe.forward": {"*args": REQUIRED, "roundpipe_run_config": EMPTY_CONFIG, "**kwargs": REQUIRED},
    "RoundPipe.forward_backward": {
        "input_args": (),
        "input_kwargs": {},
        "label": None,
        "loss_fn": Callable,
        "return_outputs": False,
        "run_config": EMPTY_CONFIG,
    },
    "RoundPipe.optim_parameters": {},
    "RoundPipe.optim_named_parameters": {"prefix": "", "remove_duplicate": True},
    "RoundPipe.step": {"step_fn": REQUIRED, "is_async": True, "*args": REQUIRED, "**kwargs": REQUIRED},
    "RoundPipe.synchronize": {},
    "RoundPipe.set_original_model": {"original_model": REQUIRED},
    "GradScaler": {
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    },
    "GradScaler.update": {"new_scale": None, "is_async": True},
    "ModelExecutePlan": {"fwd_plan": (), "bwd_plan": ()},
    "ModelExecutePlan.check_valid": {"num_layers": REQUIRED, "run_type": REQUIRED},
    "ModelExecutePlan.auto": {
        "run_type": REQUIRED,
        "*models": REQUIRED,
        "min_stages": None,
        "upper_threshold": 1.1,
        "model_memory_limit": None,
    },
    "save_for_recompute": {"*data": REQUIRED},
    "get_recompute_data": {},
    "doing_recompute": {},
    "OptimizerCtx": {},
    "wrap_model_to_roundpipe": {
        "model": REQUIRED,
        "use_sequential_preset": None,
        "lower_threshold": 16 * 1024,
        "upper_threshold": None,
        "skip_modules": [],
        "override_config": {},
        "model_run_config": EMPTY_CONFIG,
        "name": None,
        "frozen_weights": None,
        "**roundpipe_kwargs": REQUIRED,
    },
}


def resolve(dotted: str) -> Any:
    value: Any = roundpipe
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def documented_form(dotted: str) -> dict[str, Any]:
    """The parameters of a public callable, `self` left out, in the form of SIGNATURES."""
    form = {}
    for name, parameter in inspect.signature(resolve(dotted)).parameters.items():
        if name == "self":
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        form[stars + name] = parameter.default
    return form


def test_all_is_exactly_the_documented_list() -> None:
    assert sorted(roundpipe.__all__) == sorted(DOCUMENTED_NAMES | EXCEPTION_NAMES)


def test_every_public_name_is_there() -> None:
    missing = [name for name in roundpipe.__all__ if not hasattr(roundpipe, name)]
    assert not missing


@pytest.mark.parametrize("dotted", sorted(SIGNATURES))
def test_signature_is_as_documented(dotted: str) -> None:
    found, wanted = documented_form(dotted), dict(SIGNATURES[dotted])
    assert list(found) == list(wanted)
    for name, default in wanted.items():
        if default is Callable:
            assert callable(found[name])
        else:
            assert found[name] == default, f"default of {name}"
            assert type(found[name]) in (type(default), int, float), f"type of the default of {name}"


def test_loss_fn_defaults_to_the_outputs() -> None:
    default = documented_form("RoundPipe.forward_backward")["loss_fn"]
    outputs = object()
    assert default(outputs, None) is outputs


def test_run_config_fields_are_optional_and_in_order() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(roundpipe.RoundPipeRunConfig)}
    assert list(fields) == [
        "requires_grad",
        "output_device",
        "preserve_rng_state",
        "recompute_grain",
        "num_microbatch",
        "split_input",
        "split_label",
        "merge_output",
        "execute_plan",
        "keep_logits",
        "whole_batch_loss",
        "loss_reduction",
    ]
    assert set(fields.values()) == {None}


def test_submodules_give_their_names() -> None:
    from roundpipe import microbatch, optim

    assert {"Adam", "AdamW"} <= set(optim.__all__)
    assert {"Chunk", "Replicate", "Reducer"} <= set(microbatch.__all__)


def test_every_exception_has_the_one_root() -> None:
    rootless = [name for name in EXCEPTION_NAMES if not issubclass(getattr(errors, name), errors.RoundPipeError)]
    assert not rootless


@pytest.mark.parametrize("name", sorted(DOCUMENTED_NAMES | EXCEPTION_NAMES))
def test_public_name_has_a_docstring(name: str) -> None:
    assert (vars(roundpipe)[name].__doc__ or "").strip()


@pytest.mark.parametrize(
    ("class_name", "method"), [(owner, method) for owner, methods in PUBLIC_METHODS.items() for method in methods]
)
def test_public_method_is_there_and_explained(class_name: str, method: str) -> None:
    found = getattr(getattr(roundpipe, class_name), method)
    says_it_all = method.startswith(("get_growth", "set_growth", "get_backoff", "set_backoff"))
    assert callable(found)
    assert says_it_all or (inspect.getdoc(found) or "").strip()
