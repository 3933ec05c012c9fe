"""Runs of trainers on tiny models, for comparisons of RoundPipe's trainers with the plain ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

from helpers_tiny_hf import TokenRows, tiny_model
from roundpipe.integrations import RoundPipeOptions, run_view

NUM_STEPS = 20
# Five batches in an epoch and two per step: the last step of an epoch has one batch, which has two rows.
BATCH_ROWS, NUM_ROWS = 4, 18
# Gradients are clipped in every step, the rate rises and falls, and weights decay.
SETTINGS: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": BATCH_ROWS,
    "per_device_eval_batch_size": BATCH_ROWS,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 4,
    "weight_decay": 0.1,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 7,
}
LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
}


@pytest.fixture(autouse=True, scope="module")  # "package" would reach tests of other folders
def no_report() -> Iterator[None]:
    """Runs write no report: drawing one takes longer than a tiny run, and tests/report tests it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_view, "write_report", lambda folder: None)
        yield


@dataclass
class Outcome:
    """What a run has logged in each step, and its weights at the end."""

    losses: list[float]
    grad_norms: list[float | None]
    learning_rates: list[float]
    weights: dict[str, Tensor]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**SETTINGS, "output_dir": str(folder), **changes}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**settings(folder, **changes))


def options(num_devices: int = 1, **changes: Any) -> RoundPipeOptions:
    """Options whose number of microbatches does not depend on the number of devices."""
    return RoundPipeOptions(**{"devices": ["cpu"] * num_devices, "num_microbatch": 3, "view": False, **changes})


def lora_model(kind: str = "qwen3") -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(kind)
    torch.manual_seed(1)  # of the adapter
    return get_peft_model(model, LoraConfig(**LORA))


def new_model(is_lora: bool) -> Any:
    return lora_model() if is_lora else tiny_model()


def token_rows(num_rows: int = NUM_ROWS) -> TokenRows:
    return TokenRows(num_rows)


def outcome_of(trainer: Any) -> Outcome:
    """Train; returns what was logged. Closes the model if it is wrapped."""
    trainer.train()
    steps = logged(trainer)
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    close(trainer)
    return Outcome(
        [entry["loss"] for entry in steps],
        [entry.get("grad_norm") for entry in steps],
        [entry["learning_rate"] for entry in steps],
        weights,
    )


def logged(trainer: Any) -> list[dict[str, Any]]:
    """The entries of training steps in the log."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def close(trainer: Any) -> None:
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if hasattr(model, "close"):
            model.close()


class SeedEachStep(TrainerCallback):
    """Gives runs the same random numbers where RoundPipe draws one number per call with gradients."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text.split()))) for text in completions]


def host_bytes() -> int:
    """The bytes of all storages in host memory that Python objects refer to. Storages may lie inside of others.

    Fake tensors, which torch's compiler keeps, say that they are on the CPU; their storages have no memory.
    """
    gc.collect()
    storages = (found.untyped_storage() for found in gc.get_objects() if isinstance(found, Tensor))
    places = sorted((each.data_ptr(), each.nbytes()) for each in storages if each.device.type == "cpu")
    total = end = 0
    for start, size in places:
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


def assert_like_plain(found: Outcome, plain: Outcome) -> None:
    """Losses, norms and rates of every step, and the final weights, are those of the plain trainer."""
    assert len(found.losses) == len(plain.losses) == NUM_STEPS
    assert all(norm is not None and norm > SETTINGS["max_grad_norm"] for norm in plain.grad_norms), (
        "each step must clip"
    )
    assert found.losses == pytest.approx(plain.losses, abs=1e-5, rel=0)
    assert found.grad_norms == pytest.approx(plain.grad_norms, abs=0, rel=1e-4)
    assert found.learning_rates == plain.learning_rates
    assert len(set(plain.learning_rates)) > NUM_STEPS // 2
    assert found.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        difference = float((found.weights[name] - value).abs().max())
        assert difference < 1e-5, f"{name} differs by {difference}"


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    assert found.learning_rates == expected.learning_rates
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
