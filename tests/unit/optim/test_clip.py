"""clip_grad_norm_ gives torch's norm and gradients bit for bit, for models and parameters alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.errors import ArgumentTypeError, ConfigError, NonFiniteError, RoundPipeError
from roundpipe.optim.gradients import clip_grad_norm_


def make_params(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    params: list[Tensor] = []
    for shape in [(17, 9), (5,), (), (3, 2, 4)]:
        param = nn.Parameter(torch.zeros(shape))
        param.grad = torch.randn(shape, generator=generator)
        params.append(param)
    params.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    return params


class ModelWithCopies:
    """Has optim_parameters() like a RoundPipe model; its parameters() would be the wrong ones."""

    def __init__(self, copies: list[Tensor]) -> None:
        self.copies = copies

    def optim_parameters(self) -> Iterator[Tensor]:
        return iter(self.copies)

    def parameters(self) -> Iterator[Tensor]:
        raise AssertionError("the model's own parameters have no gradients to clip")

    __iter__ = parameters


def wrapped(kind: str, params: list[Tensor]) -> Any:
    return {"model": ModelWithCopies, "list": list, "generator": iter, "tuple": tuple}[kind](params)


def assert_same_grads(left: list[Tensor], right: list[Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        if one.grad is None or other.grad is None:
            assert one.grad is other.grad
        else:
            assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("kind", ["model", "list", "generator", "tuple"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3, math.inf])
@pytest.mark.parametrize("max_norm", [0.25, 2, 1e6, math.inf])
def test_equals_torch_bit_for_bit(kind: str, norm_type: float, max_norm: float) -> None:
    ours, torchs = make_params(), make_params()
    norm = clip_grad_norm_(wrapped(kind, ours), max_norm, norm_type)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(torchs, max_norm, norm_type))
    assert_same_grads(ours, torchs)


def test_single_tensor() -> None:
    ours, torchs = make_params()[0], make_params()[0]
    norm = clip_grad_norm_(ours, 0.5)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(torchs, 0.5))
    assert_same_grads([ours], [torchs])


def test_no_gradients_give_norm_zero() -> None:
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0.0
    assert clip_grad_norm_([], 1.0) == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_norm(value: float) -> None:
    params, untouched = make_params(), make_params()
    for one in (params[1], untouched[1]):
        assert one.grad is not None
        one.grad[2] = value
    with pytest.raises(RuntimeError, match="non-finite") as caught:  # as torch raises it
        clip_grad_norm_(ModelWithCopies(params), 1.0, error_if_nonfinite=True)
    assert isinstance(caught.value, NonFiniteError)
    assert "1 of 4 gradients contain infinity or NaN: those of parameter 1 of shape (5,)." in str(caught.value)
    for one, other in zip(params, untouched, strict=True):
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad.nan_to_num(7.0), other.grad.nan_to_num(7.0))
    assert not math.isfinite(clip_grad_norm_(ModelWithCopies(params), 1.0))


def test_nonfinite_gradients_are_named_and_counted() -> None:
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for param in network.parameters():
        param.grad = torch.full_like(param, math.nan)

    class Named(ModelWithCopies):
        def optim_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
            return network.named_parameters()

    with pytest.raises(NonFiniteError) as caught:
        clip_grad_norm_(Named(list(network.parameters())), 1.0, error_if_nonfinite=True)
    assert "8 of 8 gradients" in str(caught.value)
    assert "those of '3.bias', '3.weight', '2.bias', '2.weight', '1.bias' and 3 more." in str(caught.value)


def test_a_norm_that_overflows_though_its_gradients_are_finite() -> None:
    params = make_params()
    params[3].grad = torch.full((3, 2, 4), 3e38)
    with pytest.raises(NonFiniteError, match=r"the norm overflows: that of parameter 3 .* has values up to 3e\+38"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_other_errors_of_torch_are_raised_as_they_are() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.eye(2).to_sparse()
    for error_if_nonfinite in (False, True):
        with pytest.raises(RuntimeError, match=r"(?i)sparse") as caught:
            clip_grad_norm_([param], 1.0, error_if_nonfinite=error_if_nonfinite)
        assert not isinstance(caught.value, NonFiniteError)


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, math.nan, -math.inf])
def test_max_norm_must_be_positive(max_norm: float) -> None:
    with pytest.raises(ConfigError, match=r"max_norm=.*greater than 0"):
        clip_grad_norm_(make_params(), max_norm)


@pytest.mark.parametrize("max_norm", ["1.0", None, True, [1.0]])
def test_max_norm_must_be_a_number(max_norm: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="pass a number"):
        clip_grad_norm_(make_params(), max_norm)


@pytest.mark.parametrize("wrong", [3, None, nn.Linear(2, 2)])
def test_neither_model_nor_iterable(wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="optim_parameters") as caught:
        clip_grad_norm_(wrong, 1.0)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, RoundPipeError)


@pytest.mark.parametrize("wrong", [nn.Sequential(nn.Linear(2, 2)), list(nn.Linear(2, 2).named_parameters()), "weight"])
def test_elements_that_are_not_tensors_are_named(wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="element 0 is a"):
        clip_grad_norm_(wrong, 1.0)
