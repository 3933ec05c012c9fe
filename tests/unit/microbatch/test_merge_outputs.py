"""merge_outputs: automatic, with a spec, with a function; and pack_outputs."""

from __future__ import annotations

import operator
from collections import OrderedDict

import pytest
import torch
from microbatch_nodes import Batch, Box, FakeEvent, FakeModelOutput, Pair

from roundpipe.errors import ArgumentTypeError, MergeError
from roundpipe.microbatch import Chunk, Reducer, Replicate, RoundPipePackedData, merge_outputs, pack_outputs


@pytest.mark.parametrize("merge_output", [None, True])
def test_tensors_are_concatenated_along_dim_0(merge_output) -> None:
    parts = [torch.randn(size, 3) for size in (3, 2, 2)]
    assert torch.equal(merge_outputs(parts, merge_output), torch.cat(parts))


def test_a_single_microbatch_is_returned_unchanged() -> None:
    output = {"x": torch.randn(2, 3), "loss": torch.tensor(1.5), "n": torch.tensor(3), "tag": "t"}
    merged = merge_outputs([output])
    assert merged["x"] is output["x"]
    assert merged["loss"].item() == 1.5
    assert merged["n"].item() == 3
    assert merged["tag"] == "t"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_scalars_are_averaged(dtype) -> None:
    values = [torch.tensor(value, dtype=dtype) for value in (1.0, 2.0, 6.0)]
    merged = merge_outputs(values)
    assert merged.shape == ()
    assert torch.equal(merged, torch.stack(values).mean())


@pytest.mark.parametrize("values", [(3, 3, 3), (True, True)])
def test_equal_integer_scalars_give_the_first(values) -> None:
    merged = merge_outputs([torch.tensor(value) for value in values])
    assert torch.equal(merged, torch.tensor(values[0]))


def test_unequal_integer_scalars_are_refused() -> None:
    with pytest.raises(MergeError, match=r"output\[0\] must be equal .* tensor\(3\) .* tensor\(4\) in microbatch 1"):
        merge_outputs([(torch.tensor(3),), (torch.tensor(4),)])


def test_nested_structures_keep_their_types() -> None:
    def output(start: int):
        x = torch.arange(start, start + 2)
        return [{"a": (x, 1)}, OrderedDict(b=x), Pair(x, "p"), Batch(x, 2.0), Box(x), FakeModelOutput(loss=x), ()]

    merged = merge_outputs([output(0), output(2)])
    assert [type(part) for part in merged] == [dict, OrderedDict, Pair, Batch, Box, FakeModelOutput, tuple]
    plain, ordered, pair, batch, box, model_output, _ = merged
    for part in (plain["a"][0], ordered["b"], pair.left, batch.tokens, box.content, model_output["loss"]):
        assert part.tolist() == [0, 1, 2, 3]
    assert (plain["a"][1], pair.right, batch.scale, box.tag) == (1, "p", 2.0, "box")


def test_dicts_with_keys_in_a_different_order_are_alike() -> None:
    merged = merge_outputs([{"a": torch.tensor([1]), "b": "x"}, {"b": "x", "a": torch.tensor([2])}])
    assert merged["a"].tolist() == [1, 2]
    assert merged["b"] == "x"


class Array:
    """Compares element by element, like a numpy array."""

    shape = (2,)

    def __init__(self, *values: float) -> None:
        self.tensor = torch.tensor(values)

    def __eq__(self, other):
        return self.tensor == other.tensor

    __hash__ = None  # type: ignore[assignment]


class Incomparable:
    def __eq__(self, other):
        raise TypeError("cannot compare")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("left", "right"), [("a", "a"), (None, None), (float("nan"), float("nan")), (Array(1, 2), Array(1, 2)), ({1}, {1})]
)
def test_equal_values_give_the_first(left, right) -> None:
    assert merge_outputs([(left,), (right,)])[0] is left


@pytest.mark.parametrize(
    ("left", "right"),
    [("a", "b"), (1, 2), (1.0, float("nan")), (Array(1, 2), Array(1, 3)), (Incomparable(), Incomparable())],
)
def test_unequal_values_are_refused(left, right) -> None:
    with pytest.raises(MergeError, match=r"output\['x'\] must be equal in all microbatches"):
        merge_outputs([{"x": left}, {"x": left}, {"x": right}])


def test_the_message_shows_the_unequal_values() -> None:
    with pytest.raises(MergeError, match=r"is 'left' in microbatch 0 and 'right' in microbatch 2"):
        merge_outputs(["left", "left", "right"])


def test_the_same_incomparable_object_is_equal_to_itself() -> None:
    thing = Incomparable()
    assert merge_outputs([thing, thing]) is thing


