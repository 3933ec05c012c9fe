"""LayerSlot, the gate between devices and optimizer, as a state machine without threads."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roundpipe.store import LayerSlot
from roundpipe.store.records import WeightBuffer


class Passed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


EVENT = Passed()


FRONT, BACK = WeightBuffer.FRONT, WeightBuffer.BACK


def is_idle(slot: LayerSlot) -> bool:
    """Whether no upload and no landing is due."""
    return not slot._uploads_due and not slot._landings_due


def write(slot: LayerSlot, version: int, buffer: WeightBuffer = FRONT) -> None:
    slot.write_begun(version, buffer)
    slot.written(version, buffer)


def test_an_upload_needs_its_version() -> None:
    slot = LayerSlot()
    assert slot.can_upload(0)
    assert not slot.can_upload(1)
    write(slot, 1)
    assert slot.can_upload(1)
    assert not slot.can_upload(0)


def test_weights_are_overwritten_when_no_upload_of_them_is_due() -> None:
    slot = LayerSlot()
    slot.expect_uploads("call", 0, 2)
    assert not slot.can_write(1, FRONT)
    slot.upload_issued("call", 0, EVENT)
    assert not slot.can_write(1, FRONT)
    slot.upload_issued("call", 0, EVENT)
    assert slot.can_write(1, FRONT)
    assert slot.take_upload_events(FRONT) == [EVENT, EVENT]
    assert slot.take_upload_events(FRONT) == []


def test_uploads_of_the_new_version_do_not_hold_it_up() -> None:
    slot = LayerSlot()
    slot.expect_uploads("next", 1, 1)
    assert slot.can_write(1, FRONT)
    assert not slot.can_write(2, FRONT)


def test_nobody_reads_what_is_being_written() -> None:
    slot = LayerSlot()
    slot.write_begun(1, FRONT)
    assert not slot.can_upload(0)
    assert not slot.can_upload(1)
    slot.written(1, FRONT)
    assert slot.can_upload(1)


def test_one_version_is_read_while_the_next_is_written_beside_it() -> None:
    slot = LayerSlot()
    slot.expect_uploads("call", 0, 1)
    slot.write_begun(1, BACK)
    assert slot.can_upload(0)
    slot.written(1, BACK)
    assert (slot.buffer_of(0), slot.buffer_of(1)) == (FRONT, BACK)
    assert not slot.can_write(2, FRONT)  # the call has not read version 0 yet
    slot.upload_issued("call", 0, EVENT)
    assert slot.can_write(2, FRONT)
    assert slot.take_upload_events(BACK) == []
    assert slot.take_upload_events(FRONT) == [EVENT]
    write(slot, 2, FRONT)
    assert (slot.buffer_of(0), slot.buffer_of(1), slot.buffer_of(2)) == (None, BACK, FRONT)


def test_a_version_that_changes_nothing_is_what_the_one_before_was() -> None:
    slot = LayerSlot()
    slot.expect_uploads("old", 0, 1)
    slot.unchanged(1)
    assert slot.buffer_of(0) is slot.buffer_of(1) is FRONT
    assert slot.newest_version == 1
    assert not slot.can_write(2, FRONT)
    write(slot, 2, BACK)
    slot.unchanged(3)
    assert slot.buffer_of(0) is FRONT
    assert slot.buffer_of(2) is slot.buffer_of(3) is BACK


def test_what_a_failed_step_has_written_is_void() -> None:
    slot = LayerSlot()
    slot.write_begun(1, BACK)
    slot.write_revoked(1, BACK)
    assert slot.buffer_of(1) is FRONT
    slot.write_begun(2, FRONT.other)
    slot.written(2, BACK)
    assert slot.newest_version == 2


def test_buffers_change_places_with_what_is_read_from_them() -> None:
    slot = LayerSlot()
    slot.expect_uploads("call", 0, 1)
    slot.upload_issued("call", 0, EVENT)
    write(slot, 1, BACK)
    slot.swapped()
    assert (slot.buffer_of(0), slot.buffer_of(1)) == (BACK, FRONT)
    assert slot.take_upload_events(BACK) == [EVENT]


def test_the_newest_version_moves_over_the_older_ones() -> None:
    slot = LayerSlot()
    write(slot, 1, BACK)
    slot.unchanged(2)
    slot.moved_to_front()
    assert [slot.buffer_of(version) for version in (0, 1, 2)] == [None, FRONT, FRONT]
    write(slot, 3, BACK)
    assert slot.newest_version == 3
    slot.expect_uploads("call", 2, 1)
    with pytest.raises(AssertionError):
        slot.moved_to_front()  # version 2 is still to be read


def test_versions_stay_where_they_are_while_an_upload_is_due() -> None:
    """An upload that is due may already have chosen the buffer it reads."""
    slot = LayerSlot()
    write(slot, 1, BACK)
    slot.expect_uploads("call", 0, 1)
    assert not slot.can_move()
    with pytest.raises(AssertionError):
        slot.swapped()
    slot.upload_issued("call", 0, EVENT)
    assert slot.can_move()
    slot.swapped()


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
    assert is_idle(slot)
    assert slot.can_write(1, FRONT)
    assert slot.can_consume(0)
    slot.upload_issued("call", 0, EVENT)  # queued when the call failed
    slot.landed("call", 0)
    assert slot.take_upload_events(FRONT) == [EVENT, EVENT]


def test_events_that_do_not_fit_are_bugs() -> None:
    slot = LayerSlot()
    slot.expect_uploads("call", 0, 1)
    with pytest.raises(AssertionError):
        slot.write_begun(1, FRONT)
    slot.expect_landings("call", 0, 1)
    with pytest.raises(AssertionError):
        slot.consumed(0)
    slot.expect_landings("later", 1, 1)
    with pytest.raises(AssertionError):
        slot.landed("later", 1)


class SlotAgainstModel(RuleBasedStateMachine):
    """Any legal sequence of events, compared with plain lists of what is due and of what the two buffers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.slot = LayerSlot()
        self.contents = {FRONT: {0}, BACK: set()}
        self.version = 0
        self.generation = 0
        self.uploads: list[tuple[int, int]] = []
        self.landings: list[tuple[int, int]] = []
        self.calls = 0

    def readable(self) -> set[int]:
        return self.contents[FRONT] | self.contents[BACK]

    @rule(data=st.data(), uploads=st.integers(0, 2), landings=st.integers(0, 2), later=st.integers(0, 1))
    def announce(self, data: st.DataObject, uploads: int, landings: int, later: int) -> None:
        version = data.draw(st.sampled_from(sorted({*self.readable(), self.version + 1})))
        self.calls += 1
        self.slot.expect_uploads(self.calls, version, uploads)
        self.slot.expect_landings(self.calls, self.generation + later, landings)
        self.uploads += [(self.calls, version)] * uploads
        self.landings += [(self.calls, self.generation + later)] * landings

    @precondition(lambda self: any(version in self.readable() for _, version in self.uploads))
    @rule()
    def upload(self) -> None:
        due = next(pair for pair in self.uploads if pair[1] in self.readable())
        self.slot.upload_issued(due[0], due[1], EVENT)
        self.uploads.remove(due)

    @precondition(lambda self: any(generation == self.generation for _, generation in self.landings))
    @rule()
    def land(self) -> None:
        due = next(pair for pair in self.landings if pair[1] == self.generation)
        assert self.slot.can_land(*due)
        self.slot.landed(*due)
        self.landings.remove(due)

    def may_write(self, buffer: WeightBuffer) -> bool:
        return all(v > self.version or v in self.contents[buffer.other] for _, v in self.uploads)

    @rule(buffer=st.sampled_from(WeightBuffer))
    def write(self, buffer: WeightBuffer) -> None:
        assert self.slot.can_write(self.version + 1, buffer) == self.may_write(buffer)
        if self.may_write(buffer):
            self.version += 1
            write(self.slot, self.version, buffer)
            self.contents[buffer] = {self.version}

    @rule()
    def leave_unchanged(self) -> None:
        holder = next(buffer for buffer in WeightBuffer if self.version in self.contents[buffer])
        self.version += 1
        self.slot.unchanged(self.version)
        self.contents[holder].add(self.version)

    @precondition(lambda self: not self.uploads)
    @rule()
    def swap(self) -> None:
        self.slot.swapped()
        self.contents = {FRONT: self.contents[BACK], BACK: self.contents[FRONT]}

    @precondition(lambda self: self.version in self.contents[BACK] and not self.uploads)
    @rule()
    def move_to_front(self) -> None:
        self.slot.moved_to_front()
        self.contents = {FRONT: self.contents[BACK], BACK: set()}

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
        assert {v for v in range(self.version + 2) if self.slot.can_upload(v)} == self.readable()
        assert self.slot.newest_version == self.version
        assert self.slot.can_move() == (not self.uploads)
        for buffer in WeightBuffer:
            assert self.slot.can_write(self.version + 1, buffer) == self.may_write(buffer)
        assert self.slot.can_consume(self.generation) == all(g > self.generation for _, g in self.landings)
        assert is_idle(self.slot) == (not self.uploads and not self.landings)
        present = [call for call, generation in self.landings if generation == self.generation]
        for call in present:
            assert self.slot.can_land(call, self.generation) == (call == present[0])


SlotAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotAgainstModel = SlotAgainstModel.TestCase
