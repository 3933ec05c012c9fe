"""Optimizers that are fast on host memory; they also serve as drop-in optimizers on ordinary tensors."""

from roundpipe.optim.adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]