@pytest.mark.parametrize(
    ("first", "other", "path"),
    [
        ((1, 2), (1, 2, 3), "output"),
        ([1], (1,), "output"),
        ({"a": 1}, {"b": 1}, "output"),
        ({"a": (1,)}, {"a": 1}, "output['a']"),
        ({"a": 1}, {"a": (1,)}, "output['a']"),
        ([torch.zeros(2)], [None], "output[0]"),
        ([None], [torch.zeros(2)], "output[0]"),
        (Box(1, "a"), Box(1, "b"), "output"),
        (Pair(1, 2), (1, 2), "output"),
        ({"a": 1}, OrderedDict(a=1), "output"),
    ],
)
def test_different_structures_are_refused(first, other, path) -> None:
    with pytest.raises(MergeError) as caught:
        merge_outputs([first, first, other])
    assert f"different structures at {path}: microbatch 0 " in str(caught.value)
    assert "microbatch 2 " in str(caught.value)


def test_the_message_shows_shapes_that_cannot_be_concatenated() -> None:
    with pytest.raises(MergeError, match=r"output\[0\] cannot .* shapes \(2, 3\), \(2, 4\)"):
        merge_outputs([(torch.zeros(2, 3),), (torch.zeros(2, 4),)])
    with pytest.raises(MergeError, match=r"shapes \(2,\), \(2, 1\)"):
        merge_outputs([torch.zeros(2), torch.zeros(2, 1)])
    with pytest.raises(MergeError, match=r"shapes \(2,\), \(\)"):
        merge_outputs([torch.zeros(2), torch.tensor(0.0)])


def test_scalar_first_and_a_vector_later_is_refused() -> None:
    with pytest.raises(MergeError, match="cannot be concatenated along dim 0"):
        merge_outputs([torch.tensor(0.0), torch.zeros(2)])


def test_gradients_flow_through_the_merge() -> None:
    parts = [torch.randn(2, requires_grad=True) for _ in range(3)]
    losses = [part.sum() for part in parts]
    merged = merge_outputs(list(zip(parts, losses, strict=True)))
    (merged[0].square().sum() + merged[1]).backward()
    for part in parts:
        torch.testing.assert_close(part.grad, 2 * part.detach() + 1 / 3)


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_chunk_concatenates_along_its_dimension(dim: int) -> None:
    parts = [torch.randn(2, 2) for _ in range(3)]
    assert torch.equal(merge_outputs(parts, Chunk(dim)), torch.cat(parts, dim=dim))


@pytest.mark.parametrize("replicate", [Replicate, Replicate()])
def test_replicate_gives_the_first_if_equal(replicate) -> None:
    weights = torch.tensor([1.0, float("nan")])
    assert merge_outputs([weights, weights.clone()], replicate) is weights
    with pytest.raises(MergeError, match=r"output must be equal"):
        merge_outputs([torch.zeros(2), torch.ones(2)], replicate)
    with pytest.raises(MergeError, match=r"output must be equal"):
        merge_outputs([torch.zeros(2), torch.zeros(1, 2)], replicate)


def test_replicate_covers_a_subtree() -> None:
    merged = merge_outputs([{"a": torch.ones(2), "b": 1}] * 2, Replicate)
    assert merged["a"].tolist() == [1.0, 1.0]
    with pytest.raises(MergeError, match=r"output\['a'\] must be equal"):
        merge_outputs([{"a": torch.ones(2)}, {"a": torch.zeros(2)}], Replicate)


def test_reducer_starts_with_its_init_value() -> None:
    merged = merge_outputs([torch.tensor(1.0), torch.tensor(2.0)], Reducer(torch.tensor(10.0), operator.add))
    assert merged.item() == 13.0


def test_reducer_gets_whole_subtrees_in_the_order_of_microbatches() -> None:
    reducer = Reducer("", lambda text, pair: text + pair[0])
    assert merge_outputs([("a", 1), ("b", 2), ("c", 3)], reducer) == "abc"


def test_reducer_that_writes_in_place_does_not_change_its_init_value() -> None:
    adding = Reducer(torch.zeros(()), lambda total, value: total.add_(value))
    gathering = Reducer([], lambda seen, value: seen.append(value) or seen)
    for _ in range(2):
        assert merge_outputs([torch.tensor(1.0)] * 3, adding).item() == 3.0
        assert merge_outputs([1, 2], gathering) == [1, 2]


def test_a_spec_tree_merges_each_part_by_its_own_spec() -> None:
    outputs = [(torch.randn(2, 3), {"loss": torch.tensor(float(i)), "n": 7}, torch.ones(1)) for i in range(3)]
    spec = (Chunk(1), {"n": Replicate, "loss": Reducer(0.0, operator.add)}, None)
    logits, stats, rest = merge_outputs(outputs, spec)
    assert torch.equal(logits, torch.cat([output[0] for output in outputs], dim=1))
    assert stats["loss"].item() == 3.0
    assert stats["n"] == 7
    assert rest.tolist() == [1.0] * 3


def test_chunk_covers_a_subtree() -> None:
    outputs = [{"a": torch.randn(2, 2), "b": [torch.tensor(float(i)), "t"]} for i in range(2)]
    merged = merge_outputs(outputs, Chunk(1))
    assert merged["a"].shape == (2, 4)
    assert merged["b"][0].item() == 0.5
    assert merged["b"][1] == "t"


