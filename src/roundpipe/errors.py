"""Every exception a user can meet, in one tree.

    RoundPipeError
    ├── ConfigError (ValueError)        an option, spec or argument that cannot be carried out
    │   ├── PlanError                   an execute plan that does not cover the model as it must
    │   ├── SplitError                  inputs or labels that cannot be cut into microbatches
    │   └── MergeError                  microbatch outputs that cannot be put together
    ├── ModelSplitError (ValueError)    a model that cannot be split into layers as it is called
    ├── ArgumentTypeError (TypeError)   an argument of the wrong type
    ├── DeviceError (RuntimeError)      a device that does not exist or cannot be used
    ├── HostMemoryError (MemoryError)   the host has too little memory for what was asked
    ├── OwnershipError (ValueError)     a parameter that belongs to another RoundPipe
    ├── ModelChangedError (RuntimeError) the wrapped model is no longer the one that was wrapped
    ├── StaleGraphError (RuntimeError)  backward through a forward whose weights are gone, or twice
    ├── RecomputeError (RuntimeError)   save_for_recompute and get_recompute_data used wrongly
    ├── UsageError (RuntimeError)       a call in the wrong place or order
    └── ClosedError (RuntimeError)      a model or pool that was closed

Exceptions raised by the user's own code (layers, loss_fn, step_fn) keep their type; they get a note that says where
they happened (`add_note`). Knows nothing of the rest of the package.
"""

from __future__ import annotations

import contextlib


class RoundPipeError(Exception):
    """Root of everything this library raises on its own account."""


class ConfigError(RoundPipeError, ValueError):
    """An option, spec or argument value that cannot be carried out."""


class PlanError(ConfigError):
    """An execute plan that does not cover the model as it must."""


class SplitError(ConfigError):
    """Inputs or labels that cannot be cut into microbatches as asked."""


class MergeError(ConfigError):
    """Outputs of the microbatches that cannot be put together as asked."""


class ModelSplitError(RoundPipeError, ValueError):
    """A model whose forward cannot be split into layers, or not for calls like this one."""


class ArgumentTypeError(RoundPipeError, TypeError):
    """An argument of the wrong type."""


class DeviceError(RoundPipeError, RuntimeError):
    """A device that does not exist or cannot be used."""


class HostMemoryError(RoundPipeError, MemoryError):
    """The host has too little memory for what was asked."""


class OwnershipError(RoundPipeError, ValueError):
    """A parameter that already belongs to another RoundPipe."""


class ModelChangedError(RoundPipeError, RuntimeError):
    """The wrapped model's parameters are no longer the ones that were wrapped."""


class StaleGraphError(RoundPipeError, RuntimeError):
    """Backward through a forward call whose weights are gone, through it twice, or for a second derivative."""


class RecomputeError(RoundPipeError, RuntimeError):
    """save_for_recompute or get_recompute_data used where or as it cannot work."""


class UsageError(RoundPipeError, RuntimeError):
    """A call in the wrong place or in the wrong order."""


class ClosedError(RoundPipeError, RuntimeError):
    """A model or device pool that was closed."""


def add_note(error: BaseException, note: str) -> None:
    """Say where an exception happened. One that takes no notes, such as a frozen dataclass, passes without."""
    with contextlib.suppress(Exception):
        error.add_note(note)
