"""For any nested input: merging its microbatches returns it, pieces are even, gradients reach every element."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from microbatch_nodes import Batch, Box, FakeModelOutput, Pair
from torch.utils import _pytree as pytree

from roundpipe.microbatch import Chunk, RoundPipePackedData, merge_outputs, pack_outputs, split_call

unhurried = settings(deadline=None, max_examples=60)

NUM_MICROBATCH = st.integers(1, 9)
KEYS = st.text("abc", min_size=1, max_size=2)


def tensors(batch: int) -> st.SearchStrategy[torch.Tensor]:
    rests = st.lists(st.integers(0, 3), max_size=2)
    return rests.map(lambda rest: torch.randn(batch, *rest))


def trees(batch: int) -> st.SearchStrategy[Any]:
    leaves = st.one_of(tensors(batch), st.integers(), st.none(), st.text(max_size=2), st.booleans())
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
            st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
            st.dictionaries(KEYS, inner, max_size=3).map(FakeModelOutput),
            st.builds(Pair, inner, inner),
            st.builds(Batch, inner, inner),
            st.builds(Box, inner),
        ),
        max_leaves=8,
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, tuple[Any, ...], dict[str, Any], Any]:
    batch = draw(st.integers(2, 12))
    args = (torch.randn(batch), *draw(st.lists(trees(batch), max_size=2)))
    return batch, args, draw(st.dictionaries(KEYS, trees(batch), max_size=2)), draw(trees(batch))


def assert_same(left: Any, right: Any) -> None:
    left_leaves, left_structure = pytree.tree_flatten(left)
    right_leaves, right_structure = pytree.tree_flatten(right)
    assert left_structure == right_structure
    for a, b in zip(left_leaves, right_leaves, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@unhurried
@given(calls(), NUM_MICROBATCH)
def test_split_then_merge_is_the_identity(call, num_microbatch: int) -> None:
    batch, args, kwargs, label = call
    batches = split_call(args, kwargs, label, num_microbatch=num_microbatch)
    assert len(batches) == len(batches.kwargs) == len(batches.labels) == min(batch, num_microbatch)
    assert_same(merge_outputs(batches.args), args)
    assert_same(merge_outputs(batches.kwargs), kwargs)
    assert_same(merge_outputs(batches.labels), label)


@unhurried
@given(st.integers(1, 30), NUM_MICROBATCH)
def test_chunks_are_even_and_never_empty(batch: int, num_microbatch: int) -> None:
    batches = split_call((torch.zeros(batch, 2),), {}, None, num_microbatch=num_microbatch)
    sizes = [piece.shape[0] for (piece,) in batches.args]
    assert len(sizes) == min(batch, num_microbatch)
    assert sum(sizes) == batch
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@unhurried
@given(st.integers(1, 4), st.integers(1, 12), st.integers(-2, 1), NUM_MICROBATCH)
def test_split_and_merge_along_a_dimension_is_the_identity(other: int, size: int, dim: int, count: int) -> None:
    x = torch.randn((size, other) if dim in (0, -2) else (other, size))
    labels = split_call((), {}, x, num_microbatch=count, split_label=Chunk(dim)).labels
    assert len(labels) == min(size, count)
    assert torch.equal(merge_outputs(labels, Chunk(dim)), x)


@unhurried
@given(st.integers(1, 12), NUM_MICROBATCH)
def test_gradients_reach_every_element_once(batch: int, num_microbatch: int) -> None:
    x = torch.randn(batch, 2, requires_grad=True)
    batches = split_call(({"x": x},), {}, None, num_microbatch=num_microbatch)
    merge_outputs([args[0]["x"].square() for args in batches.args]).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


@unhurried
@given(calls(), NUM_MICROBATCH)
def test_packed_outputs_enter_the_next_call_unchanged(call, num_microbatch: int) -> None:
    _, args, _, label = call
    first = split_call(args, {}, label, num_microbatch=num_microbatch)
    packed = pack_outputs(first.args, [None] * len(first))
    assert all(
        isinstance(leaf, RoundPipePackedData)
        for leaf in pytree.tree_leaves(packed, is_leaf=lambda part: isinstance(part, RoundPipePackedData))
    )
    second = split_call(packed, {}, None, num_microbatch=99)
    assert len(second) == len(first)
    assert_same(second.args, first.args)
