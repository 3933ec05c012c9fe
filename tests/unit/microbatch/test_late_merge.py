"""A LateMerge behaves like torch.cat of its microbatches, and gives its microbatches to a RoundPipe."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers_parity import assert_same
from roundpipe.microbatch import RoundPipePackedData
from roundpipe.microbatch.merge import LateMerge, as_microbatches, merge_late, merged_now

SIZES = (2, 1, 3)


class Arrival:
    """An event that fills its value when it is waited for; a read before that gets NaN."""

    def __init__(self, place: Tensor, value: Tensor) -> None:
        self._place, self._value = place, value
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        with torch.no_grad():
            self._place.copy_(self._value)


def leaves(requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator).requires_grad_(requires_grad) for size in SIZES]


def late(values: list[Tensor]) -> LateMerge:
    merged = merge_late(RoundPipePackedData(values))
    assert isinstance(merged, LateMerge)
    return merged


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def add_in_place(x: Tensor) -> Tensor:
    y = x * 1 if x.is_leaf else x
    y += 1
    y[:, 0] = 0
    return y * y


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "a function": lambda x: F.softmax(x, 1).square(),
    "a method": lambda x: x.view(3, 8).tanh(),
    "both sides of an operator": lambda x: 2.0 / (x + 3) - x * x,
    "another operand": lambda x: torch.ones(4) * x,
    "indices": lambda x: x[1:, 0] ** 2,
    "rows": lambda x: torch.stack([row.exp() for row in x]),
    "a list": lambda x: torch.cat([x, torch.zeros(1, 4), x]).cos(),
    "a module": lambda x: nn.GroupNorm(2, 4)(x) * 2,
    "a function of its own": lambda x: Cube.apply(x),
    "a checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
    "another checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    "writes": add_in_place,
    "several": lambda x: x.sin() + x**3 + x.relu(),
    "looking first without grad": lambda x: x * float(x.detach().mean()) + x.sum(),
}


@pytest.mark.parametrize("use", USES)
def test_values_and_gradients_are_those_of_the_merged_tensor(use: str) -> None:
    ours, theirs = leaves(), leaves()
    found, expected = USES[use](late(ours)), USES[use](torch.cat(theirs))
    assert type(found) is Tensor
    assert_same(found.detach(), expected.detach(), use)
    weights = torch.arange(float(found.numel())).view_as(found).cos()
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_same([leaf.grad for leaf in ours], [leaf.grad for leaf in theirs], use)


def test_torch_functions_and_autograd_functions_share_one_gradient() -> None:
    ours, theirs = leaves(), leaves()
    for one in (late(ours), torch.cat(theirs)):
        (one.sin() + Cube.apply(one) + one.relu()).sum().backward()
    for leaf, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_first_read_without_grad_keeps_the_autograd_history(mode: Callable[[], Any]) -> None:
    ours, theirs = leaves(), leaves()
    found, expected = late(ours), torch.cat(theirs)
    with mode():
        assert not (found * 2).requires_grad
        assert_same(found + 0, expected + 0)
    (found**2).sum().backward()
    (expected**2).sum().backward()
    assert_same([leaf.grad for leaf in ours], [leaf.grad for leaf in theirs])


def test_shape_and_type_are_those_of_the_merged_tensor_and_need_no_wait() -> None:
    values = leaves(requires_grad=False)
    places = [torch.full_like(value, float("nan")) for value in values]
    events = [Arrival(place, value) for place, value in zip(places, values, strict=True)]
    found = merge_late(RoundPipePackedData(places, events))
    assert isinstance(found, Tensor)
    assert found.shape == (6, 4)
    assert found.size(0) == len(found) == 6
    assert found.dim() == found.ndim == 2
    assert found.numel() == 24
    assert found.dtype is torch.float32
    assert found.device == torch.device("cpu")
    assert found.is_floating_point()
    assert not found.requires_grad
    assert {found: 1}[found] == 1
    assert all(event.num_waits == 0 for event in events)
    packed = as_microbatches({"x": [found]}, 3)["x"][0]
    assert isinstance(packed, RoundPipePackedData)
    assert all(event.num_waits == 0 for event in events)
    assert_same(found * 1, torch.cat(values))
    assert all(event.num_waits == 1 for event in events)


def test_after_a_read_a_roundpipe_gets_the_merged_tensor() -> None:
    found = late(leaves())
    assert isinstance(as_microbatches(found, 3), RoundPipePackedData)
    assert type(as_microbatches(late(leaves()), 1)) is Tensor
    found.mul_(2)
    whole = as_microbatches(found, 3)
    assert_same(whole.detach(), 2 * torch.cat(leaves()).detach())
    assert merged_now((found,))[0] is whole


def test_an_in_place_write_does_not_reach_a_single_microbatch() -> None:
    (value,) = values = [torch.ones(2, 4)]
    late(values).add_(1)
    assert_same(value, torch.ones(2, 4))


def test_gradients_through_microbatches_and_merged_tensor_add_up() -> None:
    ours, theirs = leaves(), leaves()
    found, expected = late(ours), torch.cat(theirs)
    parts = as_microbatches(found, 3)
    loss = sum((part**3).sum() for part in parts) + (found**2).sum()
    (loss + sum((part.cos()).sum() for part in parts)).backward()
    (sum((part**3).sum() for part in theirs) + (expected**2).sum()).backward(retain_graph=True)
    sum((part.cos()).sum() for part in theirs).backward()
    for leaf, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad)


def test_leaves_without_rows_are_merged_at_once() -> None:
    packed = {
        "loss": RoundPipePackedData([torch.tensor(1.0), torch.tensor(3.0)]),
        "flag": RoundPipePackedData([True, True]),
        "none": RoundPipePackedData([None, None]),
        "rows": (RoundPipePackedData([torch.ones(2, 3), torch.zeros(1, 3)]),),
    }
    found = merge_late(packed)
    assert_same(found["loss"], torch.tensor(2.0))
    assert found["flag"] is True
    assert found["none"] is None
    assert isinstance(found["rows"][0], LateMerge)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), torch.clone])
def test_copies_are_ordinary_tensors(copied: Callable[[Any], Any]) -> None:
    found = copied(late(leaves(requires_grad=False)))
    assert type(found) is Tensor
    assert_same(found, torch.cat(leaves(requires_grad=False)))


def test_item_tolist_and_repr_work() -> None:
    values = leaves(requires_grad=False)
    whole = torch.cat(values)
    assert late(values).tolist() == whole.tolist()
    assert late(values).sum().item() == whole.sum().item()
    assert float(late([torch.ones(1)])) == 1.0
    assert bool(late([torch.ones(1)]))
    assert repr(late(values)) == repr(whole)
    assert late(values).data_ptr()
