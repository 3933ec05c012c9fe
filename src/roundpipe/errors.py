"""All exceptions of this library, in one tree.

    RoundPipeError
    ├── ConfigError (ValueError)        an option, spec or argument has an invalid value
    │   ├── PlanError                   an execute plan does not cover the model's layers correctly
    │   ├── SplitError                  inputs or labels cannot be split into microbatches
    │   └── MergeError                  outputs of the microbatches cannot be merged
    ├── ModelSplitError (ValueError)    a model cannot be split into layers for this form of call
    ├── ArgumentTypeError (TypeError)   an argument has the wrong type
    ├── DeviceError (RuntimeError)      a device does not exist or cannot be used
    ├── HostMemoryError (MemoryError)   the host has too little memory
    ├── OwnershipError (ValueError)     a parameter belongs to a different RoundPipe already
    ├── ModelChangedError (RuntimeError) the wrapped model's parameters or layers were replaced
    ├── StaleGraphError (RuntimeError)  backward cannot run: its weights have changed, or it ran already
    ├── RecomputeError (RuntimeError)   save_for_recompute or get_recompute_data was misused
    ├── UsageError (RuntimeError)       a call was made in the wrong place or order
    ├── CheckpointError (RuntimeError)  a checkpoint cannot be written, or is damaged or does not fit
    ├── NonFiniteError (ArithmeticError, RuntimeError) a loss or gradient is infinite or NaN
    ├── StallError (TimeoutError)       a wait took longer than the limit that the user has set
    ├── MachineError (RuntimeError)     another machine of the process group failed, ended or made another call
    └── ClosedError (RuntimeError)      a model or device pool is closed already

Exceptions from the user's code (layers, loss_fn, step_fn) keep their type; a note says where they happened. Knows
nothing of the rest of the package.
"""

from __future__ import annotations

import contextlib


class RoundPipeError(Exception):
    """Base class of all exceptions that this library defines."""


class ConfigError(RoundPipeError, ValueError):
    """An option, spec or argument has an invalid value."""


class PlanError(ConfigError):
    """An execute plan does not cover the model's layers correctly."""


class SplitError(ConfigError):
    """Inputs or labels cannot be split into microbatches as requested."""


class MergeError(ConfigError):
    """Outputs of the microbatches cannot be merged as requested."""


class ModelSplitError(RoundPipeError, ValueError):
    """A model's forward cannot be split into layers, at all or for this form of call."""


class ArgumentTypeError(RoundPipeError, TypeError):
    """An argument has the wrong type."""


class DeviceError(RoundPipeError, RuntimeError):
    """A device does not exist or cannot be used."""


class HostMemoryError(RoundPipeError, MemoryError):
    """The host has too little memory."""


class OwnershipError(RoundPipeError, ValueError):
    """A parameter belongs to a different RoundPipe already."""


class ModelChangedError(RoundPipeError, RuntimeError):
    """The wrapped model's parameters or layers were replaced after wrapping."""


class StaleGraphError(RoundPipeError, RuntimeError):
    """Backward cannot run through a forward call.

    The weights have changed since the forward, its backward ran already, or a second derivative was requested.
    """


class RecomputeError(RoundPipeError, RuntimeError):
    """save_for_recompute or get_recompute_data was called in the wrong place or with wrong data."""


class UsageError(RoundPipeError, RuntimeError):
    """A call was made in the wrong place or in the wrong order."""


class CheckpointError(RoundPipeError, RuntimeError):
    """A checkpoint cannot be written; or it is damaged, incomplete or does not fit the model."""


class NonFiniteError(RoundPipeError, ArithmeticError, RuntimeError):
    """A loss or gradient is infinite or NaN. A RuntimeError as well, because torch raises that for such a norm."""


class StallError(RoundPipeError, TimeoutError):
    """A wait took longer than the limit that the user has set."""


class MachineError(RoundPipeError, RuntimeError):
    """Another machine of the process group has failed, has ended, or does something else than this machine.

    rank: the rank of that machine in the process group; None if it is this machine that cannot go on.
    """

    def __init__(self, rank: int | None, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, str(self))


class ClosedError(RoundPipeError, RuntimeError):
    """A model or device pool is closed already."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, such as where it happened. Does nothing if the exception cannot take notes."""
    with contextlib.suppress(Exception):
        error.add_note(note)  # raises for exceptions that are frozen dataclasses
