"""Claim: saving adds at most 1.1 times the largest shard to host memory and delays training only as long as the disk.

    python benchmarks/bench_checkpoint.py [--parameters 2e8] [--folder DIR] [--steps 2]

Full bfloat16 training of linear layers with float32 masters and Adam, exact steps. A checkpoint has 12 bytes per
parameter: weights, low halves of the masters, and two moments. Memory is the anonymous memory of the process (pinned
memory included, the system's file cache not), sampled while a checkpoint is written. The step that begins together with
a save is compared with the longer of a step alone and a plain write of the same bytes to the same disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import tempfile
import time
from pathlib import Path

import torch
from measuring import HostMemoryPeak, Table, begin, gigabytes, has_gpu, options_parser, plain_write_s, timed
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig, checkpoint
from roundpipe.optim import Adam

MOST_ADDED = 1.1  # of the largest shard
NUM_LAYERS = 48


class Training:
    """Linear layers of about `num_parameters` in all."""

    def __init__(self, num_parameters: float, num_rows: int) -> None:
        self.width = max(64, round(math.sqrt(num_parameters / NUM_LAYERS) / 64) * 64)
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(NUM_LAYERS)]
        network = nn.Sequential(*layers).bfloat16()
        self.num_parameters = sum(param.numel() for param in network.parameters())
        config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
        self.model = RoundPipe(network, optim_dtype=torch.float32, model_run_config=config)
        self.optimizer = Adam(self.model.optim_parameters(), lr=1e-5)
        self._x = torch.randn(num_rows, self.width).bfloat16()

    def step(self) -> None:
        self.model.forward_backward((self._x,), label=self._x, loss_fn=nn.functional.mse_loss)
        self.model.step(self._update, is_async=False)

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> checkpoint.PendingSave:
        return checkpoint.save(folder, self.model, self.optimizer)


@dataclasses.dataclass(frozen=True)
class Saved:
    """The files of a checkpoint."""

    total_bytes: int
    largest_bytes: int

    @classmethod
    def of(cls, folder: Path) -> Saved:
        sizes = [path.stat().st_size for path in folder.iterdir() if path.suffix == ".safetensors"]
        return cls(sum(sizes), max(sizes))


def measure(training: Training, parent: Path, options: argparse.Namespace) -> None:
    for _ in range(options.warm):
        training.step()
    memory, start = HostMemoryPeak(), time.perf_counter()
    training.save(parent / "alone").wait()
    save_s, added_bytes = time.perf_counter() - start, memory.close()
    saved = Saved.of(parent / "alone")
    print_memory(saved, added_bytes)
    shutil.rmtree(parent / "alone")

    table = Table("seconds", "of expected")
    table.add("a save alone", f"{save_s:.2f}", "")
    for _ in range(options.steps):
        disk_s = plain_write_s(parent / "plain", saved.total_bytes)
        _, step_s = timed(training.step)
        start = time.perf_counter()
        pending = training.save(parent / "beside")
        returned_s = time.perf_counter() - start
        training.step()
        during_s = time.perf_counter() - start
        pending.wait()
        both_s = time.perf_counter() - start
        shutil.rmtree(parent / "beside")
        table.add("a step alone", f"{step_s:.2f}", "")
        table.add(
            "a plain write and fsync of the same bytes", f"{disk_s:.2f}", f"{saved.total_bytes / disk_s / 1e9:.2f} GB/s"
        )
        expected_s = max(step_s, disk_s)
        table.add("save() returns after", f"{returned_s:.2f}", "")
        table.add("a step during a save", f"{during_s:.2f}", f"{during_s / expected_s:.2f}")
        table.add("a step and its save, both complete", f"{both_s:.2f}", f"{both_s / expected_s:.2f}")


def print_memory(saved: Saved, added_bytes: int) -> None:
    ratio = added_bytes / saved.largest_bytes
    print(f"checkpoint {gigabytes(saved.total_bytes)}, largest shard {gigabytes(saved.largest_bytes)}")
    verdict = "as claimed" if ratio <= MOST_ADDED else f"MORE than the {MOST_ADDED} claimed"
    print(f"memory added by saving: {added_bytes / 1e6:.0f} MB, {ratio:.3f} of the largest shard: {verdict}")


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--parameters", type=float, default=1e9 if has_gpu() else 1.5e8, help="number of parameters")
    parser.add_argument("--rows", type=int, default=8192 if has_gpu() else 64, help="rows of a batch")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; default: the system's")
    options = parser.parse_args()
    begin(
        f"full training of {options.parameters:.2g} parameters, {options.rows} rows",
        "how much of a save lies under the computing of a large batch",
    )
    torch.manual_seed(0)
    training = Training(options.parameters, options.rows)
    parent = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(training, parent, options)
    finally:
        shutil.rmtree(parent, ignore_errors=True)
        training.model.close()


if __name__ == "__main__":
    main()
