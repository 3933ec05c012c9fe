"""split_call without specs: tensors are split evenly along dim 0 and must have the same batch size."""

from __future__ import annotations

import logging
from collections import OrderedDict

import pytest
import torch
from microbatch_nodes import Batch, Box, FakeEvent, FakeModelOutput, Pair

from roundpipe.errors import ConfigError, SplitError
from roundpipe.microbatch import Arriving, MicrobatchInputs, RoundPipePackedData, split, split_call


def auto(args=(), kwargs=None, label=None, num_microbatch: int = 3) -> MicrobatchInputs:
    return split_call(args, kwargs or {}, label, num_microbatch=num_microbatch)


def assert_cut(pieces, tensor: torch.Tensor, num_microbatch: int, dim: int = 0) -> None:
    expected = torch.tensor_split(tensor, num_microbatch, dim=dim)
    assert len(pieces) == len(expected)
    for piece, chunk in zip(pieces, expected, strict=True):
        assert torch.equal(piece, chunk)


def test_tensors_of_args_kwargs_and_label_are_split_like_tensor_split() -> None:
    x, mask, y = torch.randn(8, 3), torch.randn(8, 2, 2), torch.arange(8)
    batches = auto((x,), {"mask": mask}, y)
    assert len(batches) == 3
    assert_cut([args[0] for args in batches.args], x, 3)
    assert_cut([kwargs["mask"] for kwargs in batches.kwargs], mask, 3)
    assert_cut(batches.labels, y, 3)


def test_pieces_share_memory_with_the_input() -> None:
    x = torch.randn(6, 3)
    assert auto((x,)).args[1][0].data_ptr() == x[2:].data_ptr()


def test_scalars_and_other_values_are_replicated() -> None:
    scalar, text, thing = torch.tensor(2.5), "text", object()
    batches = auto((torch.zeros(6), scalar, text, None), {"thing": thing, "flag": True})
    for args, kwargs in zip(batches.args, batches.kwargs, strict=True):
        assert args[1] is scalar
        assert args[2:] == (text, None)
        assert kwargs == {"thing": thing, "flag": True}


def test_missing_label_is_none_in_every_microbatch() -> None:
    assert auto((torch.zeros(6),)).labels == (None, None, None)


def test_nested_structures_keep_their_types() -> None:
    x = torch.arange(6)
    nested = [{"a": (x, 1)}, OrderedDict(b=x), Pair(x, "p"), Batch(x, 2.0), Box(x, "tag"), FakeModelOutput(loss=x)]
    for index, (pieces,) in enumerate(auto((nested,)).args):
        expected = x[2 * index : 2 * index + 2]
        plain, ordered, pair, batch, box, output = pieces
        assert [type(piece) for piece in pieces] == [dict, OrderedDict, Pair, Batch, Box, FakeModelOutput]
        assert plain["a"][1] == 1
        assert (pair.right, batch.scale, box.tag) == ("p", 2.0, "tag")
        for piece in (plain["a"][0], ordered["b"], pair.left, batch.tokens, box.content, output["loss"]):
            assert torch.equal(piece, expected)


def test_torch_size_and_strings_are_leaves() -> None:
    batches = auto((torch.zeros(6), torch.Size([6, 2])))
    assert [args[1] for args in batches.args] == [torch.Size([6, 2])] * 3


def test_one_element_beside_a_larger_batch_is_replicated() -> None:
    position = torch.arange(4)[None]
    batches = auto((torch.zeros(6, 4),), {"position": position}, torch.ones(1))
    assert all(torch.equal(kwargs["position"], position) for kwargs in batches.kwargs)
    assert [label.shape for label in batches.labels] == [(1,)] * 3


def test_tensors_of_one_element_are_a_batch_of_one() -> None:
    batches = auto((torch.zeros(1, 4), torch.ones(1)))
    assert len(batches) == 1
    assert torch.equal(batches.args[0][0], torch.zeros(1, 4))


def test_values_without_tensors_are_replicated_num_microbatch_times() -> None:
    assert auto((1,), {"a": torch.tensor(1.0)}, "y").labels == ("y",) * 3
    assert auto().args == ((), (), ())


def test_small_batch_gives_fewer_microbatches_and_is_logged_once(caplog, monkeypatch) -> None:
    monkeypatch.setattr(split, "_logged_small_batches", set())
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        for num_microbatch in (5, 5, 7):
            batches = auto((torch.arange(2),), label=torch.arange(2), num_microbatch=num_microbatch)
            assert [args[0].tolist() for args in batches.args] == [[0], [1]]
            assert [label.tolist() for label in batches.labels] == [[0], [1]]
    assert len(caplog.records) == 2
    assert "batch of 2" in caplog.messages[0]
    assert "num_microbatch=5" in caplog.messages[0]
    assert "num_microbatch=7" in caplog.messages[1]


