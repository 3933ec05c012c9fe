"""`make demo`: trains with `roundpipe train`, kills it half-way, resumes it on other devices, compares bit for bit.

Writes report.html and report.png to demo-output/. The exit code is 1 if a promise does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from demo.chats import read_chats, save_model, training_and_held_out_pairs, write_chats
from demo.comparison import (
    Finding,
    answers,
    compare_with_plain,
    compare_with_stale,
    compare_with_undisturbed,
    losses_of,
)
from demo.plain_loop import Recipe
from roundpipe.checkpoint import latest
from roundpipe.report.page import PAGE_FILE, PICTURE_FILE, write_report

FULL = Recipe(steps=144, batch=16, peak_lr=1.5e-3, warmup_steps=10)
QUICK = Recipe(steps=12, batch=8, peak_lr=3e-3, warmup_steps=2)
HEADINGS = itertools.count(1)
# Set before transformers and datasets are imported, here and in the runs: their steps are too short for progress bars.
NO_PROGRESS_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True)
class Job:
    """The training command, which runs in several folders."""

    model: Path
    data: Path
    held_out: Path
    recipe: Recipe

    @property
    def save_every(self) -> int:
        return max(3, self.recipe.steps // 6)

    def start(self, out: Path, devices: list[str], *more: str) -> subprocess.Popen[bytes]:
        recipe = self.recipe
        options = {
            "--model": self.model,
            "--data": self.data,
            "--eval-data": self.held_out,
            "--out": out,
            "--devices": ",".join(devices),
            "--num-microbatch": 4,  # fixed, because it changes the rounding; the number of devices does not
            "--dtype": "float32",
            "--seq-len": 128,
            "--batch": recipe.batch,
            "--steps": recipe.steps,
            "--lr": recipe.peak_lr,
            "--warmup": recipe.warmup_steps,
            "--train-sampling-strategy": "sequential",  # so that the plain loop can read the file in the same order
            "--eval-every": self.save_every,
            "--save-every": self.save_every,
            "--run-name": "RoundPipe demo",
        }
        words = [str(word) for option in options.items() for word in option]
        return subprocess.Popen([sys.executable, "-m", "roundpipe", "train", *words, *more])

    def run(self, out: Path, devices: list[str], *more: str) -> None:
        code = self.start(out, devices, *more).wait()
        if code != 0:
            sys.exit(f"error: roundpipe train ended with exit code {code}; the reason is above.")


def main() -> int:
    arguments = parse_arguments()
    os.environ.update(NO_PROGRESS_BARS)
    output: Path = arguments.output
    devices, other_devices = choose_devices()
    start_s = time.monotonic()
    for folder in ("inputs", "killed", "undisturbed", "stale"):
        shutil.rmtree(output / folder, ignore_errors=True)  # of an earlier demo
    for file in (PAGE_FILE, PICTURE_FILE):
        (output / file).unlink(missing_ok=True)

    heading("Make a tiny Llama with random weights and a file of chats")
    job = make_job(output / "inputs", QUICK if arguments.quick else FULL)
    heading(f"roundpipe train on {name_of(devices)}; SIGKILL half-way")
    out = output / "killed"
    lost_losses = kill_half_way(job, out, devices)
    heading(f"The same command with --resume, on {name_of(other_devices)}")
    job.run(out, other_devices, "--resume")
    heading(f"The same command in another folder, undisturbed, on {name_of(devices)}")
    job.run(output / "undisturbed", devices)
    findings = [compare_with_undisturbed(out, output / "undisturbed", lost_losses)]
    if not arguments.quick:
        heading(f"The same command with --stale, on {name_of(devices)}")
        job.run(output / "stale", devices, "--stale")
    heading(f"The same training as a loop in plain PyTorch, on {devices[0]}")
    findings.append(compare_with_plain(out, job.model, job.data, job.recipe, devices[0]))
    if not arguments.quick:
        findings.append(compare_with_stale(output / "stale", out, job.model, job.data, job.recipe, devices[0]))
    heading("The fine-tuned model, loaded with transformers alone, answers questions that it was not trained on")
    findings.append(answers(out, num_question=4 if arguments.quick else None))
    return conclude(findings, out, output, time.monotonic() - start_s)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.steps} steps, not {FULL.steps}; no stale run")
    return parser.parse_args()


def choose_devices() -> tuple[list[str], list[str]]:
    """The devices of the run and, another number of them, those of the resumed run: GPUs if there are any."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        return gpus, gpus[:-1]
    if gpus:
        return gpus, gpus * 2
    os.environ["OMP_NUM_THREADS"] = "1"  # virtual devices share the cores, so threads inside operators would compete
    torch.set_num_threads(1)
    return ["cpu"] * 2, ["cpu"] * 3


def name_of(devices: list[str]) -> str:
    kind = " virtual" if devices[0] == "cpu" else ""
    return f"{len(devices)}{kind} device{'s' if len(devices) > 1 else ''} ({','.join(devices)})"


def heading(text: str) -> None:
    print(f"\n== {next(HEADINGS)}. {text}", flush=True)


def make_job(folder: Path, recipe: Recipe) -> Job:
    folder.mkdir(parents=True)
    job = Job(folder / "model", folder / "chats.jsonl", folder / "held-out.jsonl", recipe)
    training, held_out = training_and_held_out_pairs()
    num_parameter = save_model(job.model, training)
    write_chats(job.data, training, recipe.steps * recipe.batch)
    write_chats(job.held_out, held_out, len(held_out))
    print(f"{job.model}: {num_parameter:,} parameters\n{job.data}: {recipe.steps * recipe.batch:,} chats, such as")
    for message in read_chats(job.data)[0]:
        print(f"  {message['role']}: {message['content']}")
    return job


def kill_half_way(job: Job, out: Path, devices: list[str]) -> dict[int, float]:
    """Kill the run when it is half-way and a few steps after a checkpoint. Returns the losses of the steps lost."""
    process = job.start(out, devices)
    try:
        while True:
            checkpoint = latest(out) if out.is_dir() else None
            saved = 0 if checkpoint is None else int(checkpoint.name.removeprefix("checkpoint-"))
            lost = {step: loss for step, loss in losses_of(out).items() if step > saved}
            if 2 * saved >= job.recipe.steps and len(lost) > job.save_every // 3:
                break
            if process.poll() is not None:
                sys.exit(f"error: roundpipe train ended with exit code {process.returncode} before it could be killed.")
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    if sys.stdout.isatty():
        print("\033[?25h")  # the live view hides the cursor while it runs
    print(f"killed at step {max(lost)}; the newest complete checkpoint is {checkpoint}: {len(lost)} steps are lost")
    return lost


def conclude(findings: list[Finding], out: Path, output: Path, seconds: float) -> int:
    """Write the report and print the verdicts. Returns the exit code."""
    write_report(out, sections=[finding.section for finding in findings])
    for file in (PAGE_FILE, PICTURE_FILE):
        shutil.copy(out / file, output / file)
    heading(f"Verdicts, after {seconds:.0f} s")
    for finding in findings:
        print(f"[{'ok' if finding.holds else 'BROKEN'}] {finding.section.verdict}")
    print(f"\nreport:  {output / PAGE_FILE}\npicture: {output / PICTURE_FILE}")
    return 0 if all(finding.holds for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
