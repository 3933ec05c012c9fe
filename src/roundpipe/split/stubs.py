"""Stubs: modules that stand in a copy of a model's tree for modules that run elsewhere, or that are watched.

A stub is an instance of a subclass of what it stands for, so that the model's own code cannot tell. Its calls go to
the *director* of the running replay, a context variable: nothing is patched, and threads never meet.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe.errors import ModelSplitError
from roundpipe.split.values import Outline, placeholder


class Director(Protocol):
    """Decides what a call of a stub does and returns."""

    device: torch.device

    def call(self, stub: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def loss(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


PATH = "stub_path"  # the attribute of a stub, or of a copied module above stubs, that holds its path in the model

_director: ContextVar[Director] = ContextVar("roundpipe_director")


@contextlib.contextmanager
def directed_by(director: Director) -> Iterator[None]:
    token = _director.set(director)
    try:
        yield
    finally:
        _director.reset(token)


def current_director() -> Director:
    return _director.get()


class Stub:
    """Mixed into a subclass of the class it stands for.

    `_modules["real"]` is the module itself where its weights are at hand; else parameters it is asked for are
    placeholders, and everything else is the original's.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        director = _director.get(None)
        if director is None:
            raise ModelSplitError(
                f"{self.__dict__[PATH]} is called when the model's forward has returned, as by a checkpoint "
                "around code of the model's own"
            )
        return director.call(self, self.__dict__[PATH], args, kwargs)  # type: ignore[arg-type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        real = own["_modules"].get("real")
        return getattr(real, name) if real is not None else _seen_from_afar(own["stub_original"], name)


def _seen_from_afar(original: nn.Module, name: str) -> Any:
    """An attribute of a module whose weights are not at hand."""
    value = getattr(original, name)
    director = _director.get(None)
    if director is None or not isinstance(value, torch.Tensor):  # somebody only looks at the module, to print it say
        return value
    if isinstance(value, nn.Parameter):
        return placeholder(Outline.of(value), director.device)
    return value.to(director.device)


@functools.cache
def _stub_class(cls: type[nn.Module]) -> type[nn.Module]:
    # Named like what it stands for: some code asks for the name of a module's class.
    return type(cls.__name__, (Stub, cls), {"__module__": cls.__module__})


def make_stub(original: nn.Module, path: str, real: nn.Module | None, ghost: nn.Parameter | None) -> nn.Module:
    """`ghost`: an empty parameter, so that whoever asks a module around it for its dtype finds one."""
    cls = _stub_class(type(original))  # type: ignore[arg-type]
    stub: nn.Module = cls.__new__(cls)
    own = stub.__dict__
    own.update({name: value for name, value in original.__dict__.items() if name != "forward"})
    own["_parameters"] = {} if ghost is None else {"ghost": ghost}
    own["_buffers"] = {}
    own["_modules"] = {} if real is None else {"real": real}
    own[PATH] = path
    own["stub_original"] = _Reference(original)
    return stub


class _Reference:
    """Holds a module without being one: it is no part of the tree it is referred to from."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def unstubbed(value: Any) -> Any:
    """A stub handed to somebody as an argument is meant as the module itself."""
    if isinstance(value, Stub):
        real: Any = value.__dict__["_modules"].get("real")
        return value if real is None else real
    return value
