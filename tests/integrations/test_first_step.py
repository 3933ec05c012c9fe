"""A trainer's model is split once: the first batch follows the plan that wrapping has made."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from helpers_trainers import arguments, close, new_model, no_report, options
from roundpipe.integrations import RoundPipeTrainer

__all__ = ["no_report"]
ROWS = [
    {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    for tokens in torch.arange(8 * 12).remainder(60).view(8, 12)
]


@pytest.mark.parametrize("is_lora", [False, True])
def test_batches_of_a_collator_need_no_second_plan(
    is_lora: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "roundpipe"):
        trainer = RoundPipeTrainer(
            new_model(is_lora), arguments(tmp_path, max_steps=1), train_dataset=ROWS, roundpipe=options()
        )
        trainer.train()
    close(trainer)
    plans = [record.getMessage() for record in caplog.records if "made a split plan" in record.getMessage()]
    assert len(plans) == 1, plans
