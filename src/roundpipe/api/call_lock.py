"""The lock that serialises calls into models that are stepped together, and what may enter it twice.

[Note: calls inside calls]
A call must not begin while another is half done on the same thread: a signal handler, a finalizer or a hook would wait
for what only the interrupted call can do, or change what it has just read. Such a call is refused. Some calls run the
user's code on the calling thread at points where nothing is half done: split and merge functions, a forward on the
host, autograd behind the inputs. They do so through `run_user_code`, and there other calls are welcome.
"""

from __future__ import annotations

import _thread
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from roundpipe.errors import UsageError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CallLock(_thread.RLock):  # type: ignore[misc]
    """Entered and left by C code alone, see [Note: locks and Ctrl-C]."""

    runs_user_code = False  # the call that holds the lock lets others in

    def for_call(self, name: str) -> AbstractContextManager[bool]:
        """What to enter around a call of the model `name`; gives True if no other call is around it."""
        if not self._is_owned():  # type: ignore[attr-defined]
            return self
        if not self.runs_user_code:
            raise UsageError(
                f"{name} was called while another call into it is in progress on the same thread, as from a signal "
                "handler or a finalizer; only set a flag there (model.request_stop() is one) and call the model when "
                "the present call has returned."
            )
        return _InnerCall(self)

    def run_user_code(self, function: Callable[[], Any]) -> Any:
        self.runs_user_code = True
        try:
            return function()
        finally:
            self.runs_user_code = False


class _InnerCall(AbstractContextManager[bool]):
    """The lock is held by the outer call; it is closed to others while the inner one runs."""

    def __init__(self, lock: CallLock) -> None:
        self._lock = lock

    def __enter__(self) -> bool:
        self._lock.runs_user_code = False
        return False

    def __exit__(self, *exc_info: object) -> None:
        self._lock.runs_user_code = True


def restoring_grad_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Give the calling thread its grad mode back when the call raises.

    `torch.no_grad()` is left by Python code: a Ctrl-C inside of it leaves gradients off. What restores them here is C.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        is_enabled = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except BaseException:
            torch._C._set_grad_enabled(is_enabled)
            raise

    return call


def raise_as_it_came(error: BaseException) -> NoReturn:
    """Raise an exception of another thread; what is being handled here (our own signal) is not its context."""
    context = error.__context__
    try:
        raise error
    finally:
        BaseException.__setattr__(error, "__context__", context)  # even of one that calls itself frozen
