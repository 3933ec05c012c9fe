"""roundpipe.optim.Adam and AdamW on ordinary tensors: the arithmetic of optimizer copies, the behaviour of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_adam import NumpyAdam, NumpyAdamW
from roundpipe import RoundPipe, optim
from roundpipe.errors import RoundPipeError
from roundpipe.optim import one_pass
from roundpipe.optim.native.kernel import KernelParameter

KINDS = [(optim.Adam, NumpyAdam, torch.optim.Adam), (optim.AdamW, NumpyAdamW, torch.optim.AdamW)]
both = pytest.mark.parametrize(("ours", "exact", "torchs"), KINDS, ids=["Adam", "AdamW"])
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"lr": 0.02, "weight_decay": 0.1},
    "amsgrad": {"amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6},
    "maximize": {"maximize": True, "weight_decay": 0.3},
    "tensor-lr": {"lr": torch.tensor(0.003)},
    "fused": {"fused": True},
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params_of_odd_sizes(seed: int = 0) -> list[nn.Parameter]:
    flat = [nn.Parameter(randn(size, seed=seed + size)) for size in (0, *range(1, 36), 1023, 1025, 65537)]
    shaped = [randn(5, 3, seed=1).t(), randn(2, 3, 5, 7, seed=2).to(memory_format=torch.channels_last), randn(seed=3)]
    return [*flat, *map(nn.Parameter, shaped)]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], num_steps: int = 3) -> None:
    for step in range(num_steps):
        for position, param in enumerate(params):
            gradient = randn(*param.shape, seed=1000 * step + position)
            param.grad = torch.empty_like(param, memory_format=torch.preserve_format).copy_(gradient)
        optimizer.step()
        optimizer.zero_grad()


@both
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_size_is_updated_with_one_arithmetic(
    ours: Any, exact: Any, torchs: Any, options: str, num_threads: int, updates: list[KernelParameter]
) -> None:
    torch.set_num_threads(num_threads)
    left, right = params_of_odd_sizes(), params_of_odd_sizes()
    optimizer, reference = ours(left, **OPTIONS[options]), exact(right, **{**OPTIONS[options], "fused": None})
    train(optimizer, left)
    train(reference, right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other), f"{tuple(one.shape)}"
        assert optimizer.state[one].keys() == reference.state[other].keys()
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, reference.state[other][key])
            assert value.stride() == reference.state[other][key].stride()
    assert len(updates) == 3 * len(left), "every update was the kernel's"


@both
def test_tensors_and_optimizer_copies_are_updated_alike(ours: Any, exact: Any, torchs: Any) -> None:
    check_tensors_against_copies(ours, torch.float32)
    check_tensors_against_copies(ours, torch.bfloat16)


@both
def test_without_a_kernel_tensors_and_optimizer_copies_are_updated_alike(
    ours: Any, exact: Any, torchs: Any, monkeypatch: pytest.MonkeyPatch, updates: list[KernelParameter]
) -> None:
    monkeypatch.setattr(one_pass, "one_pass_kernel", lambda: None)
    check_tensors_against_copies(ours, torch.float32)
    check_tensors_against_copies(ours, torch.bfloat16)
    assert updates == []


def check_tensors_against_copies(ours: Any, dtype: torch.dtype) -> None:
    """The gradients are given, so that only the optimizer computes anything."""
    weights = [randn(rows, 1, seed=rows).to(dtype) for rows in (1, 7, 13, 33, 1029)]
    layers = nn.Sequential(*(_TimesWeight(weight) for weight in weights))
    with RoundPipe(layers, optim_dtype=torch.float32) as model:
        copies = list(model.optim_parameters())
        tensors = [nn.Parameter(weight.float()) for weight in weights]
        optimizers = ours(copies, lr=0.01, weight_decay=0.1), ours(tensors, lr=0.01, weight_decay=0.1)
        for step in range(3):
            model.forward_backward((torch.ones(1),), label=None, loss_fn=lambda out, label: out.sum())

            def step_fn(step: int = step) -> None:
                for position, (master, tensor) in enumerate(zip(copies, tensors, strict=True)):
                    assert master.grad is not None
                    gradient = randn(*tensor.shape, seed=100 * step + position).to(dtype).float()
                    master.grad.copy_(gradient)
                    tensor.grad = gradient.clone()
                optimizers[0].step()
                optimizers[0].zero_grad()

            model.step(step_fn, is_async=False)
            optimizers[1].step()
        for master, tensor in zip(copies, tensors, strict=True):
            assert torch.equal(master.detach(), tensor.detach())
            for key, value in optimizers[0].state[master].items():
                assert torch.equal(value, optimizers[1].state[tensor][key])


class _TimesWeight(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


@both
@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": False}],
    ids=str,
)
def test_an_implementation_that_the_user_chose_is_torchs(
    ours: Any, exact: Any, torchs: Any, options: dict[str, Any], updates: list[KernelParameter]
) -> None:
    left, right = ([nn.Parameter(randn(33, seed=0))] for _ in range(2))
    for params, kind in ((left, ours), (right, torchs)):
        optimizer = kind(params, **options)
        for step in range(3):
            params[0].grad = randn(33, seed=step + 1)
            optimizer.step()
    assert torch.equal(left[0], right[0])
    assert updates == []


@both
def test_parameters_of_other_kinds_in_one_group_are_torchs(
    ours: Any, exact: Any, torchs: Any, updates: list[KernelParameter]
) -> None:
    made = []
    for kind in (ours, torchs):
        params = [nn.Parameter(randn(7, seed=0).to(dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
        optimizer = kind(params, lr=0.1, fused=True)
        for param in params:
            param.grad = randn(7, seed=1).to(param.dtype)
        optimizer.step()
        made.append(params)
    assert [len(updates), *updates[0].master.joined().shape] == [1, 7]
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][2], made[1][2])


@both
def test_a_layout_of_one_step_does_not_change_the_arithmetic_of_the_others(
    ours: Any, exact: Any, torchs: Any, updates: list[KernelParameter]
) -> None:
    """torch's default implementation handles a gradient with other strides than its parameter, in that step only."""
    params = [nn.Parameter(randn(4, 6, seed=seed)) for seed in range(2)]
    beside = nn.Parameter(params[1].detach().clone())
    optimizer, reference = ours(params, lr=0.1), exact([beside], lr=0.1)
    for step in range(3):
        params[0].grad = randn(6, 4, seed=step).t() if step == 1 else randn(4, 6, seed=step)
        params[1].grad = beside.grad = randn(4, 6, seed=10 + step)
        optimizer.step()
        reference.step()
        assert torch.equal(params[1], beside)
    assert optimizer.param_groups[0]["fused"] is True
    assert len(updates) == 5


