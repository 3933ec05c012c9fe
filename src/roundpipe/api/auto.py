"""AutoRoundPipe: a model that runs on the host and some of whose submodules are RoundPipes.

Made by api.wrap. All RoundPipes inside it and the parameters outside them are stepped as one: an engine of its own
keeps the outside parameters, which never travel, and the engines of the RoundPipes join it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe.api.device_loss import DeviceLoss
from roundpipe.api.engine import ModelEngine
from roundpipe.api.face import ModelFace
from roundpipe.api.model import RoundPipe
from roundpipe.api.wrap_rules import bare_modules
from roundpipe.config import RoundPipeRunConfig
from roundpipe.devices import DeviceSpec, host_pinner
from roundpipe.errors import UsageError
from roundpipe.runtime.pool import shared_pool
from roundpipe.store import PinMode


class AutoRoundPipe(ModelFace):
    """A model wrapped in parts: its own forward runs on the CPU and calls the RoundPipes that stand for submodules.

    Made by `wrap_model_to_roundpipe`. Trains with forward(), backward() and step(); one step is one for all its parts.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[nn.Module, RoundPipe],
        *,
        name: str,
        specs: Sequence[DeviceSpec],
        optim_dtype: torch.dtype | None,
        model_run_config: RoundPipeRunConfig,
        loss: DeviceLoss | None,
    ) -> None:
        """`parts`: what stands for which submodule from now on."""
        engine = ModelEngine(
            [outside_of(model, parts)],
            {id(param): key for key, param in model.named_parameters()},
            name=name,
            pool=shared_pool(specs),
            optim_dtype=optim_dtype,
            pin_mode=PinMode.OFF,
            pinner=host_pinner(specs),
        )
        for part in parts.values():
            part._engine.join(engine)
        _exchange(model, parts)
        if loss is not None:
            loss.put_into(model)
        for store in engine.stepper.stores:
            store.is_read_on_host = True  # those of parts, too: code between them may read any parameter
        super().__init__(
            model, engine, _parts=dict(parts), _loss=loss, optim_dtype=optim_dtype, model_run_config=model_run_config
        )

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward on the calling thread; RoundPipes inside it run on the devices."""
        if "roundpipe_run_config" in kwargs:
            raise UsageError(
                "an AutoRoundPipe takes no roundpipe_run_config in a call, since its parts are called one by one; give "
                "model_run_config or override_config to wrap_model_to_roundpipe."
            )
        return self._engine.host_forward(lambda: self.model(*args, **kwargs))

    def forward_backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not possible here: see the error it raises."""
        raise UsageError(
            f"{self.name} is an AutoRoundPipe: its forward is Python code on the CPU between several RoundPipes, so "
            "microbatches cannot be pipelined through forward and backward together. Call the model, then backward() "
            "on the loss; or give wrap_model_to_roundpipe an nn.Sequential or a model with a preset."
        )

    def step(self, step_fn: Callable[..., object], is_async: bool = True, *args: Any, **kwargs: Any) -> None:
        """Run `step_fn(*args, **kwargs)` once, on the optimizer thread, over the gradients of all parts."""
        with self._ending_graphs():
            super().step(step_fn, is_async, *args, **kwargs)

    def synchronize(self) -> None:
        """Wait for everything. Then parameters are the optimizer's, and `.grad` holds what is not yet consumed."""
        with self._ending_graphs():
            super().synchronize()

    def close(self) -> None:
        """Finish pending work, let go of threads and pinned memory, and make the model the plain one it was."""
        super().close()
        _exchange(self.model, {part: module for module, part in self._parts.items()})
        if self._loss is not None:
            self._loss.take_out_of(self.model)

    def extra_repr(self) -> str:
        return f"name={self.name!r}, parts={len(self._parts)}, devices={self._engine.num_devices}"

    @contextlib.contextmanager
    def _ending_graphs(self) -> Iterator[None]:
        """When calls read other weights afterwards, let autograd know that outside parameters are not what they were.

        So a backward that comes too late is refused, as it is after a step of an optimizer in place.
        """
        version = self._engine.stepper.visible_version
        try:
            yield
        finally:
            if self._engine.stepper.visible_version != version:
                for record in self._engine.store.parameters:
                    torch.autograd.graph.increment_version(record.param)
                    record.seen_version = record.param._version


def outside_of(model: nn.Module, parts: Container[nn.Module]) -> nn.Module:
    """A module that holds, by reference, what lies in no part: every module left bare, without its submodules."""
    outside = nn.Module()
    for path, module in bare_modules(model, parts):
        shallow = nn.Module()
        shallow.__dict__["_parameters"] = module._parameters
        shallow.__dict__["_buffers"] = dict(module._buffers)  # code on the host may add some as it likes
        outside._modules[path] = shallow
    return outside


def _exchange(model: nn.Module, stands_for: Mapping[nn.Module, nn.Module]) -> None:
    """Put each value of `stands_for` wherever its key is a child of a bare module."""
    for _, module in list(bare_modules(model, stands_for)):
        for name, child in module._modules.items():
            if child is not None and child in stands_for:
                module._modules[name] = stands_for[child]
