"""Checkpoints of training runs: `save`, `load`, and `latest` to find the newest one.

A checkpoint is a folder. Its weights load with `from_pretrained`; the rest resumes the run bit for bit, in a new
process and, with the same num_microbatch, on any number of devices.
"""

from roundpipe.checkpoint.folders import latest
from roundpipe.checkpoint.load import load, load_rng, verify
from roundpipe.checkpoint.save import PendingSave, save

__all__ = ["PendingSave", "latest", "load", "load_rng", "save", "verify"]
