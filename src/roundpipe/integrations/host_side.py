"""Loaders and models that a trainer uses besides the model that it trains, kept in host memory.

Also takes over models that an earlier trainer has wrapped. Knows the classes of accelerate.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard  # type: ignore[import-untyped]
from torch import nn

from roundpipe.api.proxy import ModelProxy
from roundpipe.compiled import inside_of

logger = logging.getLogger("roundpipe")
_HOST = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class _OneProcess:
    """The state of a DataLoaderDispatcher that leaves its batches in host memory."""

    process_index: int = 0
    num_processes: int = 1
    device: torch.device = _HOST


def keep_in_host_memory(accelerator: Any, wrapped: Callable[[nn.Module], ModelProxy]) -> None:
    """Make an Accelerator leave models, optimizers and batches in host memory, and name the host as its device.

    Outputs of the model are in host memory. Trainers compute with them on `accelerator.device`.

    wrapped: wraps a model that only computes outputs, such as a reference, a teacher or a reward model.
    """
    accelerator.device_placement = False
    cls: Any = type(
        accelerator
    )  # `device` is a property of the class, and other Accelerators of the process keep theirs
    accelerator.__class__ = type(cls.__name__, (cls,), {"device": _HOST, "__module__": cls.__module__})
    prepare_data_loader, prepare_model = accelerator.prepare_data_loader, accelerator.prepare_model

    def data_loader(given: Any, device_placement: bool | None = None, **options: Any) -> Any:
        # accelerate chooses the class of a loader by this flag. The metrics of an evaluation depend on the class: a
        # dispatcher knows how many rows the last batch of a stream has.
        is_as_usual = device_placement is None and accelerator.num_processes == 1
        loader = prepare_data_loader(given, device_placement=True if is_as_usual else device_placement, **options)
        if isinstance(loader, DataLoaderDispatcher) and is_as_usual:
            loader.state = _OneProcess()
        elif isinstance(loader, DataLoaderShard):
            loader.device = None
        return loader

    def model(given: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if evaluation_mode and not isinstance(given, ModelProxy):
            given = wrapped(given)
        # accelerate compiles what it prepares if settings ask for it: whole models, and not the layers of a wrapper.
        return inside_of(prepare_model(given, device_placement=False, evaluation_mode=evaluation_mode))

    accelerator.prepare_data_loader, accelerator.prepare_model = data_loader, model


# Models that an earlier trainer has wrapped.

_of_trainers: weakref.WeakSet[ModelProxy] = weakref.WeakSet()


def note_made(wrapper: ModelProxy) -> None:
    """Note that a trainer has wrapped a model itself, so that a later trainer may take the model over."""
    _of_trainers.add(wrapper)


def take_over(given: Iterable[Any]) -> None:
    """Close the wrappers that earlier trainers have made for the models among the arguments of a trainer."""
    params = {id(param) for model in _models_in(given) for param in model.parameters()}
    for wrapper in list(_of_trainers):
        if not wrapper._engine.group.is_closed and any(id(param) in params for param in wrapper.parameters()):
            logger.warning("%s is closed: another trainer has taken its model over", wrapper.name)
            wrapper.close()


def _models_in(given: Iterable[Any]) -> Iterator[nn.Module]:
    for value in given:
        for model in value if isinstance(value, list | tuple) else (value,):
            if isinstance(model, nn.Module) and not isinstance(model, ModelProxy):
                yield model