def test_spec_of_a_different_structure_is_refused() -> None:
    with pytest.raises(MergeError) as caught:
        merge_outputs([(torch.zeros(2), 1)] * 2, (Chunk(0),))
    assert "the merge spec for output does not match it: the spec is (TensorChunkSpec,)" in str(caught.value)
    assert "the output is (Tensor[2], int)" in str(caught.value)
    with pytest.raises(MergeError, match="merge spec for output does not match"):
        merge_outputs([torch.zeros(2)], {"x": Chunk(0)})


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_with_one_tensor_per_item_are_joined(kind: type) -> None:
    """As transformers returns the features of images: the plain model gives one entry per image of the whole batch."""
    images = [torch.full((size, 3), float(size)) for size in (4, 2, 5)]
    outputs = [
        {"features": kind(images[:2]), "deep": [kind(images[:2]), kind(images[:2])]},
        {"features": kind(images[2:]), "deep": [kind(images[2:]), kind(images[2:])]},
    ]
    merged = merge_outputs(outputs)
    for joined in (merged["features"], *merged["deep"]):
        assert type(joined) is kind
        assert all(found is image for found, image in zip(joined, images, strict=True))
    assert merge_outputs([[], images])[2] is images[2]  # a microbatch without images


def test_lists_per_layer_are_merged_layer_by_layer() -> None:
    merged = merge_outputs([[torch.zeros(1), torch.ones(1)], [torch.zeros(2), torch.ones(2)]])
    assert [layer.tolist() for layer in merged] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("other", [[torch.zeros(1), None], [torch.zeros(1), 3], (torch.zeros(1),) * 2])
def test_lists_of_anything_but_tensors_are_not_joined(other: object) -> None:
    with pytest.raises(MergeError, match="different structures at output"):
        merge_outputs([[torch.zeros(1)], other])


def test_chunk_needs_tensors_of_that_dimension() -> None:
    with pytest.raises(MergeError, match=r"Chunk\(0\) for output, which is no tensor but str"):
        merge_outputs(["a", "b"], Chunk(0))
    with pytest.raises(MergeError, match=r"along dim 0: its shape \(\) has 0 dimension"):
        merge_outputs([torch.tensor(1.0)] * 2, Chunk(0))
    with pytest.raises(MergeError, match=r"along dim 2: its shape \(2, 2\)"):
        merge_outputs([torch.zeros(2, 2)] * 2, Chunk(2))
    with pytest.raises(MergeError, match="different structures at output"):
        merge_outputs([torch.zeros(2), None], Chunk(0))


def test_function_gets_the_list_of_outputs() -> None:
    outputs = (FakeModelOutput(logits=torch.zeros(2)), FakeModelOutput(logits=torch.ones(1)))
    merged = merge_outputs(outputs, lambda parts: (type(parts), torch.cat([part["logits"] for part in parts])))
    assert merged[0] is list
    assert merged[1].tolist() == [0.0, 0.0, 1.0]


def test_errors_of_functions_keep_their_type_and_get_a_note() -> None:
    def broken(*_):
        raise ZeroDivisionError("boom")

    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        merge_outputs([1, 2], broken)
    assert caught.value.__notes__ == [f"in merge_output function {broken.__qualname__}"]
    with pytest.raises(ZeroDivisionError) as caught:
        merge_outputs([(1,), (2,)], (Reducer(0, broken),))
    assert caught.value.__notes__ == [f"in Reducer for output[0] function {broken.__qualname__}"]


def test_no_outputs_and_invalid_specs_are_refused() -> None:
    with pytest.raises(MergeError, match="no microbatch outputs"):
        merge_outputs([])
    with pytest.raises(ArgumentTypeError, match="merge_output is str 'sum'"):
        merge_outputs([1], "sum")


def test_packing_keeps_the_structure_and_the_events() -> None:
    events = [FakeEvent(), None]
    outputs = [{"x": (torch.zeros(1), "a")}, {"x": (torch.ones(2), "b")}]
    packed = pack_outputs(outputs, events)
    tensors, texts = packed["x"]
    assert type(tensors) is type(texts) is RoundPipePackedData
    assert [tensor.tolist() for tensor in tensors] == [[0.0], [1.0, 1.0]]
    assert texts == ["a", "b"]
    assert tensors.events[0] is texts.events[0] is events[0]
    assert tensors.events[1] is None
    assert events[0].waits == 0


def test_packing_refuses_different_structures() -> None:
    with pytest.raises(MergeError, match="different structures at output"):
        pack_outputs([(1,), (1, 2)], [None, None])


def test_merge_output_false_packs_values_that_have_arrived() -> None:
    packed = merge_outputs([1, 2], False)
    assert type(packed) is RoundPipePackedData
    assert packed == [1, 2]
    assert packed.events == [None, None]
