"""LayerSlot, the gate between devices and optimizer, as a state machine without threads."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roundpipe.store import LayerSlot


class Passed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


EVENT = Passed()


def test_an_upload_needs_its_version() -> None:
    slot = LayerSlot()
    assert slot.can_upload(0)
    assert not slot.can_upload(1)
    slot.published(1)
    assert slot.can_upload(1)
    assert not slot.can_upload(0)


def test_weights_are_published_when_no_older_upload_is_due() -> None:
    slot = LayerSlot()
    slot.expect_uploads("call", 0, 2)
    assert not slot.can_publish(1)
    slot.upload_issued("call", 0, EVENT)
    assert not slot.can_publish(1)
    slot.upload_issued("call", 0, EVENT)
    assert slot.can_publish(1)
    assert slot.take_upload_events() == [EVENT, EVENT]
    assert slot.take_upload_events() == []


def test_uploads_of_the_new_version_do_not_hold_it_up() -> None:
    slot = LayerSlot()
    slot.expect_uploads("next", 1, 1)
    assert slot.can_publish(1)
    assert not slot.can_publish(2)


def test_gradients_land_in_the_order_calls_were_announced() -> None:
    slot = LayerSlot()
    slot.expect_landings("first", 0, 1)
    slot.expect_landings("second", 0, 1)
    assert slot.can_land("first", 0)
    assert not slot.can_land("second", 0)
    slot.landed("first", 0)
    assert slot.can_land("second", 0)


def test_gradients_of_the_next_generation_wait_for_the_optimizer() -> None:
    slot = LayerSlot()
    slot.expect_landings("old", 0, 1)
    slot.expect_landings("new", 1, 1)
    assert not slot.can_land("new", 1)
    assert not slot.can_consume(0)
    slot.landed("old", 0)
    assert slot.can_consume(0)
    assert not slot.can_consume(1)
    slot.consumed(0)
    assert slot.can_land("new", 1)


def test_a_cancelled_call_holds_nothing_up_but_its_copies_are_still_waited_for() -> None:
    slot = LayerSlot()
    slot.expect_uploads("call", 0, 2)
    slot.expect_landings("call", 0, 1)
    slot.upload_issued("call", 0, EVENT)
    slot.cancel("call")
    assert slot.is_idle()
    assert slot.can_publish(1)
    assert slot.can_consume(0)
    slot.upload_issued("call", 0, EVENT)  # it was on its way when the call failed
    slot.landed("call", 0)
    assert slot.take_upload_events() == [EVENT, EVENT]


def test_events_that_do_not_fit_are_bugs() -> None:
    slot = LayerSlot()
    slot.expect_uploads("call", 0, 1)
    with pytest.raises(AssertionError):
        slot.published(1)
    slot.expect_landings("call", 0, 1)
    with pytest.raises(AssertionError):
        slot.consumed(0)
    slot.expect_landings("later", 1, 1)
    with pytest.raises(AssertionError):
        slot.landed("later", 1)


class SlotAgainstModel(RuleBasedStateMachine):
    """Any legal sequence of events, against plain lists of what is due."""

    def __init__(self) -> None:
        super().__init__()
        self.slot = LayerSlot()
        self.version = 0
        self.generation = 0
        self.uploads: list[tuple[int, int]] = []
        self.landings: list[tuple[int, int]] = []
        self.calls = 0

    @rule(uploads=st.integers(0, 2), ahead=st.integers(0, 1), landings=st.integers(0, 2), later=st.integers(0, 1))
    def announce(self, uploads: int, ahead: int, landings: int, later: int) -> None:
        self.calls += 1
        self.slot.expect_uploads(self.calls, self.version + ahead, uploads)
        self.slot.expect_landings(self.calls, self.generation + later, landings)
        self.uploads += [(self.calls, self.version + ahead)] * uploads
        self.landings += [(self.calls, self.generation + later)] * landings

    @precondition(lambda self: any(version == self.version for _, version in self.uploads))
    @rule()
    def upload(self) -> None:
        due = next(pair for pair in self.uploads if pair[1] == self.version)
        self.slot.upload_issued(due[0], due[1], EVENT)
        self.uploads.remove(due)

    @precondition(lambda self: any(generation == self.generation for _, generation in self.landings))
    @rule()
    def land(self) -> None:
        due = next(pair for pair in self.landings if pair[1] == self.generation)
        assert self.slot.can_land(*due)
        self.slot.landed(*due)
        self.landings.remove(due)

    @precondition(lambda self: all(version > self.version for _, version in self.uploads))
    @rule()
    def publish(self) -> None:
        self.version += 1
        self.slot.published(self.version)

    @precondition(lambda self: all(generation > self.generation for _, generation in self.landings))
    @rule()
    def consume(self) -> None:
        self.slot.consumed(self.generation)
        self.generation += 1

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = data.draw(st.integers(1, self.calls))
        self.slot.cancel(call)
        self.uploads = [pair for pair in self.uploads if pair[0] != call]
        self.landings = [pair for pair in self.landings if pair[0] != call]

    @invariant()
    def answers_agree(self) -> None:
        assert self.slot.can_upload(self.version)
        assert not self.slot.can_upload(self.version + 1)
        assert self.slot.can_publish(self.version + 1) == all(v > self.version for _, v in self.uploads)
        assert self.slot.can_consume(self.generation) == all(g > self.generation for _, g in self.landings)
        assert self.slot.is_idle() == (not self.uploads and not self.landings)
        present = [call for call, generation in self.landings if generation == self.generation]
        for call in present:
            assert self.slot.can_land(call, self.generation) == (call == present[0])


SlotAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotAgainstModel = SlotAgainstModel.TestCase