@both
def test_autograd_notices_a_step_between_forward_and_backward(ours: Any, exact: Any, torchs: Any) -> None:
    param = nn.Parameter(randn(5, seed=0))
    loss = (param * param).sum()
    param.grad = torch.ones(5)
    ours([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both
def test_parameters_that_share_memory_are_updated_one_after_the_other(ours: Any, exact: Any, torchs: Any) -> None:
    results = []
    for kind in (ours, exact):
        memory = randn(3 * 65536 + 5, seed=0)
        params = [nn.Parameter(memory[:]), nn.Parameter(memory[1:])]
        optimizer = kind(params, lr=0.1)
        for seed, param in enumerate(params):
            param.grad = randn(len(param), seed=seed)
        optimizer.step()
        results.append(memory)
    assert torch.equal(*results)


@both
def test_a_parameter_without_a_gradient_gets_no_state(ours: Any, exact: Any, torchs: Any) -> None:
    params = [nn.Parameter(randn(5, seed=seed)) for seed in range(2)]
    optimizer = ours(params)
    params[1].grad = torch.ones(5)
    optimizer.step()
    assert list(optimizer.state) == [params[1]]


@both
def test_a_gradient_whose_sign_is_lazy_is_read_right(ours: Any, exact: Any, torchs: Any) -> None:
    lazy = torch.complex(torch.zeros(5), randn(5, seed=1)).conj().imag
    assert lazy.is_neg()
    made = []
    for gradient in (lazy, lazy.resolve_neg()):
        param = nn.Parameter(randn(5, seed=0))
        param.grad = gradient
        ours([param], lr=0.1).step()
        made.append(param.detach())
    torch.testing.assert_close(made[0], made[1], rtol=1e-6, atol=1e-7)


@both
def test_a_scaler_of_torchs_lets_the_fused_optimizer_unscale(ours: Any, exact: Any, torchs: Any) -> None:
    made = []
    for kind in (ours, torchs):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        param = nn.Parameter(randn(16, seed=0))
        optimizer = kind([param], lr=0.1, fused=True)
        for factor in (1.0, float("inf"), 0.5):
            scaler.scale((param * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        made.append(param.detach())
    assert torch.equal(*made)


@both
def test_a_step_in_a_compiled_function_is_the_step(ours: Any, exact: Any, torchs: Any) -> None:
    left, right = (nn.Parameter(randn(37, seed=0)) for _ in range(2))
    optimizer, reference = ours([left], lr=0.1), exact([right], lr=0.1)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(3):
        left.grad = right.grad = randn(37, seed=step + 1)
        compiled()
        reference.step()
        assert torch.equal(left, right)


# States that belong to another model.


def wrong_shape(param: Tensor) -> dict[str, Any]:
    return {name: torch.ones(*(size + 2 for size in param.shape)) for name in ("exp_avg", "exp_avg_sq")}


def fewer_elements(param: Tensor) -> dict[str, Any]:
    return {name: torch.ones(*(size - 1 for size in param.shape)) for name in ("exp_avg", "exp_avg_sq")}


def transposed(param: Tensor) -> dict[str, Any]:
    return {name: torch.ones(param.t().shape) for name in ("exp_avg", "exp_avg_sq")}


def one_more_dimension(param: Tensor) -> dict[str, Any]:
    return {name: torch.ones(2, *param.shape) for name in ("exp_avg", "exp_avg_sq")}


def of_double(param: Tensor) -> dict[str, Any]:
    return {name: torch.ones(param.shape, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq")}


def of_bfloat(param: Tensor) -> dict[str, Any]:
    return {name: torch.ones(param.shape, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}


def second_moment_alone(param: Tensor) -> dict[str, Any]:
    return {"exp_avg": torch.ones(param.shape), "exp_avg_sq": torch.ones(3, 3)}


def of_sgd(param: Tensor) -> dict[str, Any]:
    return {"momentum_buffer": torch.ones(param.shape)}


FOREIGN = [
    wrong_shape,
    fewer_elements,
    transposed,
    one_more_dimension,
    of_double,
    of_bfloat,
    second_moment_alone,
    of_sgd,
]


def step_with_foreign_state(kind: Any, foreign: Callable[[Tensor], dict[str, Any]]) -> tuple[Exception, list[Tensor]]:
    params = [nn.Parameter(randn(4, 7, seed=seed)) for seed in range(3)]
    optimizer = kind(params, lr=0.1, weight_decay=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.state[params[1]] = {"step": torch.tensor(3.0), **foreign(params[1])}
    with pytest.raises((RuntimeError, KeyError)) as raised:
        optimizer.step()
    return raised.value, [param.detach() for param in params]


@both
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_state_of_another_model_raises_what_torchs_default_raises(
    ours: Any, exact: Any, torchs: Any, foreign: Callable[[Tensor], dict[str, Any]], updates: list[KernelParameter]
) -> None:
    error, params = step_with_foreign_state(ours, foreign)
    expected, plain_params = step_with_foreign_state(torchs, foreign)
    assert type(error) is type(expected)
    assert str(error) == str(expected)
    assert updates == [], "the kernel saw nothing of a step that fails"
    for one, other in zip(params, plain_params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(params[2], plain_params[2]), "neither has updated the last parameter"


@both
def test_a_checkpoint_of_another_model_is_refused_in_the_step(ours: Any, exact: Any, torchs: Any) -> None:
    larger = [nn.Parameter(randn(64, 64, seed=0)), nn.Parameter(randn(9, seed=0))]
    saved = ours(larger)
    train(saved, larger, 1)
    for reverse in (False, True):
        params = [nn.Parameter(randn(3, 5, seed=0)), nn.Parameter(randn(4099, seed=0))][:: -1 if reverse else 1]
        optimizer = ours(params)
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        with pytest.raises(RuntimeError, match=r"must match the size|doesn't match the broadcast shape"):
            train(optimizer, params, 1)


@both
@pytest.mark.parametrize("foreign", [wrong_shape, fewer_elements, transposed])
def test_a_state_of_another_model_on_optimizer_copies(
    ours: Any, exact: Any, torchs: Any, foreign: Callable[[Tensor], dict[str, Any]], updates: list[KernelParameter]
) -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)).to(torch.bfloat16)
    with RoundPipe(net, optim_dtype=torch.float32) as model:
        copies = list(model.optim_parameters())
        optimizer = ours(copies)
        optimizer.state[copies[2]] = {"step": torch.tensor(3.0), **foreign(copies[2])}
        x = torch.ones(2, 5, dtype=torch.bfloat16)
        model.forward_backward((x,), label=None, loss_fn=lambda out, label: out.float().sum())
        with pytest.raises((RuntimeError, RoundPipeError)) as raised:
            model.step(optimizer.step, is_async=False)
        chain = [raised.value, raised.value.__cause__, raised.value.__context__]
        assert any(isinstance(error, RuntimeError) and "match" in str(error) for error in chain)
    assert updates == []


@both
def test_a_weight_with_gaps_that_stays_where_it_lies_is_updated_right(ours: Any, exact: Any, torchs: Any) -> None:
    """Its optimizer copy has no gaps. The memory between the weight's elements belongs to other tensors."""
    around = randn(6, 12, seed=0).to(torch.bfloat16)
    before = around.clone()
    layer = nn.Linear(6, 6, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(around[:, ::2])
    plain = nn.Parameter(around[:, ::2].float())
    with RoundPipe(nn.Sequential(layer), optim_dtype=torch.float32, pin_model="off") as model:
        optimizer = ours(list(model.optim_parameters()), lr=0.1)
        reference = exact([plain], lr=0.1)
        x = randn(4, 6, seed=1).to(torch.bfloat16)
        for _ in range(2):
            model.forward_backward((x,), label=None, loss_fn=lambda out, label: out.float().sum())

            def step_fn() -> None:
                plain.grad = optimizer.param_groups[0]["params"][0].grad.clone()
                optimizer.step()
                optimizer.zero_grad()

            model.step(step_fn, is_async=False)
            reference.step()
        model.synchronize()
    torch.testing.assert_close(layer.weight, plain.to(torch.bfloat16), rtol=1e-2, atol=1e-3)
    assert torch.equal(around[:, 1::2], before[:, 1::2])
