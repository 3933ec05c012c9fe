"""Prints a table of estimated steps for 1 to 1,024 machines and several networks.

    python benchmarks/estimate_machines.py [--devices 8xRTX4090] [--batch 64] [--seq-len 4096] [--exact]

Every cell has the seconds of a step and, in brackets, the seconds of the exchange that are not hidden. Nothing runs:
these are the numbers of `roundpipe estimate`. bench_machines.py compares the same functions with measured steps.
"""

from __future__ import annotations

import argparse

import torch

from roundpipe.cli.estimate import load_on_paper
from roundpipe.estimate.estimate import Machine, Work, estimate
from roundpipe.estimate.figures import parse_gpus
from roundpipe.plan.forecast import Network

MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b")
MACHINES = (1, 2, 4, 16, 64, 256, 1024)
GBITS = (10, 25, 100, 400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="8xRTX4090", help="GPUs of each machine")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step and machine")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--exact", action="store_true", help="exact instead of stale steps")
    parser.add_argument("--micro", type=int, default=16, help="microbatches of each machine")
    options = parser.parse_args()
    gpu, num_devices = parse_gpus(options.devices)
    work = Work(options.batch, options.seq_len, is_exact=options.exact, num_microbatch=options.micro)
    print(f"| model, machines | RAM of each | {' | '.join(f'{gbits} Gb/s' for gbits in GBITS)} |")
    print(f"|---|---|{'---|' * len(GBITS)}")
    for name in MODELS:
        paper = load_on_paper(name, torch.bfloat16, None)
        for number in MACHINES:
            cells = []
            for gbits in GBITS:
                network = Network(number, gbits * 1e9 / 8) if number > 1 else None
                found = estimate(paper, work, Machine(gpu, num_devices, None, 4e9, network))
                cells.append(f"{found.step_s:.1f} s ({found.exposed_s:.1f})")
            ram = f"{sum(found.host.values()) / 1e9:,.0f} GB"
            print(f"| {name}, {number:,} | {ram} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
