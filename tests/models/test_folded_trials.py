"""Trials that fold products make the split plans of trials with whole products, and do not read whole weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sweep import missing_packages
from tiny_cases import Case, case_named, load_cases
from torch.overrides import TorchFunctionMode

from roundpipe.split import folded
from roundpipe.split.splitter import ModelSplitter

pytest.importorskip("transformers")

FEW = [
    "llama:LlamaForCausalLM",
    "gemma3:Gemma3ForCausalLM",
    "mamba:MambaForCausalLM",
    "zamba:ZambaForCausalLM",
    "t5:T5ForConditionalGeneration",
    "qwen3_vl:Qwen3VLForConditionalGeneration",
    "mixtral:MixtralForCausalLM+router",
    "gemma4:Gemma4ForCausalLM",
]


def plan_of(case: Case) -> Any:
    """What the splitter finds out about a model, or why it refuses it."""
    model, batch, _ = case.build()
    model.train()
    splitter = ModelSplitter(model)
    try:
        splitter.learn((), batch)
    except Exception as error:
        return repr(error)
    placed = splitter.find((), batch, training=True)
    plan = placed.plan
    return plan.calls, plan.taps, plan.points, plan.reasons, plan.tokenwise, plan.head is None, placed.calls


def check(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    with monkeypatch.context() as whole:
        whole.setattr(folded, "_LEAST", 10**9)
        expected = plan_of(case)
    monkeypatch.setattr(folded, "_WIDTH", 4)
    monkeypatch.setattr(folded, "_LEAST", 2)
    assert plan_of(case) == expected


@pytest.mark.parametrize("key", FEW)
def test_plans_are_those_of_whole_products(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    check(monkeypatch, case_named(key))


@pytest.mark.models
@pytest.mark.parametrize("case", load_cases(), ids=str)
def test_plans_of_all_models_are_those_of_whole_products(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    if missing := missing_packages(case):
        pytest.skip(f"needs {', '.join(missing)}")
    check(monkeypatch, case)


class WidthsSeen(TorchFunctionMode):
    """Notes how many columns the weights of linear layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: Counter[int] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            self.widths[args[1].shape[1]] += 1
        return func(*args, **(kwargs or {}))


def test_no_trial_reads_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the time of trials does not grow with the width of a model."""
    model, batch, _ = case_named("llama:LlamaForCausalLM").build()
    with WidthsSeen() as whole:
        ModelSplitter(model).learn((), batch)
    monkeypatch.setattr(folded, "_WIDTH", 4)
    monkeypatch.setattr(folded, "_LEAST", 2)
    with WidthsSeen() as seen:
        ModelSplitter(model).learn((), batch)
    assert min(whole.widths) >= 8
    assert set(seen.widths) == {4}
    assert seen.widths.total() == whole.widths.total()
