"""split_call with the user's split functions: they determine the number of microbatches."""

from __future__ import annotations

import pytest
import torch
from microbatch_nodes import FakeEvent

from roundpipe.errors import SplitError
from roundpipe.microbatch import Arriving, Chunk, RoundPipePackedData, split_call


def into(count: int, asked: list[int] | None = None):
    """A split_input function that splits the first argument into `count` pieces and records its arguments."""

    def split_input(args, kwargs, num_microbatch):
        if asked is not None:
            asked.append(num_microbatch)
        return [(piece,) for piece in args[0].tensor_split(count)], [kwargs] * count

    return split_input


def call(split_input=None, label_fn=None, *, args=(torch.arange(12),), label=None, num_microbatch=4, **kwargs):
    return split_call(args, kwargs, label, num_microbatch=num_microbatch, split_input=split_input, split_label=label_fn)


def test_function_is_given_the_call_and_its_result_is_used() -> None:
    batches = call(into(4), scale=2.0)
    assert [args[0].tolist() for args in batches.args] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert batches.kwargs == ({"scale": 2.0},) * 4
    assert batches.labels == (None,) * 4


def test_chunk_example_of_the_documentation() -> None:
    def custom_split(args, kwargs, num_microbatch):
        images, masks = args
        return list(zip(images.chunk(num_microbatch), masks.chunk(num_microbatch), strict=True)), [
            kwargs
        ] * num_microbatch

    images, masks = torch.randn(8, 3), torch.randn(8)
    batches = call(custom_split, args=(images, masks))
    assert all(torch.equal(args[0], x) for args, x in zip(batches.args, images.chunk(4), strict=True))
    assert all(torch.equal(args[1], m) for args, m in zip(batches.args, masks.chunk(4), strict=True))


def test_functions_may_return_lists_or_tuples() -> None:
    batches = call(lambda args, kwargs, n: (([1], [2]), ({"a": 1}, {"a": 2})))
    assert batches.args == ((1,), (2,))
    assert batches.kwargs == ({"a": 1}, {"a": 2})


def test_automatic_label_follows_the_input_function() -> None:
    batches = call(into(3), label=torch.arange(12))
    assert [label.tolist() for label in batches.labels] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_spec_label_follows_the_input_function() -> None:
    label = torch.randn(2, 12)
    batches = call(into(3), Chunk(1), label=label)
    assert all(torch.equal(a, b) for a, b in zip(batches.labels, label.tensor_split(3, dim=1), strict=True))


def test_automatic_input_follows_the_label_function() -> None:
    batches = call(None, lambda label, n: [label] * 6, label="y")
    assert [args[0].tolist() for args in batches.args] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert batches.labels == ("y",) * 6


def test_label_function_may_return_the_tuple_of_chunk() -> None:
    label = torch.arange(8)
    assert [piece.tolist() for piece in call(None, torch.chunk, label=label).labels] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_functions_receive_the_number_that_the_rest_of_the_call_yields() -> None:
    asked: list[int] = []
    call(into(2, asked), args=(torch.arange(2),), label=torch.arange(2))
    call(None, lambda label, n: asked.append(n) or [label] * n, args=(torch.arange(3),))
    call(into(3, asked), lambda label, n: asked.append(n) or [label] * n)
    assert asked == [2, 3, 4, 3]


def test_with_a_packed_label_the_function_receives_its_length() -> None:
    asked: list[int] = []
    assert call(into(2, asked), label=RoundPipePackedData("ab")).labels == ("a", "b")
    assert asked == [2]


def test_packed_label_of_a_different_length_is_refused() -> None:
    with pytest.raises(SplitError, match="returned 3 microbatches but packed data in the same call brings 2"):
        call(into(3), label=RoundPipePackedData("ab"))


def test_packed_data_returned_as_labels_keeps_its_events() -> None:
    event = FakeEvent()
    labels = call(None, lambda label, n: label, label=RoundPipePackedData("ab", [None, event])).labels
    assert labels == ("a", Arriving("b", event))
    assert event.waits == 0


def test_the_message_shows_different_counts() -> None:
    with pytest.raises(SplitError, match="args: 2, kwargs: 3, label: 4"):
        call(lambda args, kwargs, n: ([(1,)] * 2, [{}] * 3), lambda label, n: [0] * 4)
    with pytest.raises(SplitError, match="args: 2, kwargs: 3, label: as many"):
        call(lambda args, kwargs, n: ([(1,)] * 2, [{}] * 3))
    with pytest.raises(SplitError, match="args: 2, kwargs: 2, label: 5"):
        call(into(2), lambda label, n: [0] * 5)


def test_no_microbatch_is_refused() -> None:
    with pytest.raises(SplitError, match="args, kwargs returned no microbatch"):
        call(lambda args, kwargs, n: ([], []))
    with pytest.raises(SplitError, match="label returned no microbatch"):
        call(None, lambda label, n: [])
    with pytest.raises(SplitError, match="args, kwargs, label returned no microbatch"):
        call(lambda args, kwargs, n: ([], []), lambda label, n: [])


def test_label_function_never_receives_zero() -> None:
    asked: list[int] = []
    with pytest.raises(SplitError, match="args: 0, kwargs: 0, label: 4"):
        call(lambda args, kwargs, n: ([], []), lambda label, n: asked.append(n) or [label] * n)
    assert asked == [4]


@pytest.mark.parametrize("result", [None, [], ([(1,)],), (1, 2), ([(1,)], None), torch.zeros(2), ((), (), ())])
def test_input_function_must_return_two_lists(result) -> None:
    with pytest.raises(SplitError, match=r"split_input must return \(args_list, kwargs_list\)"):
        call(lambda args, kwargs, n: result)


def test_entries_of_args_must_be_tuples() -> None:
    with pytest.raises(SplitError, match=r"args_list\[1\] = Tensor\[6\]; each entry must be the tuple"):
        call(lambda args, kwargs, n: ([(), torch.zeros(6)], [{}, {}]))


def test_entries_of_kwargs_must_be_dicts() -> None:
    with pytest.raises(SplitError, match=r"kwargs_list\[0\] = None; each entry must be the dict"):
        call(lambda args, kwargs, n: ([()], [None]))


@pytest.mark.parametrize("result", [None, torch.zeros(4), "abcd", {0: 1}])
def test_label_function_must_return_a_list(result) -> None:
    with pytest.raises(SplitError, match="split_label must return a list"):
        call(None, lambda label, n: result)


def test_label_too_small_to_follow_is_refused() -> None:
    with pytest.raises(SplitError, match=r"returned 3 microbatches, .*too small.*label of shape \(2,\) has 2"):
        call(into(3), label=torch.zeros(2))
    with pytest.raises(SplitError, match=r"label of shape \(1, 5\) has 1"):
        call(into(3), label=torch.zeros(1, 5))


def test_errors_of_functions_keep_their_type_and_get_a_note() -> None:
    def broken(*_):
        raise KeyError("mask")

    with pytest.raises(KeyError, match="mask") as caught:
        call(broken)
    assert caught.value.__notes__ == [f"in split_input function {broken.__qualname__}"]
    with pytest.raises(KeyError) as caught:
        call(None, broken)
    assert caught.value.__notes__ == [f"in split_label function {broken.__qualname__}"]


def test_gradients_flow_through_a_function() -> None:
    x = torch.randn(6, requires_grad=True)
    for args in call(into(2), args=(x,)).args:
        args[0].square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
