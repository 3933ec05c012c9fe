"""Nested values are walked, compared and stored as templates, for all kinds of containers."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.split.values import (
    Held,
    Outline,
    containers_in,
    content_of,
    equal,
    fill,
    filled_in,
    is_changed,
    is_plain,
    leaves_of,
    map_leaves,
    may_hold_containers,
    placeholder,
    structure_of,
    tensors_of,
)

Point = namedtuple("Point", ["x", "y"])
CPU = torch.device("cpu")
NAN = float("nan")

NESTED: dict[str, Any] = {
    "leaf": 1,
    "none": None,
    "tuple": (1, 2, (3,)),
    "list": [1, [2], []],
    "dict": {"a": 1, "b": {"c": 2}},
    "ordered": OrderedDict(b=1, a=2),
    "user": UserDict({"a": 1, "b": [2, 3]}),
    "named": Point(1, Point(2, 3)),
    "slice": (slice(1, 2), "text", True, 2.5),
    "mixed": ({"a": [1, (2, None)]}, UserDict(x=Point(4, 5))),
}


class SharedDict(UserDict[str, Any]):
    """A subclass, as in transformers since 5.23."""


@pytest.mark.parametrize("kind", NESTED)
def test_mapping_by_the_identity_gives_equal_values_in_new_containers(kind: str) -> None:
    value = NESTED[kind]
    same = map_leaves(lambda leaf: leaf, value)
    assert same == value
    assert type(same) is type(value)
    for new, old in zip(containers_in(same), containers_in(value), strict=True):
        assert new is not old


@pytest.mark.parametrize("kind", NESTED)
def test_every_leaf_is_visited_once_and_in_order(kind: str) -> None:
    value = NESTED[kind]
    seen: list[Any] = []
    map_leaves(seen.append, value)
    assert leaves_of(value) == seen
    numbered = map_leaves(lambda leaf: seen.index(leaf), value)
    assert sorted(leaves_of(numbered)) == sorted(seen.index(leaf) for leaf in seen)


def test_leaves_come_in_the_order_of_their_containers() -> None:
    assert leaves_of({"b": 1, "a": (2, [3, {"c": 4}])}) == [1, 2, 3, 4]
    assert leaves_of(OrderedDict(b=1, a=2)) == [1, 2]


def test_parameters_outlines_and_held_are_leaves() -> None:
    param = nn.Parameter(torch.ones(2))
    held, outline = Held(("in", 0)), Outline.of(param)
    found = leaves_of([param, held, outline])
    assert [id(leaf) for leaf in found] == [id(param), id(held), id(outline)]
    assert [id(tensor) for tensor in tensors_of((param, 3, {"x": held}))] == [id(param)]


def test_structures_are_equal_where_leaves_can_be_compared_one_by_one() -> None:
    assert structure_of((1, {"a": torch.ones(2)})) == structure_of((None, {"a": "text"}))
    assert structure_of([1, 2]) != structure_of([1])
    assert structure_of([1, 2]) != structure_of((1, 2))
    assert structure_of({"a": 1}) != structure_of({"b": 1})


@pytest.mark.parametrize("kind", NESTED)
def test_a_template_is_filled_with_its_tensors(kind: str) -> None:
    tensors = {("in", i): torch.full((2,), float(i)) for i in range(12)}
    template = map_leaves(lambda leaf: Held(("in", leaf)) if type(leaf) is int else leaf, NESTED[kind])
    expected = map_leaves(lambda leaf: tensors["in", leaf] if type(leaf) is int else leaf, NESTED[kind])
    found = filled_in(template, tensors)
    assert structure_of(found) == structure_of(expected)
    assert [id(leaf) for leaf in tensors_of(found)] == [id(leaf) for leaf in tensors_of(expected)]


# Equality.


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 1e-7]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor(1.0), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([complex(NAN, 1)]), torch.tensor([complex(NAN, 1)]), True),
        (nn.Parameter(torch.ones(2)), torch.ones(2), True),
        (3, 3, True),
        (3, 4, False),
        (3, 3.0, False),
        (True, 1, False),
        ("a", "b", False),
        (None, None, True),
        (None, 0, False),
        (torch.float32, torch.float16, False),
        (slice(1, 2), slice(1, 2), True),
        (torch.ones(1), 1, False),
    ],
)
def test_leaves_are_compared_bit_by_bit(left: Any, right: Any, expected: bool) -> None:
    assert equal(left, right) is expected
    assert equal(right, left) is expected


def test_objects_of_unknown_classes_are_compared_by_type() -> None:
    assert equal(nn.Linear(1, 1), nn.Linear(2, 2))
    assert not equal(nn.Linear(1, 1), nn.Tanh())


def test_plain_values_are_immutable_and_hold_no_tensor() -> None:
    assert all(map(is_plain, (1, 2.5, "x", b"x", None, True, torch.float32, CPU, torch.Size([1]), range(3), slice(2))))
    assert not any(map(is_plain, (torch.ones(1), [1], {}, nn.Tanh(), object())))


# Placeholders.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_a_placeholder_has_shape_and_dtype_and_one_number(dtype: torch.dtype) -> None:
    dead = placeholder(Outline(torch.Size([1000, 1000]), dtype), CPU)
    assert (dead.shape, dead.dtype) == (torch.Size([1000, 1000]), dtype)
    assert dead.untyped_storage().nbytes() == dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        assert bool(dead.isnan().all())
        assert bool((dead[0] + 1).isnan().all())
    else:
        assert not dead.any()


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "zero_": lambda dead: dead.zero_(),
    "fill_": lambda dead: dead.fill_(0.0),
    "masked_fill_": lambda dead: dead.masked_fill_(torch.ones(dead.shape, dtype=torch.bool), 0.0),
    "copy_": lambda dead: dead.copy_(torch.zeros(dead.shape)),
    "mul_": lambda dead: dead.mul_(0.0),
}


@pytest.mark.parametrize("shape", [(2, 2), (1,), ()], ids=str)
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
def test_writing_to_a_placeholder_does_not_change_others(shape: tuple[int, ...], how: str) -> None:
    """The model's code may write to them: other placeholders stay NaN, and their version counters stay the same."""
    outline = Outline(torch.Size(shape), torch.float64)
    written, other = placeholder(outline, CPU), placeholder(outline, CPU)
    version = other._version
    try:
        with contextlib.suppress(RuntimeError):
            WRITES[how](written)
        assert bool(other.isnan().all())
        assert bool(placeholder(outline, CPU).isnan().all())
        assert other._version == version
    finally:
        written.fill_(NAN)


