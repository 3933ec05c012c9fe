"""Claim: RoundPipeTrainer is as fast as a bare loop over the same model, and its checkpoints cost what the disk costs.

    python benchmarks/bench_trainer.py [--parts lora,full,checkpoint] [--trainer-steps 20] [--warm 4] [--steps 4]

lora: rank 16 on an 8B shape, 8 sequences of 4096 tokens a step. full: all weights of it, 16 sequences, float32 masters.
Both ratios are to the bare loop with the same clipping; the trainer shows its live view, which is printed as text at
the end. checkpoint: full training with bfloat16 optimizer state (the checkpoint is 6 bytes per parameter), saved while
training goes on, and resumed in a new process, whose losses must equal those of the first process bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from bench_transformers import batch, build
from measuring import (
    HostMemoryPeak,
    Measured,
    SpeedTable,
    begin,
    gigabytes,
    has_gpu,
    host_peak_bytes,
    measured,
    options_parser,
    pace_of,
    plain_write_s,
    timed,
)
from workload import LEARNING_RATE, compute_device

from roundpipe import RoundPipeRunConfig, checkpoint, clip_grad_norm_, wrap_model_to_roundpipe
from roundpipe.optim import AdamW

MAX_NORM = 1.0
SETTLING_STEPS = 4  # steps of the trainer that are not timed
STEPS_SAVED_AT, STEPS_IN_ALL = 3, 7


def shape_name() -> str:
    return "8b" if has_gpu() else "tiny"


def vocabulary() -> int:
    return 128256 if has_gpu() else 256


def wrapped(model: Any, num_microbatch: int, optim_dtype: torch.dtype = torch.float32) -> Any:
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    return wrap_model_to_roundpipe(model, optim_dtype=optim_dtype, devices=[compute_device()], model_run_config=config)


class BareLoop:
    """Exact steps of a wrapped model without Trainer."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self._model, self._ids = model, ids
        self.optimizer = AdamW(list(model.optim_parameters()), lr=LEARNING_RATE)
        self.clips = True

    def step(self) -> float:
        loss = self._model.forward_backward(input_kwargs={"input_ids": self._ids, "labels": self._ids})
        self._model.step(self._update, is_async=False)
        return float(loss)

    def _update(self) -> None:
        if self.clips:
            clip_grad_norm_(self._model, MAX_NORM, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()


# Speed.


def speed(name: str, *, lora_rank: int, num_sequences: int, num_microbatch: int, options: argparse.Namespace) -> None:
    length = 4096 if has_gpu() else 32
    ids = batch(num_sequences, length, vocabulary())
    begin(f"{name}, {shape_name()} shape, {num_sequences} x {length}, {num_microbatch} microbatches", "a GPU's speed")
    network = build(shape_name())
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        network = get_peft_model(network, LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = wrapped(network, num_microbatch)
    table = SpeedTable("bare loop")
    loop, pace = BareLoop(model, ids), pace_of(options)
    bare = measured(loop.step, ids.numel(), pace)
    table.add("bare loop, gradients clipped", bare, bare)
    view = add_trainer_row(table, model, loop.optimizer, ids, options.trainer_steps, bare)
    table.add("bare loop, gradients clipped, once more", measured(loop.step, ids.numel(), pace), bare)
    loop.clips = False
    table.add("bare loop, not clipped", measured(loop.step, ids.numel(), pace), bare)
    model.close()
    print(view, flush=True)


def add_trainer_row(
    table: SpeedTable, model: Any, optimizer: Any, ids: torch.Tensor, num_steps: int, bare: Measured | None
) -> str:
    """Train with RoundPipeTrainer; returns the last live view as text."""
    from transformers import TrainingArguments

    from roundpipe.integrations import RoundPipeTrainer
    from roundpipe.report import read_metrics
    from roundpipe.report.live_view import render_text

    num_sequences = len(ids)
    rows = [{"input_ids": row, "labels": row} for row in ids] * num_steps
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=num_sequences,
            max_steps=num_steps,
            max_grad_norm=MAX_NORM,
            learning_rate=LEARNING_RATE,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=not has_gpu(),
        )
        trainer = RoundPipeTrainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train()
        seconds = statistics.fmean(
            row["step_s"] for row in read_metrics(Path(folder, "metrics.jsonl"))[SETTLING_STEPS:]
        )
        view = render_text(trainer.run_view.run_state)
    peak = 0 if bare is None else bare.gpu_peak_bytes
    table.add("RoundPipeTrainer, live view", Measured(ids.numel() / seconds, peak, host_peak_bytes()), bare)
    return view


# Checkpoints.


def open_loop() -> tuple[Any, BareLoop]:
    """A run whose losses can be compared bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = wrapped(build(shape_name()), 8 if has_gpu() else 2, torch.bfloat16)
    return model, BareLoop(model, batch(16 if has_gpu() else 4, 4096 if has_gpu() else 32, vocabulary()))


def save_beside_training(folder: Path) -> list[float]:
    """Train, save, train on while files are written; returns the losses after the save."""
    begin(f"a checkpoint of full training, {shape_name()} shape, bfloat16 optimizer state", "a server's disk")
    print(f"free disk {gigabytes(shutil.disk_usage(folder).free)}")
    model, loop = open_loop()
    memory = HostMemoryPeak()
    before = [timed(loop.step) for _ in range(STEPS_SAVED_AT)]
    memory.close()
    memory_beside, start = HostMemoryPeak(), time.perf_counter()
    pending, returned_s = timed(lambda: checkpoint.save(folder / "run", model, loop.optimizer))
    ends: list[float] = []
    watcher = threading.Thread(target=lambda: ends.append((pending.wait(), time.perf_counter())[1]))
    watcher.start()
    beside = [timed(loop.step) for _ in range(STEPS_IN_ALL - STEPS_SAVED_AT)]
    watcher.join()
    memory_beside.close()
    model.close()
    sizes = [file.stat().st_size for file in (folder / "run").iterdir()]
    size, largest, seconds = sum(sizes), max(sizes), ends[0] - start
    print(f"checkpoint {gigabytes(size)}, largest file {gigabytes(largest)}")
    print(f"save() returned after {returned_s:.2f} s; complete after {seconds:.1f} s: {size / seconds / 1e9:.2f} GB/s")
    added = memory_beside.peak_bytes - memory.peak_bytes
    print(f"peak of host memory above that of training alone: {added / 1e6:.0f} MB, {added / largest:.2f} of that file")
    disk_s = plain_write_s(folder / "plain", largest)
    print(f"the disk alone, one plain write of {gigabytes(largest)}: {largest / disk_s / 1e9:.2f} GB/s")
    print("seconds per step before:", " ".join(f"{s:.2f}" for _, s in before))
    print("seconds per step beside the save:", " ".join(f"{s:.2f}" for _, s in beside), flush=True)
    return [loss for loss, _ in beside]


def resume(folder: Path, expected: list[float]) -> None:
    model, loop = open_loop()
    memory = HostMemoryPeak()
    _, seconds = timed(lambda: checkpoint.load(folder / "run", model, loop.optimizer))
    added = memory.close()
    size = sum(file.stat().st_size for file in (folder / "run").iterdir())
    print(f"load() in a new process: {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s (each byte is read twice)")
    print(f"host memory added by load(): {gigabytes(added)} (includes the optimizer's state)")
    losses = [loop.step() for _ in expected]
    same = losses == expected
    print(f"losses after resuming {'equal those of the first process bit for bit' if same else 'DIFFER'}: {losses}")
    model.close()
    if not same:
        sys.exit(f"expected {expected}")


def main() -> None:
    if sys.argv[1:2] == ["--resume"]:
        resume(Path(sys.argv[2]), json.loads(sys.argv[3]))
        return
    parser = options_parser(__doc__)
    parser.add_argument("--parts", default="lora,full,checkpoint")
    parser.add_argument("--trainer-steps", type=int, default=20 if has_gpu() else 8)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if "lora" in parts:
        speed("LoRA of rank 16", lora_rank=16, num_sequences=8, num_microbatch=4, options=options)
    if "full" in parts:
        speed("full training", lora_rank=0, num_sequences=16, num_microbatch=8, options=options)
    if "checkpoint" in parts:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            losses = save_beside_training(Path(folder))
            subprocess.run([sys.executable, __file__, "--resume", folder, json.dumps(losses)], check=True)


if __name__ == "__main__":
    main()
