"""A share of each layer's update on the devices of its model, over their links, beside the kernel on the host.

[Note: a share of the update] The elements of a layer lie end to end. The kernel takes pieces from the front, every
device takes pieces from the back, each as soon as it is done with its last one. A device takes no piece while weights
wait to be uploaded to it, and none that it would finish after the host, by the rates that were measured. A piece goes
up, is updated by `update_in_torch`, and goes down into the memory it came from, all on one stream of the device, which
keeps the order. `update` returns when everything is down. So for the rest of a step nothing differs from an update on
the host, not even a bit.

[Note: the arithmetic on devices] `update_in_torch` does for flat tensors of one device what OnePassKernel.update does
for tensors in host memory, with the same bits as native/rules.h. Every operation is one torch operation that rounds
once, so nothing is contracted; `fmaf` of the kernel is the device's `multiply_add`. Numbers of a step are tensors on
the device, because torch divides by a plain number with its reciprocal, which rounds twice. A NaN stays a NaN; which of
its bits are set depends on the device.

[Note: devices that fail] Until the results of a piece are on their way down, host memory is as before: if a device
fails then, as for lack of memory, the kernel takes the piece, and the device takes no more. A later failure fails the
step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import mmap
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from roundpipe.devices import Device, Event, HostPinner, StreamKind
from roundpipe.errors import ConfigError, add_note
from roundpipe.monitor import THREAD_PREFIX, wait_for_event
from roundpipe.optim.native.kernel import Kernel, KernelParameter, OnePassKernel, StepNumbers, measured_rate
from roundpipe.optim.rules import Group, Rule
from roundpipe.store import OptimizerCopy
from roundpipe.store.forms import BLOCK, PLAIN, Form, form_of, num_scales, seed_of
from roundpipe.store.host_memory import HUGE_PAGE_BYTES
from roundpipe.store.update import LayerUpdate
from roundpipe.store.values import HalvedMaster, WholeMaster, flat, packed_bits, unpacked_bits

logger = logging.getLogger("roundpipe")

PIECE = 1 << 20  # elements that a device updates at a time; a multiple of the blocks of forms and of bytes of ties
_HOST_PIECES = 4  # pieces that the kernel takes at a time: each call of it wakes all its threads
_SMALLEST = 1 << 16  # parameters with fewer elements stay on the host
_BYTES_PER_ELEMENT = 128  # of device memory that a piece takes at most: its tensors, and results in between
_STREAMS = (StreamKind.UPDATES, StreamKind.MORE_UPDATES)
_POLL_S = 1e-4
_JOIN_S = 1.0
_SMOOTHING = 0.2  # weight of a new measurement of a device's rate
_RETRY = 1.02  # growth of the assumed rate of a device per layer in which it takes no part, so that it is tried again


@dataclasses.dataclass
class _Speed:
    """What is known of a device from earlier updates."""

    per_second: float | None = None  # elements
    has_failed: bool = False

    def note(self, count: int, seconds: float) -> None:
        new = count / max(seconds, 1e-9)
        self.per_second = new if self.per_second is None else self.per_second + _SMOOTHING * (new - self.per_second)


class DeviceShare:
    """Carries out updates of layers on the host and on devices; see [Note: a share of the update]."""

    def __init__(self, state_folder: object = None) -> None:
        """`state_folder`: the optimizer's folder for states, which must not be given."""
        if state_folder is not None:
            raise ConfigError(
                f"an optimizer got on_devices=True and state_folder={str(state_folder)!r}; devices copy states from "
                "host memory: leave one of the two out."
            )
        self.num_elements = 0  # that devices have updated so far
        self._speeds: weakref.WeakKeyDictionary[Device, _Speed] = weakref.WeakKeyDictionary()
        self._can_pin = True
        self._pinned: dict[int, weakref.finalize[..., Tensor]] = {}  # by id of the tensor

    def check_options(self, groups: Iterable[Group], rule: Rule, kind: str) -> None:
        """Raise ConfigError if the options of a group keep the kernel, and so the devices, from updating it."""
        names = ("foreach", "fused", "capturable", "differentiable")
        for group in itertools.filterfalse(rule.suits_kernel, groups):
            given = ", ".join(f"{name}={group[name]!r}" for name in names if name in group)
            raise ConfigError(
                f"{kind} got on_devices=True and {given}: devices share the updates of this library's kernel alone, "
                "and these options choose torch's own implementation. Leave them, or on_devices, out."
            )

    def update(
        self,
        kernel: OnePassKernel,
        parameters: Sequence[KernelParameter],
        copies: Sequence[OptimizerCopy],
        update: LayerUpdate,
    ) -> None:
        """Update all parameters, as `kernel.update` does; `copies`: the masters of one layer whose parameters they are.

        If tensors do not match, raises RuntimeError and updates none.
        """
        for parameter in parameters:
            parameter.packed()  # checks it
        # Memory that is pinned in part, as by pin_model="register", would have to be copied in parts.
        pieces = _Pieces(parameters, [not copy.record.cuts for copy in copies])
        devices = update.devices if pieces.has_any else ()
        if devices and update.pinner is not None:
            self._pin(parameters, update.pinner)
        helpers = [helper for helper in self._helpers(devices, pieces) if helper.begin()]
        if not helpers:
            kernel.update(parameters)
            return
        try:
            _update_on_host(kernel, pieces)
        except BaseException:
            pieces.drop()
            raise
        finally:
            for helper in helpers:
                helper.wait()
        _update_on_host(kernel, pieces)  # what devices have given back
        self.num_elements += sum(helper.num_done for helper in helpers)
        for helper in helpers:
            if helper.error is not None:
                raise helper.error

    def _helpers(self, devices: Sequence[Device], pieces: _Pieces) -> Iterator[_Helper]:
        for device in devices:
            speed = self._speeds.setdefault(device, _Speed())
            if not speed.has_failed and _has_room(device):
                yield _Helper(device, pieces, speed)

    def _pin(self, parameters: Iterable[KernelParameter], pinner: HostPinner) -> None:
        """Pin the states and low halves that fill whole pages, until that fails once: then copies are slower.

        The other memory that devices copy is the model's.
        """
        for parameter in filter(can_update_in_torch, parameters):
            master = parameter.master
            halves = master.own_parts() if master is not None and master.has_high_halves else []
            for tensor in (*halves, *parameter.states, *parameter.scales):
                has_pages = tensor.nbytes >= HUGE_PAGE_BYTES and tensor.data_ptr() % mmap.PAGESIZE == 0
                known = self._pinned.get(id(tensor))
                if has_pages and self._can_pin and (known is None or not known.alive):
                    self._can_pin = pinner.pin(tensor.data_ptr(), tensor.nbytes)
                    if self._can_pin:
                        self._pinned[id(tensor)] = weakref.finalize(tensor, pinner.unpin, tensor.data_ptr())
                        self._pinned[id(tensor)].atexit = False


