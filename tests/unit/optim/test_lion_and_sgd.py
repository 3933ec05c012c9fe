"""roundpipe.optim.Lion and SGD: the kernel computes what plain PyTorch does, to the last bit."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers_adam import NumpySGD
from roundpipe import optim
from roundpipe.optim import one_pass, rules
from roundpipe.optim.lion import PlainLion
from roundpipe.optim.native import library
from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel, one_pass_kernel
from roundpipe.store import HalvedMaster

LENGTH = 3 * 65536 + 69  # several pieces for threads, and an incomplete vector
SIZES = (0, *range(1, 36), 1023, 1025, 65537)
LION: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.3},
    "maximize": {"lr": 0.01, "maximize": True, "weight_decay": 0.1},
    "tensor-lr": {"lr": torch.tensor(0.003)},
}
SGD: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.03},
    "decay": {"lr": 0.03, "weight_decay": 0.1},
    "momentum": {"lr": 0.03, "momentum": 0.9},
    "dampening": {"lr": 0.03, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"lr": 0.03, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    "not-foreach": {"lr": 0.03, "momentum": 0.9, "foreach": False},
    "tensor-lr": {"lr": torch.tensor(0.03), "momentum": 0.9},
}
KINDS = [(optim.Lion, PlainLion, LION[name]) for name in LION] + [(optim.SGD, NumpySGD, SGD[name]) for name in SGD]
IDS = [f"lion-{name}" for name in LION] + [f"sgd-{name}" for name in SGD]
every = pytest.mark.parametrize(("ours", "exact", "options"), KINDS, ids=IDS)
without_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="without FMA instructions torch's SGD rounds twice"
)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params_of_odd_sizes() -> list[nn.Parameter]:
    flat = [nn.Parameter(randn(size, seed=size)) for size in SIZES]
    shaped = [randn(5, 3, seed=1).t(), randn(2, 3, 5, 7, seed=2).to(memory_format=torch.channels_last), randn(seed=3)]
    return [*flat, *map(nn.Parameter, shaped)]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range = range(4)) -> None:
    """In the second step every third parameter has no gradient."""
    for step in steps:
        for position, param in enumerate(params):
            gradient = randn(*param.shape, seed=1000 * step + position).to(param.dtype)
            param.grad = torch.empty_like(param, memory_format=torch.preserve_format).copy_(gradient)
            if step == 1 and position % 3 == 0:
                param.grad = None
        optimizer.step()
        optimizer.zero_grad()


def assert_same(ours: torch.optim.Optimizer, exact: torch.optim.Optimizer) -> None:
    groups = zip(ours.param_groups, exact.param_groups, strict=True)
    for one, other in (pair for left, right in groups for pair in zip(left["params"], right["params"], strict=True)):
        assert torch.equal(one, other), f"{tuple(one.shape)}"
        left, right = ours.state.get(one, {}), exact.state.get(other, {})
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert torch.equal(value, right[key]), key
            assert value.stride() == right[key].stride()


# Ordinary tensors.


@every
def test_every_size_on_every_processor(
    ours: Any, exact: Any, options: dict[str, Any], processor: str, updates: list[KernelParameter]
) -> None:
    left, right = params_of_odd_sizes(), params_of_odd_sizes()
    optimizer, reference = ours(left, **options), exact(right, **{**options, "lr": float(options.get("lr", 1e-4))})
    train(optimizer, left)
    train(reference, right)
    assert_same(optimizer, reference)
    skipped = -(-len(left) // 3)
    assert len(updates) == 4 * len(left) - skipped, "every update was the kernel's"


@without_fma
@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_sgd_is_torchs(options: dict[str, Any], updates: list[KernelParameter]) -> None:
    left, right = params_of_odd_sizes(), params_of_odd_sizes()
    optimizer = optim.SGD(left, **options)
    reference = torch.optim.SGD(right, **{**options, "foreach": False, "fused": False})
    train(optimizer, left)
    train(reference, right)
    assert_same(optimizer, reference)
    assert updates


def test_plain_lion_is_lion_as_published() -> None:
    """Against numpy, whose float32 operations are correctly rounded."""
    lr, beta1, beta2, decay = (np.float32(x) for x in (0.02, 0.9, 0.99, 1 - 0.02 * 0.3))
    param = nn.Parameter(randn(1000, seed=0))
    value, moment = param.detach().numpy().copy(), np.zeros(1000, dtype=np.float32)
    optimizer = PlainLion([param], lr=0.02, weight_decay=0.3)
    for step in range(5):
        param.grad = randn(1000, seed=step + 1)
        gradient = param.grad.numpy()
        optimizer.step()
        update = np.sign(beta1 * moment + np.float32(1 - 0.9) * gradient)
        value = value * decay - lr * update
        moment = beta2 * moment + np.float32(1 - 0.99) * gradient
        assert np.array_equal(param.detach().numpy(), value)
        assert np.array_equal(optimizer.state[param]["exp_avg"].numpy(), moment)


@pytest.mark.parametrize("kind", [PlainLion, optim.Lion])
def test_lion_shows_a_gradient_of_nan_and_does_not_move_without_one(kind: Any) -> None:
    param = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, -0.0]))
    param.grad = torch.tensor([float("nan"), 0.0, -0.0, float("-inf")])
    kind([param], lr=0.5).step()
    assert param[0].isnan()
    assert param[1:].tolist() == [2.0, 3.0, 0.5]


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions_are_left_to_plain_pytorch(
    ours: Any, exact: Any, options: dict[str, Any], dtype: torch.dtype, updates: list[KernelParameter]
) -> None:
    plain = PlainLion if ours is optim.Lion else torch.optim.SGD
    left, right = ([nn.Parameter(randn(7, 5, seed=0).to(dtype))] for _ in range(2))
    optimizer, reference = ours(left, **options), plain(right, **options)
    train(optimizer, left)
    train(reference, right)
    assert_same(optimizer, reference)
    assert updates == []


@pytest.mark.parametrize("chosen", [{"foreach": True}, {"fused": True}, {"differentiable": True}], ids=str)
def test_what_the_user_chose_is_left_to_torchs_sgd(chosen: dict[str, Any], updates: list[KernelParameter]) -> None:
    left, right = ([nn.Parameter(randn(33, seed=0), requires_grad=False)] for _ in range(2))
    for params, kind in ((left, optim.SGD), (right, torch.optim.SGD)):
        train(kind(params, lr=0.1, momentum=0.9, dampening=0.5, **chosen), params)
    assert torch.equal(left[0], right[0])
    assert updates == []


@every
def test_without_a_kernel(
    ours: Any, exact: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, updates: list[KernelParameter]
) -> None:
    monkeypatch.setattr(one_pass, "one_pass_kernel", lambda: None)
    plain = PlainLion if ours is optim.Lion else torch.optim.SGD
    left, right = params_of_odd_sizes(), params_of_odd_sizes()
    optimizer, reference = ours(left, **options), plain(right, **options)
    train(optimizer, left)
    train(reference, right)
    assert_same(optimizer, reference)
    assert updates == []


def transposed_gradient(param: Tensor) -> Tensor:
    return randn(*reversed(param.shape), seed=9).t()


def expanded_gradient(param: Tensor) -> Tensor:
    return randn(param.shape[0], 1, seed=9).expand(param.shape)


@pytest.mark.parametrize("gradient", [transposed_gradient, expanded_gradient])
@every
def test_gradients_in_another_layout_are_left_to_plain_pytorch(
    ours: Any,
    exact: Any,
    options: dict[str, Any],
    gradient: Callable[[Tensor], Tensor],
    updates: list[KernelParameter],
) -> None:
    """Also in the first step of a parameter, whose buffer is then the undamped gradient."""
    plain = PlainLion if ours is optim.Lion else torch.optim.SGD
    results = []
    for kind in (ours, plain):
        param = nn.Parameter(randn(4, 6, seed=0))
        optimizer = kind([param], **options)
        for _ in range(3):
            param.grad = gradient(param)
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)
    assert updates == []


@every
def test_a_state_dict_continues_the_training(ours: Any, exact: Any, options: dict[str, Any]) -> None:
    whole, cut = params_of_odd_sizes(), params_of_odd_sizes()
    optimizer, before = ours(whole, **options), ours(cut, **options)
    train(optimizer, whole)
    train(before, cut, range(2))
    after = ours(cut, lr=5.0)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(after, cut, range(2, 4))
    assert_same(after, optimizer)
    train(pickle.loads(pickle.dumps(after)), whole, range(0))


def test_a_state_dict_of_torchs_sgd_continues_the_training() -> None:
    left, right = params_of_odd_sizes(), params_of_odd_sizes()
    reference = NumpySGD(right, **SGD["dampening"])
    train(NumpySGD(left, **SGD["dampening"]), left, range(2))
    train(reference, right, range(2))
    optimizer = optim.SGD(left, lr=1.0)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(optimizer, left, range(2, 4))
    train(reference, right, range(2, 4))
    assert_same(optimizer, reference)


def test_momentum_may_begin_and_end_during_the_training() -> None:
    left, right = params_of_odd_sizes(), params_of_odd_sizes()
    optimizer, reference = optim.SGD(left, lr=0.03), NumpySGD(right, lr=0.03)
    for momentum in (0.0, 0.9, 0.5, 0.0, 0.9):
        for one, params in ((optimizer, left), (reference, right)):
            one.param_groups[0].update(momentum=momentum, dampening=0.1)
            train(one, params, range(2, 4))
    assert_same(optimizer, reference)


@pytest.mark.parametrize("kind", ["lion", "sgd"])
def test_a_state_of_another_shape_is_refused(kind: str) -> None:
    param = nn.Parameter(randn(4, 3, seed=0))
    optimizer = optim.Lion([param]) if kind == "lion" else optim.SGD([param], lr=0.1, momentum=0.9)
    train(optimizer, [param], range(1))
    name = "exp_avg" if kind == "lion" else "momentum_buffer"
    optimizer.state[param][name] = torch.zeros(5)
    before = param.detach().clone()
    with pytest.raises(RuntimeError):
        train(optimizer, [param], range(2, 3))
    assert torch.equal(param, before)


def test_sgd_has_torchs_signature() -> None:
    *parameters, state_folder, on_devices = inspect.signature(optim.SGD).parameters.values()
    assert parameters == list(inspect.signature(torch.optim.SGD).parameters.values())
    assert (state_folder.name, state_folder.default) == ("state_folder", None)
    assert (on_devices.name, on_devices.default) == ("on_devices", False)
    assert issubclass(optim.SGD, torch.optim.SGD)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, r"betas=\(-0.1, 0.9\)"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"lr": float("nan")}, "lr=nan"),
    ],
)
def test_lion_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.Lion([nn.Parameter(torch.zeros(1))], **options)


def test_lion_refuses_sparse_gradients() -> None:
    param = nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optim.Lion([param]).step()


@pytest.mark.parametrize("kind", [optim.Lion, PlainLion])
def test_lion_runs_the_closure(kind: Any) -> None:
    param = nn.Parameter(torch.ones(3))

    def closure() -> Tensor:
        loss = (param * 2).sum()
        loss.backward()
        return loss

    assert kind([param], lr=0.5).step(closure) == 6
    assert param.tolist() == [0.5, 0.5, 0.5]


# The kernel.


@pytest.fixture
def kernel() -> OnePassKernel:
    made = one_pass_kernel()
    assert made is not None, "the tests need a C compiler"
    return made


def rule_and_group(ours: Any, options: dict[str, Any]) -> tuple[rules.Rule, dict[str, Any]]:
    optimizer = ours([nn.Parameter(torch.zeros(1))], **options)
    return optimizer.rule, optimizer.param_groups[0]


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
def test_weights_and_gradients_of_every_precision(
    kernel: OnePassKernel, ours: Any, exact: Any, options: dict[str, Any], dtype: torch.dtype | None
) -> None:
    """Two gradients, of two machines, are added; their sum is multiplied by two factors, one after the other."""
    rule, group = rule_and_group(ours, options)
    factors = (1 / 3, 0.7)
    master, param = randn(LENGTH, seed=0), nn.Parameter(randn(LENGTH, seed=0))
    weight = None if dtype is None else torch.empty(LENGTH, dtype=dtype)
    reference = exact([param], **{**options, "lr": float(options.get("lr", 1e-4))})
    states = [torch.full((LENGTH,), 0.0) for _ in rule.state_names(group)]
    for step in range(3):
        one, two = (randn(LENGTH, seed=10 * step + i).to(dtype or torch.float32) for i in (1, 2))
        numbers = rule.step_numbers(group, step, factors)
        kernel.update([KernelParameter(master, one, states, weight, numbers, [two])])
        param.grad = one.float() + two.float()
        for factor in factors:
            param.grad.mul_(torch.tensor(factor))
        reference.step()
        assert torch.equal(master, param)
        assert weight is None or torch.equal(weight, param.detach().to(weight.dtype))
    for state, name in zip(states, rule.state_names(group), strict=True):
        assert torch.equal(state, reference.state[param][name])


@every
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_a_halved_master_is_the_whole_one(
    ours: Any, exact: Any, options: dict[str, Any], num_threads: int, processor: str
) -> None:
    loaded = library.load()
    assert loaded is not None
    team = OnePassKernel(loaded, num_threads)
    rule, group = rule_and_group(ours, options)
    old, new = randn(LENGTH, seed=0).bfloat16(), torch.empty(LENGTH, dtype=torch.bfloat16)
    low, ties = torch.zeros(LENGTH, dtype=torch.uint16), torch.zeros(-(-LENGTH // 8), dtype=torch.uint8)
    param = nn.Parameter(old.float())
    reference = exact([param], **{**options, "lr": float(options.get("lr", 1e-4))})
    states = [torch.zeros(LENGTH) for _ in rule.state_names(group)]
    for step in range(5):
        gradient = randn(LENGTH, seed=step + 1).bfloat16()
        numbers = rule.step_numbers(group, step, ())
        team.update([KernelParameter(HalvedMaster(old, low, ties), gradient, states, new, numbers)])
        param.grad = gradient.float()
        reference.step()
        joined = torch.empty(LENGTH)
        team.join(HalvedMaster(new, low, ties), joined)
        assert torch.equal(joined, param)
        assert torch.equal(new, param.detach().bfloat16())
        old, new = new, old


@every
def test_an_empty_range_is_updated(
    kernel: OnePassKernel, ours: Any, exact: Any, options: dict[str, Any], processor: str
) -> None:
    """As a machine has of a small parameter."""
    rule, group = rule_and_group(ours, options)
    weight = torch.empty(0, dtype=torch.bfloat16)
    states = [torch.empty(0) for _ in rule.state_names(group)]
    masters = [HalvedMaster(weight), torch.empty(0)]
    numbers = rule.step_numbers(group, 0, ())
    kernel.update([KernelParameter(master, weight.clone(), states, weight, numbers, [weight]) for master in masters])
