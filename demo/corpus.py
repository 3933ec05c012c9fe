"""The text the demo learns from, cut into seeded batches of bytes.

Called by demo.train_demo. Knows bytes and batches, not models. The text is our own; see corpus.txt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CORPUS_PATH = Path(__file__).with_name("corpus.txt")


@dataclass(frozen=True)
class Batch:
    """Byte sequences, and the same sequences one byte further on."""

    byte_ids: Tensor
    next_byte_ids: Tensor


def load_corpus() -> Tensor:
    return torch.frombuffer(bytearray(CORPUS_PATH.read_bytes()), dtype=torch.uint8).long()


def draw_batches(corpus: Tensor, num_batch: int, num_sequence: int, length: int, seed: int) -> list[Batch]:
    """`num_batch` batches of `num_sequence` random places in the text; every run gets these very batches."""
    generator = torch.Generator().manual_seed(seed)
    windows = corpus.unfold(0, length + 1, 1)
    batches = []
    for _ in range(num_batch):
        starts = torch.randint(len(windows), (num_sequence,), generator=generator)
        window = windows[starts]
        batches.append(Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous()))
    return batches
