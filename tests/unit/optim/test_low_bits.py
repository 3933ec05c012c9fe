"""Moments in bfloat16 and in 8 bits: the kernel gives the bits of the torch code, and both keep what they promise."""

from __future__ import annotations

import copy
import inspect
import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import optim
from roundpipe.optim import one_pass, rules
from roundpipe.optim.native import library
from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel, one_pass_kernel
from roundpipe.store.forms import BLOCK, PLAIN, Form, form_of, random_bits, seed_of

SIZES = (0, 1, 255, 256, 257, 1024, 4096 + 77, 65536 + 300)
LOW = ("bfloat16", "8bit")
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"amsgrad": True}),
    "lion": (optim.Lion, {"weight_decay": 0.1}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_form = pytest.mark.parametrize("moments", LOW)


def randn(size: int, seed: int) -> Tensor:
    """Normal numbers whose scale differs from block to block, some zeros, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * torch.randn(size, generator=generator).exp()
    values *= torch.logspace(-20, 3, -(-size // BLOCK) or 1).repeat_interleave(BLOCK)[:size]
    values[::7] = 0
    values[2 * BLOCK : 3 * BLOCK] = 0
    return values


def empty_parts(form: Form, size: int) -> list[Tensor]:
    counts, dtypes = form.counts(size), form.dtypes(torch.float32)
    return [torch.zeros(count, dtype=dtype) for count, dtype in zip(counts, dtypes, strict=True)]


@every_form
@every_kind
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_kernel_is_expanding_updating_and_packing(
    kind: str, moments: str, num_threads: int, processor: str
) -> None:
    """The update in between is that of the same kernel on float32 states, which other tests compare with torch."""
    loaded = library.load()
    assert loaded is not None
    team = OnePassKernel(loaded, num_threads)
    ours, options = KINDS[kind]
    optimizer = ours([nn.Parameter(torch.zeros(1))], **options)
    rule, group, first = optimizer.rule, optimizer.param_groups[0], 3 * 2048
    names = rule.state_names(group)
    forms = [form_of(moments, is_square=name in rule.squares) for name in names]
    masters = [randn(size, 1) for size in SIZES]
    stored = [[empty_parts(form, size) for form in forms] for size in SIZES]
    expected = [[[part.clone() for part in parts] for parts in states] for states in stored]
    for step in (1, 2, 3):
        numbers = rule.step_numbers(group, step, (), step)
        for master, states, wanted in zip(masters, stored, expected, strict=True):
            gradient, reference = randn(len(master), 10 + step), master.clone()
            expanded = [form.expanded(parts).clone() for form, parts in zip(forms, wanted, strict=True)]
            team.update([KernelParameter(reference, gradient, expanded, None, numbers)])
            for index, (form, parts) in enumerate(zip(forms, wanted, strict=True)):
                form.pack(expanded[index], parts, seed_of(step, index), first)
            scales = [part for parts in states for part in parts[1:]]
            kernel_states = [parts[0] for parts in states]
            team.update([KernelParameter(master, gradient, kernel_states, None, numbers, (), scales, first)])
            assert torch.equal(master, reference)
            for mine, theirs in zip(states, wanted, strict=True):
                assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@every_form
def test_nan_and_infinity_stay_visible(moments: str, processor: str) -> None:
    team = one_pass_kernel()
    assert team is not None
    rule, group = rules.ADAMW, optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0]
    for bad in (float("nan"), float("inf"), -float("inf")):
        forms = [form_of(moments, is_square=is_square) for is_square in (False, True)]
        states = [empty_parts(form, 4 * BLOCK) for form in forms]
        gradient = torch.ones(4 * BLOCK)
        gradient[BLOCK + 3] = bad
        scales = [part for parts in states for part in parts[1:]]
        numbers = rule.step_numbers(group, 1, (), 1)
        first = [parts[0] for parts in states]
        team.update([KernelParameter(torch.zeros(4 * BLOCK), gradient, first, None, numbers, (), scales)])
        for form, parts in zip(forms, states, strict=True):
            is_finite = form.expanded(parts).isfinite().view(4, BLOCK)
            assert not is_finite[1, 3]
            assert is_finite[[0, 2, 3]].all()


@every_form
@pytest.mark.parametrize("is_square", [False, True])
def test_rounding_keeps_the_mean(moments: str, is_square: bool) -> None:
    form = form_of(moments, is_square=is_square)
    values = torch.rand(64 * BLOCK, generator=torch.Generator().manual_seed(0)) + 0.01
    values[::BLOCK] = 1  # the largest of each block
    parts, total, num_draws = empty_parts(form, len(values)), torch.zeros(len(values)), 200
    for step in range(num_draws):
        form.pack(values, parts, seed_of(step, 0))
        found = form.expanded(parts)
        total += found.sqrt() if is_square else found
    wanted = values.sqrt() if is_square else values
    largest_gap = 1 / 64 if moments == "8bit" else 1 / 128
    assert (found.sqrt() if is_square else found).sub(wanted).abs().max() < largest_gap
    assert (total / num_draws - wanted).abs().mean() < largest_gap / 20


def test_random_bits_are_even_and_differ_by_element_step_and_state() -> None:
    bits = random_bits(seed_of(1, 0), 0, 1 << 16)
    assert bits.min() >= 0
    assert bits.max() < 1 << 32
    for bit in range(32):
        assert abs((bits >> bit & 1).float().mean() - 0.5) < 0.01
    assert torch.equal(random_bits(seed_of(1, 0), 500, 100), bits[500:600])
    for other in (seed_of(2, 0), seed_of(1, 1)):
        assert (random_bits(other, 0, 1 << 16) == bits).float().mean() < 0.001


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    form = form_of("8bit", is_square=True)
    values = torch.full((BLOCK,), 1e-12)
    values[0] = 1.0
    parts = empty_parts(form, BLOCK)
    form.pack(values, parts, seed_of(1, 1))
    assert (form.expanded(parts) > 0).all()


# Optimizers on ordinary tensors.


def params_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A large parameter, one that is too small for low bits, and one in another memory order."""
    generator = torch.Generator().manual_seed(0)
    shapes = [torch.randn(80, 70, generator=generator), torch.randn(63, 65, generator=generator)]
    turned = torch.randn(90, 80, generator=generator).t()
    return [nn.Parameter(tensor.to(dtype)) for tensor in (*shapes, turned)]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for at, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            generator = torch.Generator().manual_seed(100 * step + at)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype) + 0.3
        optimizer.step()


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            found += [param.detach().clone(), *(state[key].clone() for key in sorted(state))]
    return found


