"""split_call with specs: each leaf is split by its spec, and specs that do not match are refused."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest
import torch
from microbatch_nodes import Batch, Box, FakeModelOutput, Pair

from roundpipe.errors import ArgumentTypeError, SplitError
from roundpipe.microbatch import Chunk, MicrobatchInputs, Replicate, RoundPipePackedData, split_call


def split_args(args, args_spec, num_microbatch: int = 3) -> tuple[tuple, ...]:
    return split_call(args, {}, None, num_microbatch=num_microbatch, split_input=(args_spec, None)).args


def split_kwargs(kwargs, kwargs_spec) -> tuple[dict, ...]:
    return split_call((), kwargs, None, num_microbatch=3, split_input=(None, kwargs_spec)).kwargs


def split_label(label, spec) -> MicrobatchInputs:
    return split_call((), {}, label, num_microbatch=3, split_label=spec)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_chunk_splits_along_its_dimension(dim: int) -> None:
    x = torch.randn(7, 8, 9)
    pieces = [args[0] for args in split_args((x,), (Chunk(dim),))]
    assert all(torch.equal(a, b) for a, b in zip(pieces, x.tensor_split(3, dim=dim), strict=True))


@pytest.mark.parametrize("replicate", [Replicate, Replicate()])
def test_replicate_gives_the_same_tensor_to_all(replicate) -> None:
    x, weights = torch.randn(6, 2), torch.randn(5)
    for args in split_args((x, weights), (Chunk(0), replicate)):
        assert args[1] is weights


def test_args_and_kwargs_specs_may_each_be_automatic() -> None:
    x, y = torch.randn(6, 2), torch.randn(2, 6)
    by_kwargs = split_call((x,), {"y": y}, None, num_microbatch=3, split_input=(None, {"y": Chunk(1)}))
    assert [args[0].shape for args in by_kwargs.args] == [(2, 2)] * 3
    assert [kwargs["y"].shape for kwargs in by_kwargs.kwargs] == [(2, 2)] * 3
    by_args = split_call((y,), {"x": x}, None, num_microbatch=3, split_input=([Chunk(1)], None))
    assert [kwargs["x"].shape for kwargs in by_args.kwargs] == [(2, 2)] * 3


def test_none_in_a_spec_is_automatic() -> None:
    first, second = torch.randn(6), [torch.randn(6), "text"]
    for args in split_args((first, second), (Chunk(0), None)):
        assert args[1][0].shape == (2,)
        assert args[1][1] == "text"


def test_nested_spec_matches_nested_input() -> None:
    x, w = torch.randn(6, 2), torch.randn(4)
    args = ({"a": [x, w]}, Pair(w, x), Batch(x, w), Box(x), OrderedDict(k=w), FakeModelOutput(o=x))
    spec = (
        {"a": (Chunk(0), Replicate)},
        (Replicate, Chunk(0)),
        Batch(Chunk(0), Replicate),
        Box(Chunk(0)),
        {"k": Replicate},
        {"o": Chunk(0)},
    )
    for index, pieces in enumerate(split_args(args, spec)):
        expected = x[2 * index : 2 * index + 2]
        cut = (pieces[0]["a"][0], pieces[1].right, pieces[2].tokens, pieces[3].content, pieces[5]["o"])
        whole = (pieces[0]["a"][1], pieces[1].left, pieces[2].scale, pieces[4]["k"])
        assert all(torch.equal(piece, expected) for piece in cut)
        assert all(piece is w for piece in whole)


def test_kwargs_spec_may_be_in_a_different_order() -> None:
    a, b = torch.randn(6, 2), torch.randn(2, 6)
    for kwargs in split_kwargs({"a": a, "b": b}, {"b": Chunk(1), "a": Chunk(0)}):
        assert list(kwargs) == ["a", "b"]
        assert kwargs["a"].shape == kwargs["b"].shape == (2, 2)


def test_a_leaf_spec_matches_a_label_that_is_a_tensor() -> None:
    label = torch.arange(12).view(2, 6)
    labels = split_label(label, Chunk(1)).labels
    assert all(torch.equal(a, b) for a, b in zip(labels, label.tensor_split(3, dim=1), strict=True))
    assert split_label(label, Replicate).labels[2] is label


def test_replicate_covers_a_whole_subtree() -> None:
    cache = {"k": torch.randn(5), "v": [torch.randn(4)]}
    for args in split_args((torch.randn(6), cache), (Chunk(0), Replicate)):
        assert args[1]["k"] is cache["k"]
        assert args[1]["v"][0] is cache["v"][0]


def test_chunk_covers_every_tensor_of_a_subtree() -> None:
    tree = {"a": torch.randn(2, 6), "b": [torch.randn(3, 6), "text", torch.tensor(1.0)]}
    for args in split_args((tree,), (Chunk(1),)):
        assert args[0]["a"].shape == (2, 2)
        assert args[0]["b"][0].shape == (3, 2)
        assert args[0]["b"][1] == "text"
        assert args[0]["b"][2].item() == 1.0


def test_chunk_needs_a_tensor() -> None:
    with pytest.raises(SplitError, match=r"Chunk\(0\) for args\[1\], which is no tensor but int; use Replicate"):
        split_args((torch.zeros(3), 5), (Chunk(0), Chunk(0)))
    with pytest.raises(SplitError, match=r"args\[0\], but \{'a': int\} holds no tensor"):
        split_args(({"a": 1},), (Chunk(0),))


@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 2), ((3, 4), -3), ((), 0)])
def test_dimension_out_of_range_is_refused(shape, dim) -> None:
    with pytest.raises(SplitError) as caught:
        split_args((torch.zeros(shape),), (Chunk(dim),))
    assert f"Chunk({dim}) for args[0], but its shape {shape} has {len(shape)} dimension(s)" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "path", "shown"),
    [
        ((Chunk(0),), "args", "(TensorChunkSpec,)"),
        ((Chunk(0), Replicate, Replicate), "args", "(TensorChunkSpec, _Replicate, _Replicate)"),
        ((Chunk(0), {"b": Chunk(0)}), "args[1]", "{'b': TensorChunkSpec}"),
        ((Chunk(0), (Chunk(0),)), "args[1]", "(TensorChunkSpec,)"),
        (((Chunk(0),), None), "args[0]", "(TensorChunkSpec,)"),
    ],
)
def test_spec_of_a_different_structure_is_refused(spec, path, shown) -> None:
    with pytest.raises(SplitError) as caught:
        split_args((torch.zeros(4, 3), {"a": torch.zeros(4)}), spec)
    assert f"the spec for {path} does not match it: the spec is {shown}" in str(caught.value)
    value = {"args": "(Tensor[4, 3], {'a': Tensor[4]})", "args[0]": "Tensor[4, 3]", "args[1]": "{'a': Tensor[4]}"}
    assert f"the value is {value[path]}" in str(caught.value)


def test_none_in_a_dataclass_spec_is_automatic() -> None:
    for spec in (Batch(None, Chunk(1)), Batch(None, None)):
        batch = Batch(torch.zeros(6, 2), torch.zeros(6, 6))
        assert [args[0].tokens.shape for args in split_args((batch,), (spec,))] == [(2, 2)] * 3


def test_dataclass_spec_for_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(
        SplitError, match=r"the spec is Batch\(tokens=_Replicate, scale=_Replicate\), the value is Batch"
    ):
        split_args((Batch(torch.zeros(6), None),), (Batch(Replicate, Replicate),))


def test_spec_with_too_few_children_of_a_registered_node_is_refused() -> None:
    queue = deque([torch.zeros(4), torch.zeros(4)])
    with pytest.raises(SplitError, match="does not match"):
        split_args((queue,), (deque([Chunk(0)]),))
    assert split_args((queue,), (deque([Chunk(0), Chunk(0)]),), num_microbatch=2)[0][0][1].shape == (2,)


def test_a_list_does_not_match_a_registered_node() -> None:
    with pytest.raises(SplitError, match=r"the spec is \[TensorChunkSpec\], the value is Box"):
        split_args((Box(torch.zeros(4)),), ([Chunk(0)],))


@pytest.mark.parametrize("spec", [Box((Chunk(0),)), Batch(Chunk(0), None), {"a": Chunk(0)}])
def test_spec_of_a_different_node_type_is_refused(spec) -> None:
    with pytest.raises(SplitError, match="does not match"):
        split_args((Pair(torch.zeros(4), 1),), (spec,))


@pytest.mark.parametrize("spec", [{}, {"mask": Chunk(0), "x": Chunk(0)}, {"x": Chunk(0)}])
def test_unknown_and_missing_kwargs_are_refused(spec) -> None:
    with pytest.raises(SplitError, match="the spec for kwargs does not match"):
        split_kwargs({"mask": torch.zeros(4)}, spec)


def test_label_spec_of_a_different_structure_is_refused() -> None:
    with pytest.raises(SplitError, match=r"the spec for label does not match it: .* the value is Tensor"):
        split_label(torch.zeros(4), (Chunk(0),))


def test_one_leaf_spec_for_all_arguments_is_refused() -> None:
    with pytest.raises(SplitError, match="one spec per positional argument"):
        split_args((torch.zeros(4),), Chunk(0))


def test_chunked_sizes_must_agree() -> None:
    with pytest.raises(SplitError) as caught:
        split_args((torch.zeros(4, 6), torch.zeros(4, 5)), (Chunk(0), Chunk(1)))
    assert "args[0] of shape (4, 6) has 4 along dim 0" in str(caught.value)
    assert "args[1] of shape (4, 5) has 5 along dim 1" in str(caught.value)


def test_explicit_chunk_of_one_element_is_not_replicated() -> None:
    with pytest.raises(SplitError, match="differ in batch size"):
        split_args((torch.zeros(4), torch.zeros(1)), (Chunk(0), Chunk(0)))


def test_spec_and_automatic_parts_must_agree() -> None:
    with pytest.raises(SplitError, match=r"args\[0\] of shape \(4, 6\) has 6 along dim 1, label of shape \(4,\)"):
        split_call((torch.zeros(4, 6),), {}, torch.zeros(4), num_microbatch=2, split_input=((Chunk(1),), None))


def test_small_chunked_size_gives_fewer_microbatches() -> None:
    assert len(split_args((torch.zeros(9, 2),), (Chunk(1),), num_microbatch=5)) == 2


def test_empty_chunked_dimension_is_refused() -> None:
    with pytest.raises(SplitError, match="has 0 along dim 1"):
        split_args((torch.zeros(9, 0),), (Chunk(1),))


@pytest.mark.parametrize("spec", [Chunk(0), Replicate, None])
def test_packed_elements_are_the_microbatches_with_any_spec(spec) -> None:
    assert split_args((RoundPipePackedData("ab"),), (spec,)) == (("a",), ("b",))


def test_packed_leaf_inside_a_chunked_subtree() -> None:
    tree = {"h": RoundPipePackedData("ab"), "x": torch.arange(4)}
    first, second = split_args((tree,), (Chunk(0),))
    assert (first[0]["h"], second[0]["h"]) == ("a", "b")
    assert second[0]["x"].tolist() == [2, 3]


def test_spec_inside_packed_data_is_refused() -> None:
    with pytest.raises(SplitError, match="RoundPipePackedData of 2"):
        split_args((RoundPipePackedData("ab"),), ([Chunk(0), Chunk(0)],))


def test_split_call_refuses_invalid_specs() -> None:
    with pytest.raises(ArgumentTypeError, match=r"split_input\[0\]\[0\] is int 0"):
        split_args((torch.zeros(3),), (0,))
    with pytest.raises(ArgumentTypeError, match="split_label is int 0"):
        split_label(torch.zeros(3), 0)
