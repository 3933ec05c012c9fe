"""Context managers written as generators that let every exception through, StopIteration included.

Used by api.engine, whose contexts raise what the user's code raised on another thread. Python turns a StopIteration
that leaves a generator into a RuntimeError (PEP 479); here it is turned back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def entering(function: Callable[_P, Iterator[_T]]) -> Callable[_P, AbstractContextManager[_T]]:
    """`contextlib.contextmanager`, but for StopIteration."""
    make = contextlib.contextmanager(function)

    @functools.wraps(function)
    def enter(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_T]:
        return _Entering(make(*args, **kwargs))

    return enter


class _Entering(AbstractContextManager[_T]):
    def __init__(self, inner: AbstractContextManager[_T]) -> None:
        self._inner = inner

    def __enter__(self) -> _T:
        try:
            return self._inner.__enter__()
        except RuntimeError as error:
            _raise_unwrapped(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return self._inner.__exit__(kind, error, traceback)
        except RuntimeError as raised:
            _raise_unwrapped(raised)


def raise_as_it_came(error: BaseException) -> NoReturn:
    """Raise an exception of another thread; what is being handled here (our own signal) is not its context."""
    context = error.__context__
    try:
        raise error
    finally:
        BaseException.__setattr__(error, "__context__", context)  # even of one that calls itself frozen


def _raise_unwrapped(error: RuntimeError) -> NoReturn:
    if isinstance(error.__cause__, StopIteration) and str(error) == "generator raised StopIteration":
        raise_as_it_came(error.__cause__)
    raise error
