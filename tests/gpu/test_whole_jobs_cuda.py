"""Checkpoints, trainers and statistics on a real GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_checkpoint import Training, assert_same_bits
from helpers_tiny_hf import tiny_model
from helpers_trainers import arguments, close, logged, token_rows
from roundpipe.integrations import RoundPipeOptions, RoundPipeTrainer
from roundpipe.report import read_metrics


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_loop_is_the_whole_loop(dtype: torch.dtype, is_async: bool, tmp_path: Path) -> None:
    """Saved beside training on one worker, resumed on two that share the GPU."""
    whole = Training(dtype=dtype, device="cuda:0", num_devices=1, is_async=is_async)
    losses = whole.train(6, save_in=tmp_path)
    resumed = Training(dtype=dtype, device="cuda:0", num_devices=2, is_async=is_async)
    resumed.load(tmp_path / "step-2")
    assert resumed.train(4, save_in=tmp_path / "again") == losses[2:]
    assert_same_bits(resumed.bits(), whole.bits())
    for training in (whole, resumed):
        training.model.close()


def trainer(folder: Path, devices: list[str], is_lora: bool) -> Any:
    model = tiny_model(attention_dropout=0.1).to(torch.bfloat16)
    if is_lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    given = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "use_cpu": False}
    return RoundPipeTrainer(
        model=model,
        args=arguments(folder, **given),
        train_dataset=token_rows(),
        roundpipe=RoundPipeOptions(devices=devices, view=False),
    )


@pytest.mark.parametrize("is_lora", [False, True])
def test_resumed_trainer_is_the_whole_trainer(is_lora: bool, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", ["cuda:0"], is_lora)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "part" / "checkpoint-2")
    resumed = trainer(tmp_path / "part", ["cuda:0"] * 2, is_lora)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())
    for each in (whole, resumed):
        close(each)


def test_figures_of_a_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, ["cuda:0"], is_lora=False)
    run.train()
    close(run)
    for row in read_metrics(tmp_path / "metrics.jsonl"):
        assert row["bytes_up"] > row["weights_up_bytes"] > 0
        assert row["bytes_down"] > row["gradients_down_bytes"] > 0
        assert 0 < row["device_share"]["cuda:0"] <= 1
        assert 0 < row["device_peak_bytes"]["cuda:0"] < row["device_limit_bytes"]["cuda:0"]
