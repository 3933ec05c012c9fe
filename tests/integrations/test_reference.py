"""The reference of GRPO, DPO and KTO: the adapter switched off, or a second wrapped model on the same devices."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoModelForCausalLM

from helpers_tiny_hf import preference_rows, save_tiny_model, tiny_tokenizer
from helpers_trainers import LORA, close, distinct_words, host_bytes, options, settings
from roundpipe.api.roundpipe import RoundPipe
from roundpipe.integrations import RoundPipeDPOTrainer, RoundPipeGRPOTrainer, RoundPipeKTOTrainer

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets.disable_progress_bars()
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=64, intermediate_size=2048)


def grpo(folder: Path) -> tuple[Any, dict[str, Any]]:
    usual = {"beta": 0.1, "num_generations": 2, "max_completion_length": 4}
    rows = [{"prompt": row["prompt"]} for row in preference_rows(4)]
    arguments = trl.GRPOConfig(**settings(folder / "grpo", max_steps=1, warmup_steps=0, **usual))
    return RoundPipeGRPOTrainer, {"args": arguments, "reward_funcs": distinct_words, "train_dataset": rows}


def dpo(folder: Path) -> tuple[Any, dict[str, Any]]:
    arguments = trl.DPOConfig(**settings(folder / "dpo", max_steps=1, warmup_steps=0))
    return RoundPipeDPOTrainer, {"args": arguments, "train_dataset": preference_rows(4)}


def kto(folder: Path) -> tuple[Any, dict[str, Any]]:
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 2 == 0}
        for number, row in enumerate(preference_rows(4))
    ]
    return RoundPipeKTOTrainer, {
        "args": trl.KTOConfig(**settings(folder / "kto", max_steps=1, warmup_steps=0)),
        "train_dataset": rows,
    }


@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("method", [grpo, dpo, kto])
def test_reference_is_one_more_copy_of_the_weights_or_none(
    method: Any, is_lora: bool, folder: Path, tmp_path: Path
) -> None:
    trainer_class, given = method(tmp_path)
    given["train_dataset"] = datasets.Dataset.from_list(given["train_dataset"])
    if is_lora:
        given["peft_config"] = peft.LoraConfig(**LORA)
    tokenizer = tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # What tests before have left stays till the end. Not masters, which need their model.
    others = [found for found in gc.get_objects() if type(found) in (Tensor, Parameter)]
    before = host_bytes()
    trainer = trainer_class(model=model, processing_class=tokenizer, roundpipe=options(2), **given)
    added = host_bytes() - before
    reference = trainer.ref_model
    try:
        if is_lora:
            assert reference is None
            assert added < 0.05 * weights
            return
        assert type(reference) is RoundPipe
        assert 0.99 * weights < added < 1.05 * weights
        assert list(reference.optim_parameters()) == []
        assert reference._engine._pool is trainer.model._engine._pool
        start = {name: value.clone() for name, value in reference.named_parameters()}
        trainer.train()
        assert all(value.equal(start[name]) for name, value in reference.named_parameters())
        changed = [name for name, value in trainer.model.named_parameters() if not value.equal(start[name])]
        assert changed
    finally:
        close(trainer)
        del others