def test_a_placeholder_made_under_inference_mode_can_be_used_outside() -> None:
    outline = Outline(torch.Size([3]), torch.float16)
    with torch.inference_mode():
        placeholder(outline, CPU)
    leaf = torch.ones(3, dtype=torch.float16, requires_grad=True)
    (leaf * placeholder(outline, CPU)).sum().backward()
    assert leaf.grad is not None


# Containers.


def test_containers_are_found_outermost_first_and_inside_tuples() -> None:
    inner, listed = {"c": 1}, [2]
    value = ({"a": inner, "b": (listed,)}, 3)
    assert [id(container) for container in containers_in(value)] == [id(value[0]), id(inner), id(listed)]
    user = SharedDict(x=[1])
    assert [id(container) for container in containers_in(user)] == [id(user), id(user["x"])]


@pytest.mark.parametrize("value", [1, None, torch.ones(2), "text", (1, (2, torch.ones(1)))])
def test_values_without_containers_are_recognised(value: Any) -> None:
    assert containers_in(value) == []
    assert not may_hold_containers(value)


@pytest.mark.parametrize("value", [[], {}, ([],), (1, ({},)), UserDict(), OrderedDict(), Point(1, [])])
def test_values_that_may_hold_containers_are_recognised(value: Any) -> None:
    assert may_hold_containers(value)


A, B = torch.ones(1), torch.ones(1)


@pytest.mark.parametrize(
    ("container", "change", "changed"),
    [
        ({"a": A}, lambda c: None, False),
        ({"a": A}, lambda c: c.update(a=A), False),
        ({"a": A}, lambda c: c.update(a=B), True),
        ({"a": A}, lambda c: c.update(b=B), True),
        ({"a": A, "b": B}, lambda c: c.pop("a"), True),
        ({"a": A, "b": B}, lambda c: c.update(a=c.pop("a")), True),
        ([A], lambda c: c.append(B), True),
        ([A, B], lambda c: c.reverse(), True),
        ([A, B], lambda c: c.__setitem__(0, A), False),
        (UserDict(a=A), lambda c: c.update(a=B), True),
        (SharedDict(a=A), lambda c: c.update(a=B), True),
        (OrderedDict(a=A, b=B), lambda c: c.move_to_end("a"), True),
    ],
)
def test_a_container_is_changed_if_it_holds_other_objects_or_in_another_order(
    container: Any, change: Any, changed: bool
) -> None:
    before = content_of(container)
    change(container)
    assert is_changed(container, before) is changed


@pytest.mark.parametrize("container", [{"a": 1, "b": 2}, [1, 2], SharedDict(a=1), OrderedDict(b=1, a=2)])
def test_the_content_of_a_container_can_be_restored(container: Any) -> None:
    before = content_of(container)
    same = container
    fill(container, type(before)())
    assert len(container) == 0
    fill(container, before)
    assert container is same
    assert not is_changed(container, before)