def test_full_batch_is_not_logged(caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="roundpipe"):
        auto((torch.arange(3),))
    assert caplog.records == []


def test_the_message_names_tensors_of_different_batch_sizes() -> None:
    with pytest.raises(SplitError) as caught:
        auto((torch.zeros(8, 2), [torch.zeros(4)]), {"mask": torch.zeros(8)}, (0, torch.zeros(6, 5)))
    message = str(caught.value)
    for part in ("args[0] of shape (8, 2)", "args[1][0] of shape (4,)", "kwargs['mask']", "label[1] of shape (6, 5)"):
        assert part in message
    assert "split_input" in message


def test_the_message_truncates_long_lists_of_tensors() -> None:
    with pytest.raises(SplitError, match="and 3 more"):
        auto([torch.zeros(4)] * 10 + [torch.zeros(5)])


def test_the_message_names_leaves_by_the_kind_of_node() -> None:
    with pytest.raises(SplitError) as caught:
        auto((Pair(torch.zeros(2), torch.zeros(3)), Batch(torch.zeros(4), 0), Box(torch.zeros(5))))
    for path in ("args[0].left", "args[0].right", "args[1].tokens", "args[2][0]"):
        assert path in str(caught.value)


def test_empty_batch_is_refused() -> None:
    with pytest.raises(SplitError, match=r"nothing to split: args\[0\] of shape \(0, 3\)"):
        auto((torch.zeros(0, 3),))
    with pytest.raises(SplitError, match="nothing to split"):
        auto((torch.zeros(0, 3), torch.zeros(1)))


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, None, "3"])
def test_wrong_num_microbatch_is_refused(wrong) -> None:
    with pytest.raises(ConfigError, match="num_microbatch must be an int of at least 1"):
        auto((torch.zeros(6),), num_microbatch=wrong)


def test_gradients_flow_back_to_the_input() -> None:
    x = torch.randn(7, 3, requires_grad=True)
    y = torch.randn(7, 2, requires_grad=True)
    batches = auto((x,), {"y": y})
    for index, (args, kwargs) in enumerate(zip(batches.args, batches.kwargs, strict=True), start=1):
        (index * args[0].sum() + kwargs["y"].square().sum()).backward()
    rows = torch.tensor([1.0, 1, 1, 2, 2, 3, 3])
    assert torch.equal(x.grad, rows[:, None].expand(7, 3))
    assert torch.equal(y.grad, 2 * y.detach())


def test_packed_elements_are_the_microbatches() -> None:
    values = [torch.zeros(2), torch.ones(5)]
    batches = auto((RoundPipePackedData(values), torch.arange(5)), num_microbatch=7)
    assert len(batches) == 2
    assert [args[0] for args in batches.args] == values
    assert_cut([args[1] for args in batches.args], torch.arange(5), 2)


def test_packed_elements_keep_their_events_and_are_not_waited_for() -> None:
    events = [FakeEvent(), FakeEvent()]
    nested = {"h": (RoundPipePackedData([10, 20], events),)}
    batches = auto((), nested, RoundPipePackedData("ab"))
    for index, kwargs in enumerate(batches.kwargs):
        arriving = kwargs["h"][0]
        assert isinstance(arriving, Arriving)
        assert arriving.value == (10, 20)[index]
        assert arriving.event is events[index]
    assert batches.labels == ("a", "b")
    assert [event.waits for event in events] == [0, 0]


def test_packed_values_may_be_containers() -> None:
    batches = auto((RoundPipePackedData([(1, 2), {"a": 3}]),))
    assert batches.args == (((1, 2),), ({"a": 3},))


def test_one_element_beside_packed_data_is_replicated() -> None:
    position = torch.arange(4)[None]
    batches = auto((RoundPipePackedData([torch.zeros(2, 4)] * 2),), {"position": position})
    assert [kwargs["position"] is position for kwargs in batches.kwargs] == [True, True]


def test_packed_data_of_different_lengths_is_refused() -> None:
    with pytest.raises(SplitError, match=r"args\[0\] has 2 microbatches, label has 3 microbatches"):
        auto((RoundPipePackedData([1, 2]),), label=RoundPipePackedData([1, 2, 3]))


def test_empty_packed_data_is_refused() -> None:
    with pytest.raises(SplitError, match="without any microbatch"):
        auto((RoundPipePackedData(),))


def test_batch_smaller_than_the_packed_data_is_refused() -> None:
    with pytest.raises(SplitError, match=r"brings 3 microbatches.*label of shape \(2,\) has 2"):
        auto((RoundPipePackedData([1, 2, 3]),), label=torch.zeros(2))


def test_small_packed_data_is_not_logged(caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="roundpipe"):
        auto((RoundPipePackedData([1, 2]),), num_microbatch=9)
    assert caplog.records == []
