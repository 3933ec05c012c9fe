"""Optimizers that are fast on host memory. They also replace torch's optimizers on ordinary tensors."""

from roundpipe.optim.adam import SGD, Adam, AdamW
from roundpipe.optim.lion import Lion

__all__ = ["SGD", "Adam", "AdamW", "Lion"]
