"""Trains a small byte-level language model three ways and compares them: `make demo`.

Uses all GPUs, or four virtual devices without a GPU. Writes a report and a picture to demo-output/.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from demo.corpus import draw_batches, load_corpus
from demo.model import CONTEXT, build_model
from demo.picture import draw
from demo.report import async_verdict, compare, exact_verdict, write_report
from demo.runs import StepMode, Task, generate, plain_stale_losses, train_plain, train_roundpipe
from roundpipe import RoundPipe

SEED = 2
NUM_SEQUENCE = 20
PROMPT = "Day 12. "
QUICK_STEPS = 4
STALE_STEPS = 30  # number of async losses to compare with a plain loop on weights one update old


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument(
        "--devices", help='device pool, e.g. "cpu*4" or "cuda:0,cuda:1" (default: all GPUs, else "cpu*4")'
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_STEPS} steps and a short sample")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be 1 or more, got {arguments.steps}")
    return arguments


def choose_devices(wanted: str | None) -> list[str]:
    """`wanted`, else ROUNDPIPE_DEVICES, else every GPU, else four virtual devices."""
    wanted = wanted or os.environ.get("ROUNDPIPE_DEVICES")
    if wanted is None:
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"] * 4
    devices = []
    for entry in wanted.split(","):
        name, _, count = entry.strip().partition("*")
        devices += [name] * int(count or 1)
    return devices


def main() -> int:
    arguments = parse_arguments()
    devices = choose_devices(arguments.devices)
    on_cpu = all(name == "cpu" for name in devices)
    if on_cpu:
        torch.set_num_threads(1)  # virtual devices share the cores, so threads inside operators would compete
    num_step = QUICK_STEPS if arguments.quick else arguments.steps
    batches = draw_batches(load_corpus(), num_step, NUM_SEQUENCE, CONTEXT, SEED)
    task = Task(batches, num_microbatch=len(devices) + 1)

    plain_model = build_model(SEED)
    plain_device = torch.device("cpu" if on_cpu else devices[0])
    plain = train_plain(plain_model, task, plain_device)
    with RoundPipe(build_model(SEED), name="exact", devices=devices) as model:
        exact = train_roundpipe(model, task, StepMode.EXACT)
        timeline = model.timeline()
        comparison = compare(plain, plain_model, exact, model)
        sample = generate(model, PROMPT, num_byte=20 if arguments.quick else 400, context=CONTEXT, seed=SEED)
    with RoundPipe(build_model(SEED), name="async", devices=devices) as model:
        stale = train_roundpipe(model, task, StepMode.ASYNC)

    stale_losses = plain_stale_losses(build_model(SEED), task, STALE_STEPS, plain_device)
    stale_difference = max(abs(a - b) for a, b in zip(stale_losses, stale.losses, strict=False))

    runs = [plain, exact, stale]
    verdicts = [exact_verdict(comparison, on_cpu), *async_verdict(exact, stale, stale_difference, len(stale_losses))]
    num_parameter = sum(parameter.numel() for parameter in plain_model.parameters())
    report = write_report(runs, verdicts, devices, num_parameter, task.num_microbatch, sample)
    arguments.output.mkdir(parents=True, exist_ok=True)
    report_path = arguments.output / "report.txt"
    picture_path = arguments.output / "roundpipe-demo.png"
    report_path.write_text(report, encoding="utf-8")
    print("\n" + report)
    if find_spec("matplotlib") is None:
        print("No picture: matplotlib is not installed (pip install 'roundpipe[demo]').")
    else:
        draw(picture_path, runs, timeline, title=f"RoundPipe demo: {len(devices)} devices, {num_step} steps")
        print(f"Picture: {picture_path}")
    print(f"Report:  {report_path}")
    return 0 if not on_cpu or (comparison.same_bits and stale_difference == 0) else 1


if __name__ == "__main__":
    sys.exit(main())
