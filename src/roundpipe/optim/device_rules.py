"""The arithmetic of the one-pass kernel in torch operations, on any device: the same bits as native/rules.h.

`update_in_torch` does for flat tensors of one device what OnePassKernel.update does for tensors in host memory. Every
operation here is one torch operation that rounds once, so nothing is contracted; `fmaf` of the kernel is the
device's `multiply_add`. Numbers of a step are tensors on the device, because torch divides by a plain number with its
reciprocal, which rounds twice. A NaN stays a NaN; which of its bits are set depends on the device.
Knows neither layers nor streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roundpipe.optim.native.kernel import Kernel, KernelParameter, StepNumbers
from roundpipe.store.forms import PLAIN, Form, form_of, seed_of
from roundpipe.store.values import HalvedMaster, WholeMaster, packed_bits, unpacked_bits

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
