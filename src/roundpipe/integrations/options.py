"""RoundPipeOptions: what a trainer is told beside the arguments that all trainers have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from roundpipe.compiled import CompileOptions
from roundpipe.errors import ConfigError
from roundpipe.host_facts import lies_in_memory
from roundpipe.integrations.optimizers import Folder, check_moments, check_state_folder
from roundpipe.packed import checked_form
from roundpipe.store.values import MASTER_BITS


@dataclasses.dataclass(frozen=True)
class RoundPipeOptions:
    """How a trainer wraps and steps its model.

    devices, optim_dtype, pin_model: as for `wrap_model_to_roundpipe`.
    num_microbatch: into how many microbatches a batch is split. Default: the number of devices + 1; in a resumed run,
        the number of the run that wrote the checkpoint, because losses depend on it in the last bits.
    is_async: whether steps run beside the next batch, which then computes with weights that are one step old.
    compile: whether layers run compiled, as for `wrap_model_to_roundpipe`. Default: as the arguments torch_compile,
        torch_compile_backend and torch_compile_mode of the trainer say.
    frozen_weights: the form in which weights that do not train are packed, as for `wrap_model_to_roundpipe`. Models
        that only compute outputs, such as a reference model, are packed, too. Default: what a BitsAndBytesConfig in the
        arguments of a trainer of TRL asks for.
    moments: "float32", "bfloat16" or "8bit", as for `roundpipe.optim.AdamW`; by default as the name in `optim` says.
    master_bits: 24 stores masters of bfloat16 weights in 24 bits, as for `wrap_model_to_roundpipe`.
    state_folder: a folder on a fast disk for the optimizer's state, as for `roundpipe.optim.AdamW`.
    on_devices: whether devices update a share of each layer while their links are idle, as for `roundpipe.optim.AdamW`.
    nonfinite: "stop" raises NonFiniteError if a loss or gradient is infinite or NaN, before it reaches the weights;
        "skip" leaves the step out and logs a warning; "off" does not check.
    view: whether to show the run in the terminal, in place of Trainer's progress bar. `metrics.jsonl` and the report in
        the output folder are written in any case.
    samples: prompts that the model answers at each evaluation, or at each checkpoint if nothing is evaluated, and at
        the end: texts that it continues, or lists of messages. The answers go to `samples.jsonl` and the report.
    sample_tokens: tokens of the longest such answer.
    """

    devices: Sequence[str | torch.device] | str | None = None
    num_microbatch: int | None = None
    is_async: bool = False
    optim_dtype: torch.dtype | None = torch.float32
    pin_model: Literal["alloc", "register", "off"] = "alloc"
    nonfinite: Literal["stop", "skip", "off"] = "stop"
    view: bool = True
    compile: bool | Mapping[str, Any] | None = None
    frozen_weights: Literal["nf4", "int8", "fp8"] | None = None
    moments: Literal["float32", "bfloat16", "8bit"] | None = None
    master_bits: Literal[32, 24] = 32
    state_folder: Folder | None = None
    on_devices: bool = False
    samples: Sequence[str | Sequence[Mapping[str, Any]]] = ()
    sample_tokens: int = 128

    def __post_init__(self) -> None:
        check_moments(self.moments)
        check_state_folder(self.state_folder)
        CompileOptions.of(self.compile)
        checked_form(self.frozen_weights)
        if self.master_bits not in MASTER_BITS:
            raise ConfigError(f"master_bits must be 32 or 24, got {self.master_bits!r}.")
        if self.on_devices and self.state_folder is not None:
            raise ConfigError("on_devices and state_folder exclude each other: devices copy states from host memory.")
        if isinstance(self.samples, str):
            raise ConfigError(f"samples must be a list of prompts, got a string; give [{self.samples[:40]!r}].")
        if self.sample_tokens < 1:
            raise ConfigError(f"sample_tokens must be at least 1, got {self.sample_tokens}.")
        if self.nonfinite not in ("stop", "skip", "off"):
            raise ConfigError(f'nonfinite must be "stop", "skip" or "off", got {self.nonfinite!r}.')

    @property
    def has_state_on_disk(self) -> bool:
        """Whether the optimizer's state takes no host memory."""
        return self.state_folder is not None and not lies_in_memory(Path(self.state_folder))

    def completed(self, args: Any) -> RoundPipeOptions:
        """The options with what the arguments of the trainer say where these options say nothing."""
        if not args.torch_compile or self.compile not in (None, True):
            return self
        given = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        return dataclasses.replace(self, compile=given)
