"""clip_grad_norm_ gives torch's norm and gradients bit for bit, for models and parameters alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.errors import ArgumentTypeError, ConfigError, RoundPipeError
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
    params = make_params()
    assert params[1].grad is not None
    params[1].grad[2] = value
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(ModelWithCopies(params), 1.0, error_if_nonfinite=True)
    assert not math.isfinite(clip_grad_norm_(ModelWithCopies(params), 1.0))


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
