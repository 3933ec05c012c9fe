"""The states of optimizers: memory for them, conversion from one form to another, and updates without the kernel.

Memory is checked before it is allocated, prepared ahead of the first step, or lies in files. Knows forms and rules, no
layers.

[Note: memory for state] A check that the moments fit into host memory runs before any moment is allocated. The system
creates fresh memory pages slowly, and the moments of a large model have many pages. So a Reserve creates these pages in
the background while the first call still computes.

[Note: state in files] State larger than host memory may lie in mapped files of a StateFolder, on a fast disk. The
system reads what an update needs, writes behind it, and keeps in memory what there is room for. While a layer is
updated, the state of the layer that probably comes next is read ahead. The files have no names: they are scratch memory
that ends with the process, however it ends, and a checkpoint copies what is in them as it copies any state. Their space
is taken when they are made, because a mapped file that finds the disk full kills the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roundpipe.errors import ConfigError, HostMemoryError
from roundpipe.host_facts import available_host_bytes, file_system, lies_in_memory, usable_cores
from roundpipe.monitor import THREAD_PREFIX, start_thread
from roundpipe.optim.rules import Group, Rule, rule_of
from roundpipe.store import OptimizerCopy
from roundpipe.store.forms import PLAIN, Form, elements_per_entry, is_low_part, seed_of, stored_form
from roundpipe.store.host_memory import (
    HUGE_PAGE_BYTES,
    HostBuffer,
    dense_stride,
    host_zeros_like,
    make_pages_ready,
    read_ahead,
    require_host_memory,
)
from roundpipe.store.values import flat

logger = logging.getLogger("roundpipe")
_OPEN_FILES = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"  # by their numbers
# Optimizers of torch that have no rule here.
_WITH_TWO_MOMENTS = (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta)
_ADVICE = (
    "None of it was made, and no weight was changed. Free memory, train fewer parameters (requires_grad_(False) before "
    'wrapping), or use less state: roundpipe.optim.AdamW(..., moments="8bit"), Lion or SGD.'
)
# For each optimizer, the ids of parameters whose memory for state was checked before.
_checked: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()


def require_state_memory(optimizer: Optimizer, reserved: Container[int] = (), *, in_one_pass: bool = False) -> None:
    """Raise HostMemoryError if the state that this step will allocate does not fit into host memory.

    A parameter that was part of an earlier check is not checked again. `reserved`: ids of parameters whose state has
    memory already. `in_one_pass`: the kernel updates masters without memory for their full values and
    gradients.
    """
    checked = _checked.setdefault(optimizer, set())
    needs = {"optimizer state": 0, "master weights": 0, "gradients in the masters' precision": 0}
    found: list[int] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            is_new = id(param) not in checked and id(param) not in reserved and not optimizer.state.get(param)
            if not is_new or param.device.type != "cpu":
                continue
            found.append(id(param))
            needs["optimizer state"] += _state_bytes(optimizer, group, param, in_one_pass=in_one_pass)
            if isinstance(param, OptimizerCopy):
                needs["master weights"] += param.bytes_to_come(in_one_pass=in_one_pass)
                if param.has_only_low_gradient and not in_one_pass:
                    needs["gradients in the masters' precision"] += param.nbytes
    if found:
        require_room_for_state(needs, f"a step of {type(optimizer).__name__}", _ADVICE)
        checked.update(found)


def require_room_for_state(needs: Mapping[str, int], what: str, advice: str) -> None:
    """Raise HostMemoryError if `needs` do not fit, of which "optimizer state" may be in files."""
    folder = _folder.get()
    if folder is not None:
        folder.require_space(needs["optimizer state"])
        if not folder.lies_in_memory:
            needs = {**needs, "optimizer state": 0}
    require_host_memory(needs, what, advice)


def _state_bytes(optimizer: Optimizer, group: dict[str, Any], param: Tensor, *, in_one_pass: bool) -> int:
    """Bytes of the state of a parameter. Several machines divide that of a master between them."""
    rule, count = rule_of(optimizer), moment_count(param) if in_one_pass else param.numel()
    if rule is not None:
        return sum(form.num_bytes(count, param.dtype) for form in rule.forms(group, param).values())
    return _num_moments(optimizer, group) * param.nbytes


def moment_count(param: Tensor) -> int:
    """The number of elements of a moment that this machine has."""
    share = param.share if isinstance(param, OptimizerCopy) else None
    return param.numel() if share is None else share.count_of(param.numel())


def first_element(param: Tensor) -> int:
    """The number of the first element of a parameter whose moments this machine has."""
    share = param.share if isinstance(param, OptimizerCopy) else None
    return 0 if share is None else share.range_of(param.numel()).start


def new_parts(form: Form, param: Tensor) -> list[Tensor]:
    """The parts of a state of zeros: in the shape of the parameter, or flat if several machines divide it."""
    share = param.share if isinstance(param, OptimizerCopy) else None
    if form is PLAIN and share is None:
        return [zeros_like(param)]
    count = moment_count(param)
    codes, *others = (new_memory(n, kind) for n, kind in zip(form.counts(count), form.dtypes(param.dtype), strict=True))
    return [codes if share is not None else codes.view(param.shape), *others]


def own_range(whole: Tensor, copy: OptimizerCopy) -> Tensor:
    """This machine's range of a whole gradient, flat, in the order of the weight's memory."""
    assert copy.share is not None
    weights = copy.record.weights
    ordered = torch.empty_strided(weights.shape, weights.stride(), dtype=whole.dtype).copy_(whole)
    return flat(ordered)[copy.share.range_of(weights.numel())]


def cut_moments(state: dict[str, Any], forms: dict[str, Form], copy: OptimizerCopy) -> None:
    """Replace whole moments, such as those of a state dict that one machine has saved, by this machine's range."""
    count, start = moment_count(copy), first_element(copy)
    for name, form in forms.items():
        first, *others = form.part_names(name)
        if state[first].shape == copy.shape and state[first].shape != (count,):
            state[first] = own_range(state[first], copy).clone()
            for part in others:
                from_entry = start // elements_per_entry(part)
                num_entries = -(-count // elements_per_entry(part))
                state[part] = state[part][from_entry : from_entry + num_entries].clone()


def new_memory(count: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros; a large one lies in a file if states do, else in huge pages if the system has any."""
    num_bytes, folder = count * dtype.itemsize, _folder.get()
    if num_bytes < HUGE_PAGE_BYTES and (folder is None or num_bytes < folder.least_bytes):
        return torch.zeros(count, dtype=dtype)
    memory = HostBuffer(num_bytes, None).tensor if folder is None else folder.new(num_bytes)
    return memory.view(dtype)


def zeros_like(param: Tensor) -> Tensor:
    """A state of zeros with the shape, dtype and strides of a dense parameter."""
    if _folder.get() is None:
        return host_zeros_like(param)
    return new_memory(param.numel(), param.dtype).as_strided(param.shape, dense_stride(param))


def _num_moments(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size the state of an optimizer without a rule has; 0 if it is unknown."""
    if isinstance(optimizer, _WITH_TWO_MOMENTS):
        return 2
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    return 0


# State in files.

_folder: ContextVar[StateFolder | None] = ContextVar("roundpipe_state_folder", default=None)


@contextlib.contextmanager
def state_placement(optimizer: Optimizer) -> Iterator[None]:
    """While entered, this thread allocates states where those of the optimizer lie: in its folder, or in memory."""
    token = _folder.set(getattr(optimizer, "state_folder", None))
    try:
        yield
    finally:
        _folder.reset(token)


def move_to_folder(states: Iterable[dict[str, Any]]) -> None:
    """Copy large states in host memory to the folder in use, if there is one."""
    folder = _folder.get()
    for state in states if folder is not None else ():
        for key, part in state.items():
            if isinstance(part, Tensor) and part.device.type == "cpu" and part.nbytes >= StateFolder.least_bytes:
                memory = new_memory(part.numel(), part.dtype).as_strided(part.shape, dense_stride(part))
                state[key] = memory.copy_(part)


class StateFolder:
    """A folder in whose file system states are allocated: see [Note: state in files]."""

    least_bytes = 1 << 16  # smaller states lie in memory

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Create the folder if it does not exist."""
        self.path = Path(folder)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ConfigError(f"state_folder={str(folder)!r} cannot hold files: {error}") from error
        self.lies_in_memory = lies_in_memory(self.path)
        if self.lies_in_memory:
            logger.warning(
                "state_folder=%r saves no memory: its files (%s) lie in host memory; give a folder on a disk",
                str(folder),
                file_system(self.path),
            )

    def require_space(self, num_bytes: int) -> None:
        """Raise HostMemoryError if the disk has less space left."""
        free = shutil.disk_usage(self.path).free
        if num_bytes > free:
            raise HostMemoryError(
                f"the optimizer's state needs {num_bytes / 1e9:.3f} GB in {self.path}, where {free / 1e9:.3f} GB are "
                'free. Free space, choose another state_folder, or use less state: moments="8bit", Lion or SGD.'
            )

    def new(self, num_bytes: int) -> Tensor:
        """A flat tensor of bytes that are zero, in a file without a name."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as file:  # nameless at once: a kill leaves nothing
                handle = file.fileno()
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, num_bytes)
                else:
                    os.ftruncate(handle, num_bytes)
                return torch.from_file(f"{_OPEN_FILES}/{handle}", shared=True, size=num_bytes, dtype=torch.uint8)
        except OSError as error:
            raise HostMemoryError(
                f"{num_bytes} bytes of optimizer state do not fit into {self.path}: {error}"
            ) from error

    def read_ahead(self, states: Iterable[dict[str, Any]]) -> None:
        """Begin to read states from the disk. Does not wait."""
        tensors = [part for state in states for part in state.values() if isinstance(part, Tensor)]
        read_ahead([tensor for tensor in tensors if tensor.nbytes >= self.least_bytes])


_MOST_THREADS = 4
_CORES_PER_THREAD = 4  # with fewer cores no thread starts: the first call needs all cores


class Reserve:
    """States of zeros, allocated ahead of the first step; see [Note: memory for state]."""

    def __init__(self) -> None:
        self._states: dict[int, list[tuple[Form, list[Tensor]]]] = {}  # by id of the copy

    def fill(self, copies: Sequence[OptimizerCopy], forms_of: Callable[[OptimizerCopy], Iterable[Form]]) -> None:
        """Allocate the states of all large copies in their forms, and start threads that create their pages.

        Begins with the last copy, because its gradient lands first. Does nothing if there are too few cores or too
        little memory; the first step then allocates the states.
        """
        num_threads = min(_MOST_THREADS, usable_cores() // _CORES_PER_THREAD)
        worthwhile = [copy for copy in reversed(copies) if moment_count(copy) * copy.itemsize >= HUGE_PAGE_BYTES]
        available, needed = available_host_bytes(), 0
        for copy in worthwhile:
            count = moment_count(copy)
            needed += count * copy.itemsize  # gradients and low halves
            needed += sum(form.num_bytes(count, copy.dtype) for form in forms_of(copy))
        if not num_threads or (available is not None and needed > available):
            return
        memory: list[torch.Tensor] = []
        for copy in worthwhile:
            states = self._states[id(copy)] = [(form, new_parts(form, copy)) for form in forms_of(copy)]
            memory += [part for _, parts in states for part in parts]
            memory += copy.memory_of_step()
        for first in range(num_threads if memory else 0):
            name = f"{THREAD_PREFIX}pages-{first}"
            thread = threading.Thread(target=_make_ready, args=(memory[first::num_threads],), name=name, daemon=True)
            try:
                start_thread(thread)
            except RuntimeError:  # the system has no more threads: the first step creates pages as it writes to them
                return

    def __contains__(self, copy_id: object) -> bool:
        return copy_id in self._states

    def parts_for(self, form: Form, param: Tensor) -> list[Tensor]:
        """The parts of a state of zeros: from the reserve, or newly allocated."""
        for position, (kept, parts) in enumerate(mine := self._states.get(id(param), [])):
            if kept is form:
                del mine[position]
                return parts
        return new_parts(form, param)


def _make_ready(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        make_pages_ready(tensor)


# States as parts of forms.

State = dict[str, Any]


def parts_of(state: Mapping[str, Any], forms: Mapping[str, Form]) -> list[list[Any]]:
    """The parts of each state of a parameter; None where a part is missing."""
    return [[state.get(part) for part in form.part_names(name)] for name, form in forms.items()]


def state_fits(param: Tensor, state: Mapping[str, Any], forms: Mapping[str, Form], *, is_divided: bool) -> bool:
    """Whether a state has all parts of its forms, whole, or the range of this machine if states are divided."""
    shapes = [tuple(param.shape), *([(moment_count(param),)] if is_divided else [])]
    found = list(zip(forms.values(), parts_of(state, forms), strict=True))
    return any(all(form.fits(parts, shape, param.dtype) for form, parts in found) for shape in shapes)


# Conversion.


class Conversions:
    """Brings states that were stored in other forms into those of an optimizer, and says so in one line."""

    def __init__(self) -> None:
        self._done: Counter[tuple[str, str]] = Counter()

    def convert(self, rule: Rule, group: Group, param: Tensor, state: State) -> None:
        """Bring the states of one parameter, whole or this machine's range, into the forms of its group."""
        for index, (name, form) in enumerate(rule.forms(group, param).items()):
            old = stored_form(state, name, param.dtype, is_square=name in rule.squares)
            if old is None or old is form:
                continue
            stored = [state.pop(part) for part in old.part_names(name)]
            values = old.expanded(stored).to(param.dtype)
            is_range = values.shape != param.shape
            parts = new_parts(form, param) if is_range or not _is_divided(param) else _whole_parts(form, param)
            step = int(state["step"]) if "step" in state else 0
            form.pack(values, parts, seed_of(step, index), first_element(param) if is_range else 0)
            state.update(zip(form.part_names(name), parts, strict=True))
            self._done[old.name, form.name] += 1
        if rule.counts_steps(group, param):
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        elif not rule.has_step_count:
            state.pop("step", None)

    def log(self, kind: str) -> None:
        """Log what was converted, if anything was."""
        for (old, new), count in self._done.items():
            logger.warning("%s: %d loaded states were converted from %s to %s moments.", kind, count, old, new)


def _is_divided(param: Tensor) -> bool:
    return moment_count(param) != param.numel()


def _whole_parts(form: Form, param: Tensor) -> list[Tensor]:
    """The parts of a state of zeros of the whole parameter, although several machines divide it."""
    return new_parts(form, torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device))


def convert_all(optimizer: torch.optim.Optimizer, rule: Rule) -> None:
    """Bring all states of an optimizer into the forms of its groups."""
    conversions = Conversions()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if optimizer.state.get(param):
                conversions.convert(rule, group, param, optimizer.state[param])
    conversions.log(type(optimizer).__name__)


def restore_parts(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], moments: Sequence[str | None], rule: Rule
) -> None:
    """Undo what torch's `load_state_dict` does to low-bit states: it casts parts to the dtype of the parameter.

    `saved`: the state dict; `moments`: the option of each group before it was loaded, which stays.
    """
    ids = [number for group in saved["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(ids, params, strict=True):
        state = optimizer.state.get(param, {})
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and is_low_part(key, value.dtype, param.dtype):
                state[key] = value.to(param.device, copy=True)
    for group, option in zip(optimizer.param_groups, moments, strict=True):
        group.pop("moments", None)
        if option is not None:
            group["moments"] = option
    convert_all(optimizer, rule)


# Updates without the kernel.


def update_expanded(
    optimizer: torch.optim.Optimizer, rule: Rule, group: Group, param: Tensor, plain_step: Callable[[], Any]
) -> None:
    """Update one parameter by `plain_step`, which works on float32 states: expands them, and packs them afterwards."""
    forms = rule.forms(group, param)
    old: State = optimizer.state.get(param) or {}
    if old:
        if not state_fits(param, old, forms, is_divided=False):
            raise RuntimeError(
                f"{type(optimizer).__name__} has a state that does not fit moments={group['moments']!r} of a parameter "
                f"of shape {list(param.shape)}: it has {', '.join(old)}. Load states with load_state_dict or "
                "roundpipe.checkpoint.load, which convert them."
            )
        found = zip(forms.items(), parts_of(old, forms), strict=True)
        expanded = {name: form.expanded(parts) for (name, form), parts in found}
        optimizer.state[param] = {**({"step": old["step"].clone()} if rule.has_step_count else {}), **expanded}
    try:
        plain_step()
    except BaseException:
        if old:
            optimizer.state[param] = old
        else:
            optimizer.state.pop(param, None)
        raise
    new = optimizer.state.get(param)
    if not new:
        return
    before = int(old["step"]) if old else 0
    step = int(new["step"]) if rule.has_step_count else before + 1
    if old and step == before:  # a GradScaler has skipped the step
        optimizer.state[param] = old
        return
    made: State = {"step": torch.tensor(float(step))}
    for index, (name, form) in enumerate(forms.items()):
        parts = [old[part] for part in form.part_names(name)] if old else _whole_parts(form, param)
        form.pack(new[name], parts, seed_of(step, index))
        made.update(zip(form.part_names(name), parts, strict=True))
    optimizer.state[param] = made


def round_masters(params: Iterable[Tensor]) -> None:
    """Round the masters of 24 bits that the plain optimizer has updated, as the kernel rounds those that it updates."""
    for param in params:
        if isinstance(param, OptimizerCopy) and param.has_own_gradient:
            param.round_update()
