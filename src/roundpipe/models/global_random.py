"""Random numbers that a model draws from the process: Python's and numpy's generators, which all threads share.

Used by calibration, to find out, and by the layers of models that do so. Such a layer runs alone, on numbers of its own
that are derived from its torch stream: its recomputation draws the same, whatever other threads do.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from roundpipe.waiting import process_rlock

_lock = process_rlock()


def state_of_generators() -> Any:
    """Equal to an earlier one if nobody has drawn since."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


def fresh_generators() -> Any:
    """Put the generators into a state that nobody arrives at by himself. Only inside `own_generators`."""
    seed = random.getrandbits(31)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    return state_of_generators()


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Inside it this thread alone draws from the process's generators; they are as before when it is left."""
    numpy = sys.modules.get("numpy")
    with _lock:
        python_state = random.getstate()
        numpy_state = numpy.random.get_state() if numpy is not None else None
        seed = int(torch.randint(2**31, ()))
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
