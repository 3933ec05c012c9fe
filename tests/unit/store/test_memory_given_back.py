"""An optimizer copy whose values were read gives its memory back, and never while anything could still use it."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.store import OptimizerCopy
from roundpipe.store.master import _HABIT

WAIT_S = 30.0
SHAPE = (5, 8)


def make(seed: int = 1) -> tuple[OptimizerCopy, Tensor]:
    """A copy as a step leaves it, and its values, which have non-zero low halves and ties."""
    value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    value.view(torch.int32)[1] &= ~0xFFFF
    value.view(torch.int32)[1] |= 0x8000
    made = OptimizerCopy.of_weight(torch.zeros(SHAPE, dtype=torch.bfloat16), torch.float32)
    with torch.no_grad():
        made.copy_(value)
        made.write_weight(torch.empty(SHAPE, dtype=torch.bfloat16))
        made.forget_touches()
        made.rest_between_steps()
    for _ in range(2):
        made.rest_after_step()
    assert memory_of(made) == 0
    return made, value


def memory_of(made: OptimizerCopy) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return made.untyped_storage().nbytes()


def assert_value(made: OptimizerCopy, value: Tensor) -> None:
    assert torch.equal(made.detach().view(torch.int32), value.view(torch.int32))


def saved(made: OptimizerCopy) -> int:
    file = io.BytesIO()
    torch.save({"copy": made, "detached": made.detach()}, file)
    return file.tell()


LOOKS: dict[str, Callable[[OptimizerCopy], object]] = {
    "clone": lambda p: p.detach().clone(),
    "norm": lambda p: p.detach().norm().item(),
    "data": lambda p: p.data.sum(),
    "save": saved,
    "print": repr,
    "numpy": lambda p: p.detach().numpy().copy(),
    "views": lambda p: [row.sum() for row in p.detach().view(-1).split(7)],
}


@pytest.mark.parametrize("look", LOOKS)
def test_memory_goes_back_once_nothing_refers_to_it(look: str) -> None:
    made, value = make()
    LOOKS[look](made)
    assert memory_of(made) == value.nbytes
    made.rest_between_steps()
    assert memory_of(made) == 0
    assert made.halves is not None
    assert_value(made, value)


KEPT: dict[str, Callable[[OptimizerCopy], Any]] = {
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.detach().view(-1)[3:],
    "parameter": lambda p: nn.Parameter(p.data),
    "array": lambda p: p.detach().numpy(),
    "buffer": lambda p: memoryview(p.detach().numpy()),
    "capsule": lambda p: torch.utils.dlpack.to_dlpack(p.detach()),
    "storage": lambda p: p.untyped_storage(),
    "storage of a view": lambda p: p.detach()[1:].untyped_storage(),
}


@pytest.mark.parametrize("kind", KEPT)
def test_memory_stays_while_anything_shares_it(kind: str) -> None:
    made, value = make()
    kept = KEPT[kind](made)
    address = made.detach().data_ptr()
    for _ in range(3):
        made.rest_between_steps()
        assert memory_of(made) == value.nbytes
        made.rest_after_step()
        assert memory_of(made) == value.nbytes
    assert made.detach().data_ptr() == address
    made.rest_after_step()  # ends the interval in which values were read
    del kept
    made.rest_after_step()
    assert memory_of(made) == 0
    assert_value(made, value)


def test_writes_through_a_view_that_is_kept_count() -> None:
    made, value = make()
    view = made.data.view(-1)
    made.rest_between_steps()
    made.rest_after_step()
    view[7] = 3.25
    view[8] = 1 / 3
    expected = value.clone()
    expected.view(-1)[7], expected.view(-1)[8] = 3.25, 1 / 3
    del view
    made.rest_after_step()
    assert memory_of(made) == value.nbytes, "the weight is not this value rounded"
    assert_value(made, expected)
    made.write_weight(torch.empty(SHAPE, dtype=torch.bfloat16))
    for _ in range(2):
        made.rest_after_step()
    assert memory_of(made) == 0
    assert_value(made, expected)


def test_a_view_sees_what_a_step_writes() -> None:
    """As in a hook that averages weights: the kernel writes into the memory that the view shares."""
    made, value = make()
    view = made.detach()
    made.rest_between_steps()
    made.values().mul_(2.0)
    made.rest_after_step()
    assert torch.equal(view, 2 * value)


def test_a_graph_can_be_run_backward() -> None:
    made, value = make()
    loss = (made * made).sum()
    made.rest_between_steps()
    loss.backward()
    assert torch.equal(made.grad, 2 * value)
    for _ in range(2):
        made.rest_after_step()
    assert memory_of(made) == 0


def test_a_graph_of_an_earlier_step_is_refused() -> None:
    made, _ = make()
    loss = (made * made).sum()
    for _ in range(2):
        made.rest_between_steps()
        made.rest_after_step()
    assert memory_of(made) == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_known_address_stays_valid() -> None:
    made, value = make()
    address = made.data_ptr()
    for _ in range(3):
        made.rest_between_steps()
        made.rest_after_step()
    assert memory_of(made) == value.nbytes
    assert made.data_ptr() == address


def test_what_is_looked_at_in_every_step_keeps_its_memory() -> None:
    made, value = make()
    has_memory = []
    for _ in range(2 * _HABIT):
        made.detach().sum()
        made.rest_between_steps()
        made.rest_after_step()
        has_memory.append(memory_of(made) > 0)
    assert has_memory == [False] * _HABIT + [True] * _HABIT
    made.rest_between_steps()
    made.rest_after_step()
    assert memory_of(made) == 0
    assert_value(made, value)


def test_memory_that_the_user_has_set_goes_the_same_way() -> None:
    made, value = make()
    larger = torch.zeros(2, *SHAPE)
    larger[1] = value
    made.data = larger[1]
    made.rest_between_steps()
    assert made.halves is None
    del larger
    made.rest_between_steps()
    assert memory_of(made) == 0
    assert_value(made, value)


def test_values_of_another_shape_or_type_stay_as_they_are() -> None:
    for other in (torch.ones(7), torch.ones(SHAPE, dtype=torch.float64), torch.ones(SHAPE[::-1]).t()):
        made, _ = make()
        made.data = other.clone()
        made.rest_between_steps()
        assert torch.equal(made.detach(), other)
        assert made.halves is None


@pytest.mark.parametrize(("of", "to"), [(torch.float32, torch.float32), (torch.float16, torch.float32)])
def test_copies_that_cannot_be_split_keep_their_memory(of: torch.dtype, to: torch.dtype) -> None:
    made = OptimizerCopy.of_weight(torch.ones(SHAPE, dtype=of), to)
    made.detach().sum()
    made.rest_between_steps()
    for _ in range(2):
        made.rest_after_step()
    assert memory_of(made) == made.nbytes


def test_a_step_that_did_not_touch_it_is_not_seen_as_a_write() -> None:
    made, _ = make()
    made.detach().sum()
    made.forget_touches()
    made.rest_between_steps()
    assert memory_of(made) == 0
    assert not made.was_touched()


# Threads.


def test_memory_stays_while_another_thread_uses_it() -> None:
    made, value = make()
    made.requires_grad_(False)
    started, go_on = threading.Event(), threading.Event()

    def wait(element: float) -> float:
        started.set()
        assert go_on.wait(WAIT_S)
        return element

    def use() -> None:
        with torch.no_grad():
            made.apply_(wait)  # returns nothing that shares memory, and takes as long as the test wants

    user = threading.Thread(target=use, daemon=True)
    user.start()
    assert started.wait(WAIT_S)
    made.rest_between_steps()
    made._was_read = False
    made.rest_after_step()
    assert memory_of(made) == value.nbytes
    go_on.set()
    user.join(WAIT_S)
    made.rest_after_step()
    assert memory_of(made) == 0
    assert_value(made, value)


def test_a_lock_that_is_held_is_not_waited_for() -> None:
    made, value = make()
    made.detach().sum()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with made.lock:
            held.set()
            assert done.wait(WAIT_S)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held.wait(WAIT_S)
    made.rest_between_steps()
    assert memory_of(made) == value.nbytes
    done.set()
    holder.join(WAIT_S)
    made.rest_between_steps()
    assert memory_of(made) == 0


def test_readers_always_see_the_value() -> None:
    made, value = make()
    num_readers, num_rounds = 3, 100
    start, end, wrong = threading.Barrier(num_readers + 1), threading.Barrier(num_readers + 1), []

    def read() -> None:
        for _ in range(num_rounds):
            start.wait(WAIT_S)
            if not torch.equal(made.detach().clone(), value):
                wrong.append(1)
            end.wait(WAIT_S)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(num_readers)]
    for reader in readers:
        reader.start()
    for _ in range(num_rounds):
        made.detach()
        start.wait(WAIT_S)
        for _ in range(5):
            made._give_memory_back()  # while they read
        end.wait(WAIT_S)
        made._give_memory_back()
        assert memory_of(made) == 0
    for reader in readers:
        reader.join(WAIT_S)
    assert not wrong
    assert_value(made, value)