def assert_same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for mine, theirs in zip(values(one), values(other), strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


@every_form
@every_kind
def test_only_large_contiguous_parameters_have_low_moments(kind: str, moments: str) -> None:
    ours, options = KINDS[kind]
    optimizer = ours(params_of(), moments=moments, **options)
    train(optimizer, range(2))
    large, small, turned = (optimizer.state[param] for param in optimizer.param_groups[0]["params"])
    for state in (small, turned):
        assert all(tensor.dtype is torch.float32 for tensor in state.values())
    name = "exp_avg" if moments == "bfloat16" else "exp_avg_8bit"
    assert large[name].dtype is (torch.bfloat16 if moments == "bfloat16" else torch.int8)
    assert sum(t.nbytes for t in large.values() if t.dim()) < 0.6 * 4 * 5600 * len(
        optimizer.rule.state_names(optimizer.param_groups[0])
    )


@every_form
@every_kind
def test_without_a_compiler_the_states_are_the_same(kind: str, moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lion has the same bits without the kernel. torch's Adam rounds elements that do not fill a vector differently."""
    ours, options = KINDS[kind]
    with_kernel, without = (ours(params_of(), moments=moments, **options) for _ in range(2))
    train(with_kernel, range(3))
    monkeypatch.setattr(one_pass, "one_pass_kernel", lambda: None)
    train(without, range(3))
    if kind == "lion":
        assert_same(with_kernel, without)
    for mine, theirs in zip(values(with_kernel), values(without), strict=True):
        assert mine.dtype is theirs.dtype
        if mine.dtype is torch.float32:
            assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-3)


@every_form
def test_a_gradient_in_another_layout_is_read_in_its_own(moments: str) -> None:
    one, other = (optim.Lion(params_of(), moments=moments) for _ in range(2))
    train(one, range(2))
    for step in range(2):
        for at, param in enumerate(other.param_groups[0]["params"]):
            generator = torch.Generator().manual_seed(100 * step + at)
            param.grad = (torch.randn(param.shape, generator=generator) + 0.3).t().contiguous().t()
        other.step()
    assert_same(one, other)


@every_form
@every_kind
def test_a_state_dict_resumes_bit_for_bit(kind: str, moments: str) -> None:
    ours, options = KINDS[kind]
    whole, half = (ours(params_of(), moments=moments, **options) for _ in range(2))
    train(whole, range(4))
    train(half, range(2))
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed = ours(copy.deepcopy(half.param_groups[0]["params"]), moments=moments, **options)
    resumed.load_state_dict(torch.load(file))
    train(resumed, range(2, 4))
    assert_same(resumed, whole)


@every_kind
def test_states_in_other_forms_are_converted_with_one_line(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, options = KINDS[kind]
    saved = {}
    for moments in ("float32", *LOW):
        source = ours(params_of(), moments=moments, **options)
        train(source, range(3))
        saved[moments] = copy.deepcopy(source.state_dict())
    for old, new in (("float32", "8bit"), ("8bit", "float32"), ("bfloat16", "8bit"), ("8bit", "bfloat16")):
        caplog.clear()
        optimizer = ours(params_of(), moments=new, **options)
        with caplog.at_level(logging.WARNING, "roundpipe"):
            optimizer.load_state_dict(copy.deepcopy(saved[old]))
        assert len(caplog.messages) == 1
        assert f"from {old} to {new}" in caplog.text
        assert rules.moments_of(optimizer.param_groups[0]) == new
        large, name = optimizer.param_groups[0]["params"][0], "exp_avg"
        forms = optimizer.rule.forms(optimizer.param_groups[0], large)
        found = forms[name].expanded([optimizer.state[large][part] for part in forms[name].part_names(name)])
        form, state = form_of(old, is_square=False), saved[old]["state"][0]
        assert (found - form.expanded([state[part] for part in form.part_names(name)])).abs().max() < 0.02
        train(optimizer, range(3, 5))
        assert all(tensor.isfinite().all() for tensor in values(optimizer))
        if kind != "lion":
            assert int(optimizer.state[large]["step"]) == 5


def test_torchs_optimizer_refuses_a_state_in_8_bits() -> None:
    """It would take codes for moments."""
    source = optim.AdamW(params_of(), moments="8bit")
    train(source, range(1))
    plain = torch.optim.AdamW(params_of())
    plain.load_state_dict(source.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        train(plain, range(1))


def test_a_group_chooses_for_itself() -> None:
    one, two, three = params_of()
    groups = [{"params": [one], "moments": "float32"}, {"params": [two, three]}]
    optimizer = optim.AdamW(groups, moments="8bit")
    train(optimizer, range(1))
    assert optimizer.state[one]["exp_avg"].dtype is torch.float32
    assert optimizer.param_groups[1]["moments"] == "8bit"


def test_a_state_of_another_model_is_refused() -> None:
    source = optim.AdamW([nn.Parameter(torch.zeros(70, 70))], moments="8bit")
    train(source, range(1))
    optimizer = optim.AdamW([nn.Parameter(torch.zeros(80, 70))], moments="8bit")
    optimizer.load_state_dict(source.state_dict())
    with pytest.raises(RuntimeError, match=r"does not fit moments='8bit' of a parameter of shape \[80, 70\]"):
        train(optimizer, range(1))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: optim.AdamW(params_of(), moments="4bit"), "moments='4bit'; give one of 'float32'"),
        (lambda: optim.AdamW(params_of(), moments="8bit", foreach=True), "foreach=True"),
        (lambda: optim.AdamW(params_of(torch.bfloat16), moments="8bit"), "torch.bfloat16 on cpu"),
        (lambda: optim.SGD(params_of(), momentum=0.9, moments="8bit"), "SGD got moments='8bit'"),
        (lambda: optim.SGD([{"params": params_of(), "moments": "8bit"}], momentum=0.9), "SGD got moments='8bit'"),
    ],
)
def test_what_has_no_low_moments_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_float32_moments_leave_group_and_state_as_torch_has_them() -> None:
    ours, plain = optim.AdamW(params_of(), moments="float32"), torch.optim.AdamW(params_of(), fused=True)
    assert ours.param_groups[0].keys() == plain.param_groups[0].keys()
    assert "moments" not in inspect.signature(optim.SGD).parameters
    assert optim.AdamW(params_of()).rule.forms(ours.param_groups[0], params_of()[0])["exp_avg"] is PLAIN


def test_second_moments_of_many_scales_get_the_codes_of_the_kernel() -> None:
    """A quotient that is rounded twice would change about one code in a million."""
    kernel, form, count = one_pass_kernel(), form_of("8bit", is_square=True), 1 << 22
    assert kernel is not None
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 1e-3
    group = optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0]
    numbers = rules.ADAMW.step_numbers(group, 1, (), 1)
    second, (codes, scales), wanted = torch.zeros(count), empty_parts(form, count), empty_parts(form, count)
    kernel.update([KernelParameter(torch.zeros(count), gradient, [torch.zeros(count), second], None, numbers)])
    given = [torch.zeros(count), codes]
    kernel.update([KernelParameter(torch.zeros(count), gradient, given, None, numbers, (), [scales])])
    form.pack(second, wanted, seed_of(1, 1))
    assert torch.equal(scales, wanted[1])
    assert torch.equal(codes, wanted[0])
