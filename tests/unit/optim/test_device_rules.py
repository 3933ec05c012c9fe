"""The torch operations that update on devices give the bits of the C kernel, for every rule and form."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers_adam import fmaf
from roundpipe import optim
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.optim.device_share import can_update_in_torch, update_in_torch
from roundpipe.optim.native.kernel import KernelParameter, StepNumbers, one_pass_kernel
from roundpipe.store import HalvedMaster
from roundpipe.store.forms import form_of

COUNT = 5 * 256 + 77
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
    "amsgrad": (optim.Adam, {"amsgrad": True}),
    "Lion": (optim.Lion, {"weight_decay": 0.1}),
    "SGD": (optim.SGD, {"weight_decay": 0.1}),
    "momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "Nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 5.9e-39, 3.4028235e38, -3.4e38, 6e4, 1e19, 1e-23)
NOT_FINITE = (float("inf"), -float("inf"), float("nan"))


def numbers_of(seed: int, count: int = COUNT, special: tuple[float, ...] = SPECIAL) -> Tensor:
    """Random bits, normal numbers, halves of bfloat16 steps, and special numbers."""
    made = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed + 100))
    wild = bits.to(torch.int32).view(torch.float32)
    made[::3] = torch.where(wild[::3].isfinite(), wild[::3], 1)
    ties = (bits[1::9].to(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)
    made[1::9] = torch.where(ties.isfinite(), ties, 2)
    at = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 200))[: 8 * len(special)]
    made[at] = torch.tensor(special).repeat(8)
    return made


def made_master(values: Tensor, kind: str) -> Tensor | HalvedMaster:
    if kind == "plain":
        return values
    halves = HalvedMaster(torch.zeros(len(values), dtype=torch.bfloat16))
    kernel = one_pass_kernel()
    assert kernel is not None
    kernel.halve(values, halves)
    return halves


def in_torch(parameter: KernelParameter) -> None:
    step = parameter.numbers
    assert can_update_in_torch(parameter)
    numbers, factors = (torch.tensor(found, dtype=torch.float32) for found in (step.numbers, step.gradient_factors))
    if isinstance(parameter.master, HalvedMaster):
        assert parameter.master.weight is not parameter.weight
    update_in_torch(parameter, numbers, factors, VirtualDevice(0).multiply_add)


def assert_same_bits(mine: KernelParameter, theirs: KernelParameter, where: str) -> None:
    """All tensors are equal bit for bit, zeros with their signs, but for the bits of NaN."""
    for one, other in zip(tensors_of(mine), tensors_of(theirs), strict=True):
        is_nan = other.isnan()
        assert torch.equal(one.isnan(), is_nan), where
        as_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[one.itemsize]
        assert torch.equal(one[~is_nan].view(as_bits), other[~is_nan].view(as_bits)), where


def tensors_of(parameter: KernelParameter) -> list[Tensor]:
    master = parameter.master
    assert master is not None
    values = [master.joined()]
    if isinstance(master, HalvedMaster):
        assert parameter.weight is not None
        joined = HalvedMaster(parameter.weight, master.low, master.ties).joined()
        values = [joined, torch.where(joined.isnan(), 0, master.low)]
    return [*values, *parameter.states, *parameter.scales, parameter.weight]  # type: ignore[list-item]


def state_parts(names: tuple[str, ...], squares: frozenset[str], moments: str) -> tuple[list[Tensor], list[Tensor]]:
    forms = [form_of(moments, is_square=name in squares) for name in names]
    parts = [
        [torch.zeros(n, dtype=d) for n, d in zip(form.counts(COUNT), form.dtypes(torch.float32), strict=True)]
        for form in forms
    ]
    return [of_form[0] for of_form in parts], [part for of_form in parts for part in of_form[1:]]


@pytest.mark.parametrize("special", [SPECIAL, (*SPECIAL, *NOT_FINITE)], ids=["finite", "not finite"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_and_form_has_the_bits_of_the_kernel(kind: str, moments: str, special: tuple[float, ...]) -> None:
    kernel, (ours, options) = one_pass_kernel(), KINDS[kind]
    assert kernel is not None
    rule = ours.rule
    if moments != "float32" and not rule.can_be_low:
        return
    group = ours([nn.Parameter(torch.zeros(1))], lr=0.01, **options).param_groups[0]
    names = rule.state_names(group)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for master_kind, weight_dtype, gradient_dtype in [
        ("halved", torch.bfloat16, dtypes[0]),
        *(("plain", d, d) for d in dtypes),
    ]:
        states, scales = state_parts(names, rule.squares, moments)
        master = made_master(numbers_of(1, special=special), master_kind)
        weight = torch.zeros(COUNT, dtype=weight_dtype)
        mine = KernelParameter(master, None, states, weight, StepNumbers(0, ()), (), scales, 3 * 2048)  # type: ignore[arg-type]
        theirs = copy.deepcopy(mine)
        for step in range(3):
            progress = step + 1 if rule.has_step_count else step
            gradients = [numbers_of(10 * step + k, special=special).to(gradient_dtype) for k in range(1 + step % 2)]
            for parameter in (mine, theirs):
                parameter.gradient, *parameter.more_gradients = gradients
                parameter.numbers = rule.step_numbers(group, progress, (0.5, 0.3)[:step], step + 1)
            in_torch(mine)
            kernel.update([dataclasses.replace(theirs)])
            assert_same_bits(mine, theirs, f"{master_kind} {weight_dtype} step {step}")
            for parameter in (mine, theirs):
                if isinstance(parameter.master, HalvedMaster):
                    parameter.master.weight.copy_(parameter.weight)


def test_multiply_add_rounds_once() -> None:
    """Among them sums that float64 rounds to the middle of two float32 numbers, and results below normal numbers."""
    a, b, c = (numbers_of(seed, 1 << 16, (*SPECIAL, *NOT_FINITE)) for seed in (1, 2, 3))
    one, tiny = torch.ones(4), torch.tensor([2.0**-60, -(2.0**-60), 2.0**-149, -(2.0**-149)])
    middle = (1 + 2.0**-12) * one, (1 + 2.0**-12) * one, tiny  # the product ends half way between two numbers
    small = torch.full((4,), 2.0**-75), (1 + 2.0**-23) * one * 2.0**-75, tiny * 2.0**-60
    for x, y, z in ((a, b, c), (a, b, -(a * b)), middle, small):
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(np.asarray(fmaf(x.numpy(), y.numpy(), z.numpy())))
        found = VirtualDevice(0).multiply_add(x, y, z)
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert (
        VirtualDevice(0).multiply_add(*middle)[0]
        != (middle[0].double() * middle[1].double() + tiny.double()).float()[0]
    )


def test_what_is_stored_in_another_way_is_refused() -> None:
    class Other(HalvedMaster):
        pass

    weight = torch.zeros(8, dtype=torch.bfloat16)
    for master, state in ((Other(weight), torch.zeros(8)), (torch.zeros(8), torch.zeros(8, dtype=torch.float64))):
        assert not can_update_in_torch(KernelParameter(master, None, [state], weight, StepNumbers(0, ())))  # type: ignore[arg-type]
