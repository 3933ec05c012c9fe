"""Trainers over iterable datasets: as with the plain trainer, and resumed runs equal whole runs bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from test_trainer_resume import assert_same, crash, dropping_model, trained
from transformers import Trainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from helpers_tiny_hf import chat_rows, tiny_model, tiny_tokenizer
from helpers_trainers import (
    Outcome,
    arguments,
    logged,
    no_report,  # noqa: F401
    options,
    outcome_of,
    settings,
    token_rows,
)
from roundpipe.integrations import RoundPipeSFTTrainer, RoundPipeTrainer

# Five batches of rows in a pass, two for a step: steps of several passes, and a batch that is left over in each.
NUM_ROWS = 18
SAVES: dict[str, Any] = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3, "warmup_steps": 2}


def tokens() -> Iterator[dict[str, Any]]:
    rows = token_rows(NUM_ROWS)
    for number in range(NUM_ROWS):
        yield {name: value.tolist() for name, value in rows[number].items()}


def shuffled_tokens() -> IterableDataset:
    return IterableDataset.from_generator(tokens).shuffle(seed=5, buffer_size=7)


def new_trainer(folder: Path, model: Any, num_devices: int = 2) -> Any:
    return RoundPipeTrainer(
        model=model,
        args=arguments(folder, **SAVES),
        train_dataset=shuffled_tokens(),
        roundpipe=options(num_devices, num_microbatch=None),
    )


def sft_settings(folder: Path) -> SFTConfig:
    return SFTConfig(**settings(folder, **SAVES, max_length=24))


def shuffled_chats() -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(chat_rows(NUM_ROWS))).shuffle(seed=5, buffer_size=7)


def new_sft_trainer(folder: Path, model: Any, num_devices: int = 2) -> Any:
    return RoundPipeSFTTrainer(
        model=model,
        args=sft_settings(folder),
        train_dataset=shuffled_chats(),
        processing_class=tiny_tokenizer(),
        roundpipe=options(num_devices, num_microbatch=None),
    )


def assert_near(found: Outcome, plain: Outcome) -> None:
    assert len(found.losses) == SAVES["max_steps"]
    assert found.losses == pytest.approx(plain.losses, abs=1e-5, rel=0)
    for name, value in plain.weights.items():
        assert torch.allclose(found.weights[name], value, atol=1e-5, rtol=0), name


@pytest.mark.filterwarnings("ignore")
def test_trainers_train_as_the_plain_ones(tmp_path: Path) -> None:
    plain = Trainer(model=tiny_model(), args=arguments(tmp_path / "a", **SAVES), train_dataset=shuffled_tokens())
    assert_near(outcome_of(new_trainer(tmp_path / "b", tiny_model())), outcome_of(plain))
    plain_sft = SFTTrainer(
        tiny_model(), sft_settings(tmp_path / "c"), train_dataset=shuffled_chats(), processing_class=tiny_tokenizer()
    )
    assert_near(outcome_of(new_sft_trainer(tmp_path / "d", tiny_model())), outcome_of(plain_sft))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("new", "crash_step"),
    [pytest.param(new_trainer, 4, marks=pytest.mark.slow), (new_trainer, 7), (new_sft_trainer, 4)],
)
def test_a_resumed_run_trains_the_rows_that_come_next(new: Any, crash_step: int, tmp_path: Path) -> None:
    """Also after the data has begun anew, in another order, and with batches left over by a pass."""

    def steps(results: Any) -> Any:
        left_out = ("num_tokens", "step_time")  # TRL counts tokens from the start of the process
        return [{k: v for k, v in entry.items() if k not in left_out} for entry in results[0]], *results[1:]

    whole = new(tmp_path / "whole", dropping_model(False))
    expected = trained(whole)
    assert len({entry["loss"] for entry in logged(whole)}) == SAVES["max_steps"]
    crash(new(tmp_path / "torn", dropping_model(False)), step=crash_step)
    assert_same(steps(trained(new(tmp_path / "torn", dropping_model(False), 1), resume=True)), steps(expected))
