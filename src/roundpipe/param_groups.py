"""The param groups of optimizers, whose settings the user's thread and the optimizer thread use at the same time.

Knows optimizers of torch; knows neither models nor the optimizer thread.

[Note: settings of a step]
`model.step(step_fn)` may return before step_fn runs. Settings that the user changes then, as `scheduler.step()` does,
must not reach that step, and what step_fn changes must reach the next one, whatever the timing of the two threads. So
a step uses the settings as they are when it is issued. Every setting has the time of its last write, counted in steps:
a write in step n has time 2n, one by the user between steps n and n + 1 has time 2n + 1. A step merges the settings
that the user's thread saw when the step was issued with those that the steps before have left; the later write counts.
The user's thread merges what the last step has left the next time that it uses the group.

torch has no hook for new optimizers. But its `add_param_group` asks every parameter whether it is a leaf, and masters
answer that themselves: so an optimizer is known before its first step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from roundpipe.monitor import process_rlock

_GONE: Any = object()  # the value of a setting that was removed
_Seen = tuple[Any, int]


class _Settings:
    """The settings of a group as one thread sees them."""

    def __init__(self, values: dict[str, Any], written: dict[str, int], time: int) -> None:
        """`written`: the time of the last write of a setting, 0 if missing. `time`: of writes from now on."""
        self.values, self.written, self.time = values, written, time
        self._seen: dict[str, _Seen] = {key: _seen(value) for key, value in values.items()}

    def write(self, key: str, value: Any, time: int) -> None:
        if value is _GONE:
            self.values.pop(key, None)
        else:
            self.values[key] = value
        self.written[key], self._seen[key] = time, _seen(value)

    def find_writes(self) -> None:
        """Note what was written past this object: into a tensor, or into the dict that became the group."""
        for key in {**self.values, **self._seen}:
            now = _seen(self.values.get(key, _GONE))
            before = self._seen.get(key, (_GONE, 0))
            if now[0] is not before[0] or now[1] != before[1]:
                self.written[key], self._seen[key] = self.time, now

    def merge(self, other: _Settings) -> None:
        """Take over what was written later in `other`."""
        self.find_writes()
        for key, time in other.written.items():
            if time > self.written.get(key, 0):
                self.write(key, _moved(other.values.get(key, _GONE), self.values.get(key)), time)

    def copy(self, time: int) -> _Settings:
        return _Settings({key: _own(value) for key, value in self.values.items()}, dict(self.written), time)


def _seen(value: Any) -> _Seen:
    """What shows that a setting is still the same: the value, and how often a tensor was written."""
    return value, value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _moved(value: Any, old: Any) -> Any:
    """The value for another thread, in the tensor `old` if possible, which code may hold."""
    if not (isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)):
        return _own(value)
    if (value.shape, value.dtype, value.device) != (old.shape, old.dtype, old.device):
        return _own(value)
    old.detach().copy_(value)
    return old


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class ParamGroup(dict[str, Any]):
    """A param group in which each step sees the settings that it was issued with: see [Note: settings of a step].

    A dict, because torch asks for one; the settings are not in the memory of its base class.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        """The group goes on using the dict `group`, which the user may have."""
        self._lock = process_rlock()
        self._users = _Settings(group, {}, 1)
        self._num_issued = 0
        self._step: tuple[int, _Settings] | None = None  # the thread of the step that runs, and its settings
        self._left: _Settings | None = None  # what the last step has left
        self._merged: _Settings | None = None  # what the user's settings include of it

    def of_issued_step(self) -> _Settings:
        """The settings of a step that is issued now. Called on the user's thread."""
        with self._lock:
            users = self._here()
            users.find_writes()
            self._num_issued += 1
            users.time = 2 * self._num_issued + 1
            return users.copy(2 * self._num_issued)

    def begin_step(self, settings: _Settings) -> None:
        """Let this thread see the settings of a step, until `end_step`."""
        if self._left is not None:
            settings.merge(self._left)
        self._step = threading.get_ident(), settings

    def end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step[1].find_writes()
            self._left = step[1]

    def _here(self) -> _Settings:
        """The settings as this thread sees them."""
        step = self._step
        if step is not None and step[0] == threading.get_ident():
            return step[1]
        left = self._left
        if left is not None and left is not self._merged:
            with self._lock:
                self._users.merge(left)
                self._merged = left
        return self._users

    # What a mapping is made of. Its other methods use these: see below.

    def __getitem__(self, key: str) -> Any:
        return self._here().values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        with self._lock:
            here = self._here()
            here.write(key, value, here.time)

    def __delitem__(self, key: str) -> None:
        with self._lock:
            here = self._here()
            if key not in here.values:
                raise KeyError(key)
            here.write(key, _GONE, here.time)

    def __iter__(self) -> Iterator[str]:
        return iter(self._here().values)

    def __len__(self) -> int:
        return len(self._here().values)

    # Methods that dict has besides.

    def __repr__(self) -> str:
        return repr(self._here().values)

    def __or__(self, other: Any) -> Any:
        return self._here().values | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self._here().values

    def __ior__(self, other: Any) -> ParamGroup:  # type: ignore[override]
        self.update(other)
        return self

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._here().values)

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def copy(self) -> dict[str, Any]:
        return dict(self._here().values)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain dict."""
        return dict, (self.copy(),)


for _name in (
    "get",
    "keys",
    "items",
    "values",
    "popitem",
    "clear",
    "update",
    "setdefault",
    "__contains__",
    "__eq__",
):
    setattr(ParamGroup, _name, getattr(MutableMapping, _name))  # dict's own methods use dict's own memory


class _Groups(list[dict[str, Any]]):
    """The list of an optimizer's groups, each of which is a ParamGroup from the moment on that it is in the list."""

    def append(self, group: dict[str, Any]) -> None:
        super().append(group if isinstance(group, ParamGroup) else ParamGroup(group))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


