"""RoundPipePackedData: a list whose values may still be in transfer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from microbatch_nodes import FailingEvent, FakeEvent

from roundpipe.errors import ConfigError
from roundpipe.microbatch import Arriving, RoundPipePackedData


def test_is_a_list_of_its_values() -> None:
    packed = RoundPipePackedData([1, 2, 3])
    assert isinstance(packed, list)
    assert packed == [1, 2, 3]
    assert packed[1] == 2
    assert RoundPipePackedData() == []


def test_without_events_everything_has_arrived() -> None:
    assert RoundPipePackedData("ab").events == [None, None]
    assert RoundPipePackedData().events == []


def test_there_is_one_event_per_value() -> None:
    event = FakeEvent()
    packed = RoundPipePackedData([1, 2], [None, event])
    assert packed.events[0] is None
    assert packed.events[1] is event
    assert event.waits == 0


def test_wrong_number_of_events_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 values but 2 events"):
        RoundPipePackedData([1, 2, 3], [None, None])


def test_synchronize_waits_for_each_event_once() -> None:
    events = [FakeEvent(), FakeEvent()]
    packed = RoundPipePackedData([1, 2], events)
    packed.synchronize()
    packed.synchronize()
    assert [event.waits for event in events] == [1, 1]
    assert packed.events == [None, None]


def test_a_failed_wait_is_repeated() -> None:
    packed = RoundPipePackedData([1, 2], [None, FailingEvent()])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="copy failed"):
            packed.synchronize()


@pytest.mark.parametrize(
    "change",
    [
        lambda packed: packed.append(9),
        lambda packed: packed.reverse(),
        lambda packed: packed.pop(0),
        lambda packed: packed.__setitem__(0, 9),
    ],
)
def test_a_changed_list_is_synchronized_before_its_events_are_used(change) -> None:
    events = [FakeEvent(), FakeEvent()]
    packed = RoundPipePackedData([1, 2], events)
    change(packed)
    assert packed.as_microbatches() == list(packed)
    assert [event.waits for event in events] == [1, 1]


def test_as_microbatches_wraps_only_values_with_an_event() -> None:
    event = FakeEvent()
    first, second = RoundPipePackedData(["a", "b"], [event, None]).as_microbatches()
    assert first == Arriving("a", event)
    assert second == "b"
    assert event.waits == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda packed: pickle.loads(pickle.dumps(packed))])
def test_copies_synchronize_and_drop_events(duplicate) -> None:
    event = FakeEvent()
    other = duplicate(RoundPipePackedData([torch.arange(3), "x"], [event, None]))
    assert type(other) is RoundPipePackedData
    assert torch.equal(other[0], torch.arange(3))
    assert other[1] == "x"
    assert other.events == [None, None]
    assert event.waits == 1
