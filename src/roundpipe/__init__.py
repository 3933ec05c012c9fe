"""Train models far larger than GPU memory, on one server or several, with a plain PyTorch training loop."""

from roundpipe import optim
from roundpipe.api.auto import AutoRoundPipe
from roundpipe.api.roundpipe import RoundPipe
from roundpipe.api.wrap import wrap_model_to_roundpipe
from roundpipe.config import RoundPipeRunConfig
from roundpipe.context import OptimizerCtx, doing_recompute, get_recompute_data, save_for_recompute
from roundpipe.errors import (
    ArgumentTypeError,
    CheckpointError,
    ClosedError,
    ConfigError,
    DeviceError,
    HostMemoryError,
    MachineError,
    MergeError,
    ModelChangedError,
    ModelSplitError,
    NonFiniteError,
    OwnershipError,
    PlanError,
    RecomputeError,
    RoundPipeError,
    SplitError,
    StaleGraphError,
    StallError,
    UsageError,
)
from roundpipe.loading import load
from roundpipe.microbatch import RoundPipePackedData
from roundpipe.optim.grad_scaler import GradScaler
from roundpipe.optim.gradients import clip_grad_norm_
from roundpipe.plan import ModelExecutePlan
from roundpipe.version import __version__ as __version__

__all__ = [
    "ArgumentTypeError",
    "AutoRoundPipe",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "GradScaler",
    "HostMemoryError",
    "MachineError",
    "MergeError",
    "ModelChangedError",
    "ModelExecutePlan",
    "ModelSplitError",
    "NonFiniteError",
    "OptimizerCtx",
    "OwnershipError",
    "PlanError",
    "RecomputeError",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "SplitError",
    "StaleGraphError",
    "StallError",
    "UsageError",
    "clip_grad_norm_",
    "doing_recompute",
    "get_recompute_data",
    "load",
    "optim",
    "save_for_recompute",
    "wrap_model_to_roundpipe",
]
