"""Follows labels from tensors to everything that is computed from them: what depends on what, whatever the values.

Used by calibration. Watches every operation, so integers, choices and results that happen to be zero are followed,
too, and sees where code looks at values itself: a number taken out of a tensor can steer anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.models.values import Key, tensors_of
from roundpipe.models.without_dropout import drops

Labels = frozenset[Key]
_NONE: Labels = frozenset()
# They hand memory to Python that is then read unseen.
_READERS = frozenset(("tolist", "numpy", "__array__", "__dlpack__"))
_READING_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class Taint:
    """`drawing` names what random numbers depend on: called for each draw."""

    def __init__(self, on_read: Callable[[Labels], None], drawing: Callable[[], Labels] = lambda: _NONE) -> None:
        self._on_read, self._drawing = on_read, drawing
        self._labels: dict[int, Labels] = {}  # by storage: views of one memory depend on each other
        self._alive: list[torch.Tensor] = []  # so that addresses of storages stay unique

    def mark(self, tensor: torch.Tensor, labels: Labels) -> None:
        if labels:
            self._labels[_storage(tensor)] = self.labels_of(tensor) | labels
            self._alive.append(tensor.detach())

    def labels_of(self, value: Any) -> Labels:
        """Of all tensors in a value."""
        return _NONE.union(*(self._labels.get(_storage(tensor), _NONE) for tensor in tensors_of(value)))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in _READERS:
            self._read(args)
        value = func(*args, **kwargs)
        # Dropout draws nothing in calibration, but will.
        return self._marked(value, self._drawing()) if drops(func, args, kwargs) else value

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        labels = _NONE if _looks_at_shapes_only(func) else self.labels_of((args, kwargs))
        if not _READING_TAGS.isdisjoint(func.tags):
            self._read(_choosing(func, args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            labels |= self._drawing()
        value = self._marked(func(*args, **kwargs), labels)
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._marked(given, labels)
        return value

    def _marked(self, value: Any, labels: Labels) -> Any:
        for tensor in tensors_of(value):
            self.mark(tensor, labels)
        return value

    def _read(self, value: Any) -> None:
        labels = self.labels_of(value)
        if labels:
            self._on_read(labels)


class _Functions(TorchFunctionMode):
    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._taint.function(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._taint.operation(func, args, kwargs or {})


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _looks_at_shapes_only(func: Any) -> bool:
    name: str = func._schema.name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _choosing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments whose values decide the shape of a result, or become a number."""
    match func._schema.name:
        case "aten::index":  # integers choose what, masks also how many
            return [index for index in tensors_of(args[1]) if index.dtype in (torch.bool, torch.uint8)]
        case "aten::masked_select":
            return args[1:]
    return args, kwargs
