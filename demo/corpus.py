"""The demo's training text (corpus.txt, written for this project), split into seeded batches of bytes.

Knows bytes and batches, not models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CORPUS_PATH = Path(__file__).with_name("corpus.txt")


@dataclass(frozen=True)
class Batch:
    """Byte sequences, and the same sequences shifted by one byte as labels."""

    byte_ids: Tensor
    next_byte_ids: Tensor


def load_corpus() -> Tensor:
    return torch.frombuffer(bytearray(CORPUS_PATH.read_bytes()), dtype=torch.uint8).long()


def draw_batches(corpus: Tensor, num_batch: int, num_sequence: int, length: int, seed: int) -> list[Batch]:
    """`num_batch` batches of `num_sequence` random text windows. The same seed gives the same batches."""
    generator = torch.Generator().manual_seed(seed)
    windows = corpus.unfold(0, length + 1, 1)
    batches = []
    for _ in range(num_batch):
        starts = torch.randint(len(windows), (num_sequence,), generator=generator)
        window = windows[starts]
        batches.append(Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous()))
    return batches
