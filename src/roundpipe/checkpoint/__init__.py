"""Saves and loads checkpoints of a training run."""