def _update_on_host(kernel: OnePassKernel, pieces: _Pieces) -> None:
    while taken := pieces.from_front(_HOST_PIECES * PIECE):
        kernel.update(taken)


def _has_room(device: Device) -> bool:
    """Whether the device has memory for its pieces that no call has used so far."""
    limit, use = device.memory_limit_bytes(), device.memory_use()
    return limit is None or use is None or use.peak + len(_STREAMS) * PIECE * _BYTES_PER_ELEMENT <= limit


# Pieces of a layer.


@dataclasses.dataclass
class _Rest:
    """The elements of a parameter that are still to be updated, as a range in the order of memory."""

    parameter: KernelParameter
    start: int
    stop: int
    is_for_devices: bool

    def __len__(self) -> int:
        return self.stop - self.start


class _Pieces:
    """What is left of an update. Each piece is taken once, by the host from the front or by a device from the back."""

    def __init__(self, parameters: Sequence[KernelParameter], may_travel: Sequence[bool]) -> None:
        self._lock = threading.RLock()
        rests = []
        for parameter, may in zip(parameters, may_travel, strict=True):
            assert parameter.gradient is not None
            count = parameter.gradient.numel()
            rests.append(_Rest(parameter, 0, count, may and count >= _SMALLEST and can_update_in_torch(parameter)))
        self._rests = deque(sorted(rests, key=lambda rest: rest.is_for_devices))
        self._num_left = sum(map(len, rests))

    @property
    def has_any(self) -> bool:
        """Whether there is a piece for devices."""
        with self._lock:
            return bool(self._rests) and self._rests[-1].is_for_devices

    def from_front(self, count: int) -> list[KernelParameter]:
        """Take pieces with about `count` elements in all; nothing if none is left.

        Parameters that are not for devices are taken whole.
        """
        taken = []
        with self._lock:
            while count > 0 and self._rests:
                rest = self._rests[0]
                is_whole = not rest.is_for_devices
                cut = rest.stop if is_whole else min(rest.stop, rest.start + max(count // PIECE, 1) * PIECE)
                taken.append((rest, rest.start, cut))
                count -= cut - rest.start
                self._num_left -= cut - rest.start
                rest.start = cut
                if not len(rest):
                    self._rests.popleft()
        return [_cut(rest.parameter, *ends) if rest.is_for_devices else rest.parameter for rest, *ends in taken]

    def from_back(self, is_worth: Callable[[int, int], bool]) -> KernelParameter | None:
        """Take a piece for a device if `is_worth`, given the elements left and those of the piece; None otherwise."""
        with self._lock:
            if not self.has_any:
                return None
            rest = self._rests[-1]
            start = max(rest.start, (rest.stop - 1) // PIECE * PIECE)
            count = rest.stop - start
            if not is_worth(self._num_left, count):
                return None
            ends = rest.parameter, start, rest.stop
            self._num_left -= count
            rest.stop = start
            if not len(rest):
                self._rests.pop()
        return _cut(*ends)

    def give_back(self, piece: KernelParameter) -> None:
        """Leave a piece that a device has taken to the host."""
        assert piece.gradient is not None
        with self._lock:
            self._num_left += len(piece.gradient)
            self._rests.appendleft(_Rest(piece, 0, len(piece.gradient), is_for_devices=False))

    def drop(self) -> None:
        """Leave the rest as it is, because the step has failed."""
        with self._lock:
            self._rests.clear()


def _cut(parameter: KernelParameter, start: int, stop: int) -> KernelParameter:
    """The update of a range of elements in the order of memory. `start`: a multiple of PIECE."""
    elements, master = slice(start, stop), parameter.master
    assert parameter.gradient is not None
    assert master is not None
    return KernelParameter(
        master.cut(start, stop),
        flat(parameter.gradient)[elements],
        [flat(state)[elements] for state in parameter.states],
        None if parameter.weight is None else flat(parameter.weight)[elements],
        parameter.numbers,
        [flat(more)[elements] for more in parameter.more_gradients],
        [scale[start // BLOCK : num_scales(stop)] for scale in parameter.scales],
        parameter.first + start,
    )


# The part of one device.


class _Helper:
    """The part of one device in one update. It runs on a thread of its device, which ends with the update."""

    def __init__(self, device: Device, pieces: _Pieces, speed: _Speed) -> None:
        self.num_done = 0  # elements
        self.error: BaseException | None = None
        self._device, self._pieces, self._speed = device, pieces, speed
        self._num_under_way = 0  # elements of pieces that may not be down yet
        self._first: KernelParameter | None = None
        name = f"{THREAD_PREFIX}update on {device.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> bool:
        """Take a first piece, if the link is idle, and start. Returns whether the device takes part."""
        if self._link_idles():
            self._first = self._pieces.from_back(self._is_worth)
            if self._first is None:
                self._speed.per_second = None if self._speed.per_second is None else _RETRY * self._speed.per_second
                return False
        try:
            self._thread.start()
        except RuntimeError as error:  # the system refuses another thread
            self._give_up(self._first, error)
            return False
        return True

    def wait(self) -> None:
        """Wait until everything that the device has taken is in host memory."""
        self._thread.join(_JOIN_S)  # wakes at once; a longer wait is polled, so that the watchdog reports it
        wait_for_event(lambda: not self._thread.is_alive(), f"the update on {self._device.name}")

    def _is_worth(self, num_left: int, count: int) -> bool:
        """Whether the device finishes a piece before the host has done everything that is left."""
        own_rate, host_rate = self._speed.per_second, measured_rate()
        if own_rate is None or host_rate is None:
            return self._first is None and not self.num_done  # one piece, to measure it
        return (self._num_under_way + count) / own_rate <= num_left / host_rate

    def _link_idles(self) -> bool:
        """Whether no weights wait to be uploaded to the device."""
        return self._device.record(StreamKind.WEIGHTS_UP).done()

    def _run(self) -> None:
        start_s = time.perf_counter()
        try:
            # What was queued uses host memory, so leave only when it has run, also after a failure.
            with contextlib.ExitStack() as ends, torch.no_grad():
                for stream in _STREAMS:
                    ends.callback(self._wait_for, stream)
                self._work()
            if self.num_done:
                self._speed.note(self.num_done, time.perf_counter() - start_s)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # an exception that is kept must not keep device memory
            add_note(error, f"while updating a share of a layer on {self._device.name}; a part of the layer is updated")
            self.error, self._speed.has_failed = error, True

    def _wait_for(self, stream: StreamKind) -> None:
        self._device.record(stream).wait()

    def _work(self) -> None:
        under_way: deque[tuple[Event, int]] = deque()
        piece = self._first or self._next()
        for stream in itertools.cycle(_STREAMS):
            if piece is None or not self._carry_out(piece, stream):
                return
            assert piece.gradient is not None
            under_way.append((self._device.record(stream), len(piece.gradient)))
            self.num_done += len(piece.gradient)
            self._num_under_way += len(piece.gradient)
            if len(under_way) == len(_STREAMS):
                event, count = under_way.popleft()
                event.wait()
                self._num_under_way -= count
            piece = self._next()

    def _next(self) -> KernelParameter | None:
        while self._pieces.has_any:
            if self._link_idles():
                return self._pieces.from_back(self._is_worth)
            time.sleep(_POLL_S)
        return None

    def _carry_out(self, piece: KernelParameter, stream: StreamKind) -> bool:
        """Queue the update of a piece. Returns False if the device has failed and the host must update it."""
        try:
            there, numbers = self._up(piece, stream)
            with self._device.computing(stream):
                of_rule, factors = numbers.split([len(piece.numbers.numbers), len(piece.numbers.gradient_factors)])
                update_in_torch(there, of_rule, factors, self._device.multiply_add)
        except Exception as error:
            self._give_up(piece, error)
            return False
        for to, source in zip(_written(piece), _written(there), strict=True):
            self._device.copy(to, source, stream)
        return True

    def _up(self, piece: KernelParameter, stream: StreamKind) -> tuple[KernelParameter, Tensor]:
        """The piece on the device, and the numbers and factors of its step."""

        def made(source: Tensor) -> Tensor:
            return self._device.device_empty_strided((len(source),), (1,), source.dtype, stream)

        def up(source: Tensor) -> Tensor:
            copy = made(source)
            self._device.copy(copy, source, stream)
            return copy

        master = piece.master
        assert piece.gradient is not None
        assert master is not None
        there = KernelParameter(
            master.moved(up),
            up(piece.gradient),
            [up(state) for state in piece.states],
            None if piece.weight is None else made(piece.weight),
            piece.numbers,
            [up(more) for more in piece.more_gradients],
            [up(scale) for scale in piece.scales],
            piece.first,
        )
        step = piece.numbers
        return there, up(torch.tensor([*step.numbers, *step.gradient_factors], dtype=torch.float32))

    def _give_up(self, piece: KernelParameter | None, error: Exception) -> None:
        self._speed.has_failed = True
        if piece is not None:
            self._pieces.give_back(piece)
        logger.warning(
            "%s takes no part in the updates of the optimizer any more, because it failed: %r", self._device.name, error
        )


def _written(piece: KernelParameter) -> list[Tensor]:
    """The tensors that an update writes."""
    master = piece.master
    assert master is not None
    return [*master.own_parts(), *piece.states, *piece.scales, *([] if piece.weight is None else [piece.weight])]


# The arithmetic of the kernel in torch; see [Note: the arithmetic on devices].

MultiplyAdd = Callable[[Tensor, Tensor, Tensor], Tensor]  # a * b + c of float32 tensors, rounded once

_HALF = 0x8000
_FORMS: dict[torch.dtype, Form] = {
    torch.float32: PLAIN,
    torch.bfloat16: form_of("bfloat16", is_square=False),
    torch.int8: form_of("8bit", is_square=False),
    torch.uint8: form_of("8bit", is_square=True),
}


def can_update_in_torch(parameter: KernelParameter) -> bool:
    """Whether this module knows how master and states of a parameter are stored."""
    is_known = type(parameter.master) in (HalvedMaster, WholeMaster) and parameter.rounding is None
    return is_known and all(state.dtype in _FORMS for state in parameter.states)


def update_in_torch(parameter: KernelParameter, numbers: Tensor, factors: Tensor, multiply_add: MultiplyAdd) -> None:
    """Update a parameter whose tensors are flat and on one device; the weight lies in other memory than the master.

    `numbers`, `factors`: those of `parameter.numbers`, as float32 tensors on the device.
    """
    assert parameter.gradient is not None
    gradient = parameter.gradient.float()
    for more in parameter.more_gradients:
        gradient = gradient + more.float()
    for factor in factors:
        gradient = gradient * factor
    master = parameter.master
    assert master is not None
    halves = master if isinstance(master, HalvedMaster) else None
    values = master.joined() if halves is None else _joined(halves)
    forms, parts = _stored(parameter)
    states = [form.expanded(of_form) for form, of_form in zip(forms, parts, strict=True)]
    values, states = _updated(parameter.numbers, numbers, values, gradient, states, multiply_add)
    for index, (form, of_form, state) in enumerate(zip(forms, parts, states, strict=True)):
        form.pack(state, of_form, seed_of(parameter.numbers.step, index), parameter.first)
    if halves is not None:
        _halve(values, halves, parameter.weight)
        return
    master.joined().copy_(values)
    if parameter.weight is not None:
        is_bfloat16 = parameter.weight.dtype is torch.bfloat16
        parameter.weight.copy_(_to_bfloat16(values).view(torch.bfloat16) if is_bfloat16 else values)


def _stored(parameter: KernelParameter) -> tuple[list[Form], list[Sequence[Tensor]]]:
    """The form of each state, and its parts."""
    forms, scales = [_FORMS[state.dtype] for state in parameter.states], iter(parameter.scales)
    parts = [
        [state, *(next(scales) for _ in form.suffixes[1:])] for form, state in zip(forms, parameter.states, strict=True)
    ]
    return forms, list(parts)


# The functions of rules.h.


def _updated(
    step: StepNumbers,
    numbers: Tensor,
    master: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    multiply_add: MultiplyAdd,
) -> tuple[Tensor, list[Tensor]]:
    """The new values of master and states."""
    if step.kernel is Kernel.LION:
        return _lion(numbers, master, gradient, states[0])
    if step.kernel in (Kernel.ADAM, Kernel.AMSGRAD):
        return _adam(numbers, master, gradient, states, multiply_add, adds_decay=step.numbers[1] != 0)
    decay, minus_lr, momentum, rest = numbers[:4]
    if step.numbers[0] != 0:
        gradient = multiply_add(decay, master, gradient)
    if step.kernel is Kernel.SGD:
        return multiply_add(minus_lr, gradient, master), []
    is_first = step.kernel in (Kernel.SGD_FIRST, Kernel.SGD_FIRST_NESTEROV)
    buffer = gradient if is_first else multiply_add(rest, gradient, states[0] * momentum)
    is_nesterov = step.kernel in (Kernel.SGD_FIRST_NESTEROV, Kernel.SGD_NEXT_NESTEROV)
    along = multiply_add(momentum, buffer, gradient) if is_nesterov else buffer
    return multiply_add(minus_lr, along, master), [buffer]


def _adam(
    numbers: Tensor,
    master: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    multiply_add: MultiplyAdd,
    *,
    adds_decay: bool,
) -> tuple[Tensor, list[Tensor]]:
    shrink, decay, beta1_rest, beta2, beta2_rest, step_size, correction, eps = numbers
    value = master * shrink
    if adds_decay:
        gradient = multiply_add(decay, value, gradient)
    first = multiply_add(beta1_rest, gradient - states[0], states[0])
    second = multiply_add(beta2_rest * gradient, gradient, states[1] * beta2)
    new = [first, second]
    if len(states) > 2:
        new.append(torch.where(states[2] > second, states[2], second))
    # torch's float32 root is not rounded correctly everywhere; that of float64, rounded again, is.
    denominator = new[-1].double().sqrt().float() / correction + eps
    return value - step_size * first / denominator, new


def _lion(numbers: Tensor, master: Tensor, gradient: Tensor, moment: Tensor) -> tuple[Tensor, list[Tensor]]:
    shrink, beta1, beta1_rest, beta2, beta2_rest, lr = numbers[:6]
    mixed = moment * beta1 + gradient * beta1_rest
    sign = torch.where(mixed.isnan(), mixed, mixed.sign())
    return master * shrink - sign * lr, [moment * beta2 + gradient * beta2_rest]


# Halved masters; see [Note: halved masters] in one_pass.c.


def _joined(halves: HalvedMaster) -> Tensor:
    lower = halves.low.to(torch.int32) & 0xFFFF
    is_up = unpacked_bits(halves.ties)[: len(lower)]
    went_up = (lower > _HALF) | ((lower == _HALF) & is_up)
    upper = (halves.weight.view(torch.int16).to(torch.int32) & 0xFFFF) - went_up.to(torch.int32)
    return (upper << 16 | lower).view(torch.float32)


def _halve(values: Tensor, halves: HalvedMaster, weight: Tensor | None) -> None:
    """Write values into a weight and the low halves. The ties of elements that are none stay as they are."""
    assert weight is not None
    bits, upper = values.view(torch.int32), _to_bfloat16(values)
    low = bits.to(torch.int16)  # keeps the low 16 bits
    is_tie, went_up = low == -_HALF, upper != (bits >> 16).to(torch.int16)
    old = unpacked_bits(halves.ties)
    new = torch.where(is_tie, went_up, old[: len(low)])
    halves.ties.copy_(packed_bits(torch.cat([new, old[len(low) :]])))
    halves.low.copy_(low)
    weight.copy_(upper.view(torch.bfloat16))


def _to_bfloat16(values: Tensor) -> Tensor:
    """The bits of values rounded to bfloat16, as the kernel rounds NaN, too."""
    bits = values.view(torch.int32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return torch.where(values.isnan(), 0x7FC0, rounded).to(torch.int16)
