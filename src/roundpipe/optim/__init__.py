"""Optimizers that are fast on host memory. They also replace torch's optimizers on ordinary tensors."""

from roundpipe.optim.adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]
