"""roundpipe.optim.Adam and AdamW behave like torch's, and use torch's fused kernel exactly where it is correct."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import optim

PAIRS = [(optim.Adam, torch.optim.Adam), (optim.AdamW, torch.optim.AdamW)]
both = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["Adam", "AdamW"])


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (33,), (), (2, 3, 4, 5)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def fill_grads(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seeds: range) -> list[Tensor]:
    for seed in seeds:
        fill_grads(params, seed)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in params]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def test_only_the_optimizers_are_public() -> None:
    assert optim.__all__ == ["SGD", "Adam", "AdamW", "Lion"]


@both
def test_signature_is_torchs(ours: Any, torchs: Any) -> None:
    *parameters, moments, state_folder, on_devices = inspect.signature(ours).parameters.values()
    assert parameters == list(inspect.signature(torchs).parameters.values())
    assert (moments.name, moments.default) == ("moments", "float32")
    assert (state_folder.name, state_folder.default) == ("state_folder", None)
    assert (on_devices.name, on_devices.default) == ("on_devices", False)
    assert issubclass(ours, torchs)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_updates_in_other_precisions_are_torchs_fused_ones_bit_for_bit(
    ours: Any, torchs: Any, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}
    left, right = make_params(dtype), make_params(dtype)
    optimizer = ours(left, **options)
    assert optimizer.param_groups[0]["fused"] is True
    assert_same(train(optimizer, left, range(5)), train(torchs(right, fused=True, **options), right, range(5)))


@both
@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"lr": torch.tensor(1e-3)}, {"weight_decay": 0.0}], ids=str
)
def test_updates_equal_torchs_default_to_rounding(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    left, right = make_params(), make_params()
    ours_trained = train(ours(left, **options), left, range(10))
    for one, other in zip(ours_trained, train(torchs(right, **options), right, range(10)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": False},
        {"foreach": True},
        {"fused": False},
        {"differentiable": True},
        {"capturable": True},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
    ids=str,
)
def test_what_the_user_chose_or_fused_cannot_do_is_left_to_torch(
    ours: Any, torchs: Any, options: dict[str, Any]
) -> None:
    try:
        expected = torchs(make_params(), **options).param_groups[0]
    except (ValueError, TypeError) as error:  # older releases of torch refuse some of them
        with pytest.raises(type(error)):
            ours(make_params(), **options)
        return
    chosen = ours(make_params(), **options).param_groups[0]
    assert (chosen["foreach"], chosen["fused"]) == (expected["foreach"], expected["fused"])


@both
def test_complex_parameters_take_torchs_default(ours: Any, torchs: Any) -> None:
    left, right = [nn.Parameter(torch.ones(3, dtype=torch.complex64))], [nn.Parameter(torch.ones(3) + 0j)]
    optimizer = ours(left)
    assert optimizer.param_groups[0]["fused"] is None
    assert_same(train(optimizer, left, range(3)), train(torchs(right), right, range(3)))


def transposed_param(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, generator=generator).t(), torch.randn(4, 6, generator=generator)


def strided_param(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 12, generator=generator)[:, ::2], torch.randn(4, 6, generator=generator)


def transposed_grad(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, generator=generator), torch.randn(6, 4, generator=generator).t()


def expanded_grad(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator).expand(4, 6)


def channels_last_param(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    weight = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return weight, torch.randn(2, 3, 4, 5, generator=generator)


Layout = Callable[[torch.Generator], tuple[Tensor, Tensor]]


@both
@pytest.mark.parametrize(
    "layout", [transposed_param, strided_param, transposed_grad, expanded_grad, channels_last_param]
)
def test_layouts_the_fused_kernel_gets_wrong_are_updated_right(ours: Any, torchs: Any, layout: Layout) -> None:
    results = []
    for make in (ours, torchs):
        tensor, grad = layout(torch.Generator().manual_seed(3))
        param = nn.Parameter(tensor)
        param.grad = grad
        optimizer = make([param], lr=0.1)
        optimizer.step()
        optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@both
def test_channels_last_throughout_stays_fused(ours: Any, torchs: Any) -> None:
    results = []
    for make in (ours, torchs):
        tensor, grad = channels_last_param(torch.Generator().manual_seed(3))
        param = nn.Parameter(tensor)
        param.grad = grad.to(memory_format=torch.channels_last)
        optimizer = make([param], lr=0.1)
        optimizer.step()
        results.append(param.detach())
        if make is ours:
            assert optimizer.param_groups[0]["fused"] is True
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@both
def test_a_layout_that_appears_in_the_closure_is_seen(ours: Any, torchs: Any) -> None:
    results = []
    for make in (ours, torchs):
        param = nn.Parameter(torch.arange(24.0).view(4, 6))
        optimizer = make([param], lr=0.1)

        def closure(param: nn.Parameter = param) -> Tensor:
            param.grad = torch.arange(24.0).view(6, 4).t() - 11.5
            return param.detach().sum()

        assert optimizer.step(closure) == torch.arange(24.0).sum()
        results.append(param.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@both
def test_state_dict_round_trip_continues_bit_for_bit(ours: Any, torchs: Any) -> None:
    params = make_params()
    optimizer = ours(params, lr=1e-2)
    train(optimizer, params, range(3))
    resumed_params = copy.deepcopy(params)
    resumed = ours(resumed_params)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 1e-2
    assert_same(train(optimizer, params, range(3, 6)), train(resumed, resumed_params, range(3, 6)))


@both
@pytest.mark.parametrize("default_dtype", [torch.float32, torch.float64], ids=str)
def test_a_state_dict_of_torchs_unfused_optimizer_is_continued_fused(
    ours: Any, torchs: Any, default_dtype: torch.dtype
) -> None:
    torch.set_default_dtype(default_dtype)  # decides the dtype of the unfused step count
    try:
        params = make_params()
        unfused = torchs(params)
        train(unfused, params, range(3))
        continued_params = copy.deepcopy(params)
        continued = ours(continued_params)
        continued.load_state_dict(copy.deepcopy(unfused.state_dict()))
        assert continued.param_groups[0]["fused"] is True
        ours_trained = train(continued, continued_params, range(3, 6))
        for one, other in zip(ours_trained, train(unfused, params, range(3, 6)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


@both
def test_our_state_dict_loads_into_torchs_optimizer(ours: Any, torchs: Any) -> None:
    params = make_params()
    optimizer = ours(params)
    train(optimizer, params, range(3))
    torch_params = copy.deepcopy(params)
    torch_optimizer = torchs(torch_params)
    torch_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, torch_param in zip(params, torch_params, strict=True):
        assert optimizer.state[param].keys() == torch_optimizer.state[torch_param].keys()
        assert_same(list(optimizer.state[param].values()), list(torch_optimizer.state[torch_param].values()))
    ours_trained = train(optimizer, params, range(3, 5))
    for one, other in zip(ours_trained, train(torch_optimizer, torch_params, range(3, 5)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@both
def test_pickle_and_deepcopy(ours: Any, torchs: Any) -> None:
    params = make_params()
    optimizer = ours(params)
    train(optimizer, params, range(2))
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = train(optimizer, params, range(2, 4))
    for copied in copies:
        assert_same(train(copied, copied.param_groups[0]["params"], range(2, 4)), expected)


@both
def test_added_groups_choose_for_themselves(ours: Any, torchs: Any) -> None:
    optimizer = ours(make_params())
    optimizer.add_param_group({"params": make_params(seed=1), "lr": 0.5})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2) + 0j)]})
    optimizer.add_param_group({"params": make_params(seed=2), "foreach": True})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True, None, None]
    assert optimizer.param_groups[1]["lr"] == 0.5


@both
def test_generators_and_group_dicts_of_generators(ours: Any, torchs: Any) -> None:
    assert len(ours(iter(make_params())).param_groups[0]["params"]) == 4
    assert ours([{"params": iter(make_params())}]).param_groups[0]["fused"] is True


@both
def test_lr_scheduler(ours: Any, torchs: Any) -> None:
    histories = []
    for make in (ours, torchs):
        params = make_params()
        optimizer = make(params, lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=6)
        history = []
        for seed in range(5):
            train(optimizer, params, range(seed, seed + 1))
            scheduler.step()
            history.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        histories.append(history)
    assert histories[0] == histories[1]


@both
def test_step_hooks_run_once(ours: Any, torchs: Any) -> None:
    torchs(make_params())  # torch patches the class of every optimizer that is made
    params = make_params()
    optimizer = ours(params)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, params, range(1))
    assert calls == ["before", "after"]


@both
def test_errors_are_torchs(ours: Any, torchs: Any) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        ours([])
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ours(make_params(), lr=-1.0)
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        ours(make_params(), foreach=True, fused=True)
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        ours(embedding.parameters()).step()
