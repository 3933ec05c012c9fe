"""Things that are tried out: a trial that raises has the answer "no".

Used wherever a property of a model is found by running it. Interrupts and exhausted memory are no answers: they reach
the caller.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

from roundpipe.errors import ModelSplitError

logger = logging.getLogger("roundpipe")
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


def succeeds(what: str, trial: Callable[[], bool], *, passing: tuple[type[Exception], ...] = ()) -> bool:
    """The answer of a trial; False, and a line in the debug log, where it raises. `passing`: what the caller gets."""
    try:
        return trial()
    except OUT_OF_MEMORY:
        raise
    except Exception as error:
        if isinstance(error, passing):
            raise
        logger.debug("%s: no, trying it out raised %r", what, error)
        return False


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Around an examination that a model need not stand: what it raises becomes a ModelSplitError."""
    try:
        yield
    except (ModelSplitError, *OUT_OF_MEMORY):
        raise
    except Exception as error:
        raise ModelSplitError(f"{what} raised {error!r}") from error