def optimizer_that_adds(frame: FrameType) -> Optimizer | None:
    """The optimizer whose `add_param_group` runs in a frame; None if the frame runs other code."""
    optimizer = frame.f_locals.get("self") if frame.f_code.co_name == Optimizer.add_param_group.__name__ else None
    return optimizer if isinstance(optimizer, Optimizer) else None


def follow(optimizer: Optimizer, wait_for_steps: Callable[[Optimizer], None]) -> None:
    """Make the groups of an optimizer those of [Note: settings of a step], for good.

    wait_for_steps: waits until no step uses the optimizer, before its state is read or replaced as a whole.
    """
    if _share_groups in optimizer._optimizer_load_state_dict_post_hooks.values():
        return
    if type(optimizer.param_groups) is list and not optimizer.param_groups:
        optimizer.param_groups = _Groups()
    _share_groups(optimizer)
    optimizer.register_state_dict_pre_hook(wait_for_steps)
    optimizer.register_load_state_dict_pre_hook(lambda loaded, _: wait_for_steps(loaded))
    optimizer.register_load_state_dict_post_hook(_share_groups)


def _share_groups(optimizer: Optimizer) -> None:
    """Make groups ParamGroups where they are none, as after loading."""
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        if not isinstance(group, ParamGroup):
            groups[index] = ParamGroup(group)


def present_settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group as this thread sees them now, in a plain dict that is fast to read. Not for writing."""
    return group._here().values if isinstance(group, ParamGroup) else group


def with_present_settings(step_fn: Callable[[], object], optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """A function that runs `step_fn` with the settings that the optimizers have now. For one step that is issued."""
    groups: dict[int, Any] = {}  # by id: an optimizer may train several models
    for optimizer in optimizers:
        _share_groups(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler that is stepped now must not warn
        groups.update({id(group): group for group in optimizer.param_groups})
    return functools.partial(_run, step_fn, [(group, group.of_issued_step()) for group in groups.values()])


def _run(step_fn: Callable[[], object], taken: list[tuple[ParamGroup, _Settings]]) -> None:
    try:
        for group, settings in taken:
            group.begin_step(settings)
        step_fn()
    finally:
        for group, _ in taken:
            group.end_step()
