"""Runs of trainers that the tests of machines start in the processes of a pool: with the environment of torchrun."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from helpers_tiny_hf import TokenRows, chat_rows, preference_rows, tiny_model, tiny_tokenizer

GLOBAL_ROWS, GLOBAL_MICROBATCHES = 6, 6  # of a batch, on all machines together
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.2,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 7,
}


@contextlib.contextmanager
def _launched(rank: int, size: int) -> Iterator[None]:
    """The environment that torchrun makes. The process group exists already."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    values = (rank, size, rank, size, "localhost", "29500", 1)
    os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)} if size > 1 else {})
    try:
        yield
    finally:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        for name in names:
            os.environ.pop(name, None)


def _model(kind: str) -> Any:
    if kind != "lora":
        return tiny_model()
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def _trainer(kind: str, size: int, folder: str, changes: dict[str, Any]) -> Any:
    from roundpipe.integrations import RoundPipeOptions, run_view

    run_view.write_report = lambda folder: None  # type: ignore[assignment]
    is_async = changes.pop("is_async", False)
    rows = changes.pop("rows", 22)
    given = {
        **SETTINGS,
        "output_dir": folder,
        "per_device_train_batch_size": GLOBAL_ROWS // size,
        "per_device_eval_batch_size": GLOBAL_ROWS // size,
        **changes,
    }
    options = RoundPipeOptions(
        devices=["cpu"], num_microbatch=GLOBAL_MICROBATCHES // size, is_async=is_async, view=False
    )
    if kind in ("sft", "dpo"):
        return _trl_trainer(kind, given, options, rows)
    from transformers import EarlyStoppingCallback, TrainingArguments

    from roundpipe.integrations import RoundPipeTrainer

    patience = given.pop("patience", None)
    return RoundPipeTrainer(
        model=_model(kind),
        args=TrainingArguments(**given),
        train_dataset=TokenRows(rows),
        eval_dataset=TokenRows(13, seed=3),
        callbacks=None if patience is None else [EarlyStoppingCallback(patience)],
        roundpipe=options,
    )


def _trl_trainer(kind: str, given: dict[str, Any], options: Any, rows: int) -> Any:
    import datasets
    import trl

    from roundpipe.integrations import RoundPipeDPOTrainer, RoundPipeSFTTrainer

    datasets.disable_progress_bars()
    if kind == "sft":
        return RoundPipeSFTTrainer(
            model=tiny_model(),
            args=trl.SFTConfig(**given, assistant_only_loss=True, max_length=32),
            train_dataset=datasets.Dataset.from_list(chat_rows(rows)),
            eval_dataset=datasets.Dataset.from_list(chat_rows(13, seed=3)),
            processing_class=tiny_tokenizer(),
            roundpipe=options,
        )
    return RoundPipeDPOTrainer(
        model=tiny_model(),
        ref_model=tiny_model(),
        args=trl.DPOConfig(**given, max_length=32),
        train_dataset=datasets.Dataset.from_list(preference_rows(rows)),
        processing_class=tiny_tokenizer(),
        roundpipe=options,
    )


def train(
    rank: int, size: int, kind: str, folder: str, resume: str | None = None, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train; returns what was logged, the weights and the loss of an evaluation."""
    torch.manual_seed(50 + rank)
    with _launched(rank, size):
        trainer = _trainer(kind, size, folder, dict(changes or {}))
        try:
            trainer.train(resume_from_checkpoint=resume)
            evaluated = None if trainer.eval_dataset is None else trainer.evaluate()["eval_loss"]
            trainer.model.synchronize()
            history = trainer.state.log_history
            return {
                "losses": [entry["loss"] for entry in history if "loss" in entry],
                "norms": [entry.get("grad_norm") for entry in history if "loss" in entry],
                "eval losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
                "evaluated": evaluated,
                "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
                "steps": trainer.state.global_step,
                "best": trainer.state.best_global_step,
            }
        finally:
            trainer.model.close()


def rows_of(rank: int, size: int, folder: str, rows: int) -> list[list[list[int]]]:
    """The rows of all batches of two epochs."""
    with _launched(rank, size):
        trainer = _trainer("full", size, folder, {"rows": rows})
        trainer.train_dataset = _Numbers(rows)
        trainer.data_collator = list
        trainer._set_signature_columns_if_needed = lambda: None
        trainer._signature_columns = None
        trainer.args.remove_unused_columns = False
        loader = trainer.get_train_dataloader()
        found = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            batches = [list(batch) for batch in loader]
            assert len(batches) == len(loader)
            found.append(batches)
        trainer.model.close()
        return found


class _Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> int:
        return row


def metrics_of(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
