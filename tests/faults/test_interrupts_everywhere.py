"""Ctrl-C at any instruction of a call: it comes through as itself, and the call is whole or was not made.

A signal handler runs on the main thread where the interpreter looks for signals: at the start of a function, after a
call and when a loop goes on. `Strike` raises at the n-th of these places, of all that lie in our package or in the
parts of the standard library and of torch that handle locks, threads and contexts. Code without effects is left out.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import roundpipe
from helpers_faults import Background, Bench, batch, caught_from, wait_for_no_threads
from helpers_parity import assert_same
from roundpipe import RoundPipeRunConfig, checkpoint

logger = logging.getLogger(__name__)
PACKAGE = str(Path(roundpipe.__file__).parent)
WATCHED_LIBRARY = (threading.__file__, contextlib.__file__, str(torch.autograd.grad_mode.__file__))
PURE = tuple(f"{PACKAGE}/{part}" for part in ("config.py", "microbatch/", "plan/"))
# An optimizer on the main thread that is interrupted between two parameters has updated one of them, as in torch.
# One that is interrupted while torch leaves no_grad() leaves gradients off, as in torch.
INSIDE_OF_OPTIMIZERS = (f"{PACKAGE}/store/master.py", str(torch.autograd.grad_mode.__file__))
SAMPLES = int(os.environ.get("ROUNDPIPE_INTERRUPT_SAMPLES", "8"))  # places per test, spread evenly
_CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "CALL_INTRINSIC_1"}


@functools.cache
def _operations(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


@functools.cache
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    return [(entry.start, entry.end, entry.target) for entry in dis._parse_exception_table(code)]  # type: ignore[attr-defined]


def _handler_at(code: CodeType, offset: int) -> int | None:
    return next((target for start, end, target in _handlers(code) if start <= offset < end), None)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """There an exception is printed and not raised, by any Python program."""
    while frame is not None:
        if frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


class Strike:
    """Raises KeyboardInterrupt at the `number`-th place, counted from 0; without a number only counts them."""

    def __init__(self, operation: str, number: int | None = None) -> None:
        self.number, self.count = number, 0
        self._left_out = (*PURE, *INSIDE_OF_OPTIMIZERS) if "plain loop" in operation else PURE
        self.where = ""
        self._last: dict[FrameType, int] = {}

    @property
    def has_struck(self) -> bool:
        return bool(self.where)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        gc.disable()  # what strikes in a finalizer is not raised
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)
            self._last.clear()
            gc.enable()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        is_ours = name.startswith(PACKAGE) and not name.startswith(self._left_out)
        is_watched = name in WATCHED_LIBRARY and name not in self._left_out
        if self.has_struck or not (is_ours or is_watched):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode" and not self.has_struck:
            before = self._last.get(frame)
            self._last[frame] = frame.f_lasti
            if self._looks_for_signals(frame.f_code, before, frame.f_lasti) and not _is_in_finalizer(frame):
                self._arrive(frame)
        return self._trace

    @staticmethod
    def _looks_for_signals(code: CodeType, before: int | None, now: int) -> bool:
        if before is None:
            return True  # the function begins
        operation = _operations(code).get(before, "")
        if operation not in _CALLS and not operation.startswith("JUMP_BACKWARD"):
            return False
        # The interpreter raises at the call itself, we at what follows: only where one handler has both.
        return _handler_at(code, before) == _handler_at(code, now)

    def _arrive(self, frame: FrameType) -> None:
        if self.count == self.number:
            self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise KeyboardInterrupt(self.where)
        self.count += 1


# What is done before, what is interrupted, and what is compared afterwards.


OPERATIONS: dict[str, Callable[[Bench], object]] = {
    "forward_backward": lambda made: made.call(3),
    "async step": lambda made: made.step(is_async=True),
    "sync step": lambda made: made.step(is_async=False),
    "synchronize": lambda made: made.model.synchronize(),
    "state_dict": lambda made: made.model.state_dict(),
    "zero_grad": lambda made: made.model.zero_grad(),
    "forward": lambda made: made.model(batch(8)[0]),
    "inference": lambda made: infer(made),
    "step of the plain loop": lambda made: made.step_fn(),
    "zero_grad of the optimizer": lambda made: made.optimizer.zero_grad(),
    "gradients of the optimizer": lambda made: [param.grad for param in made.model.optim_parameters()],
}


def infer(made: Bench) -> None:
    made.model(batch(8)[0], roundpipe_run_config=RoundPipeRunConfig(requires_grad=False))


def prepared(operation: str) -> Bench:
    made = Bench(2, plan=None)
    for seed in (1, 2):
        made.call(seed)
        made.step(is_async="plain loop" not in operation)  # a plain step makes the newest weights visible
    if "step" in operation or "grad" in operation:
        made.call(3)
    return made


def outcome(made: Bench) -> list[Any]:
    """Everything that the operation may have changed, and two iterations after it."""
    made.model.zero_grad()
    seen = [made.call(4)]
    made.step(is_async=False)
    seen.append(made.call(5))
    made.step(is_async=True)
    made.model.synchronize()
    return [seen, made.snapshot()]


@functools.cache
def expected(operation: str, *, whole: bool) -> list[Any]:
    made = prepared(operation)
    if whole:
        OPERATIONS[operation](made)
    result = outcome(made)
    made.close()
    wait_for_no_threads()
    return result


def count_places(operation: str) -> int:
    made, strike = prepared(operation), Strike(operation)
    with strike.watching():
        OPERATIONS[operation](made)
    made.close()
    wait_for_no_threads()
    return strike.count


def struck(call: Callable[[], object], strike: Strike) -> type[BaseException] | None:
    """The type of what was raised; its frames would keep the model's threads alive."""
    with strike.watching():
        caught = caught_from(call)
        strike.number = None  # leaving this block runs contextlib, too, and an interrupt there would end the test run
    return None if caught is None else type(caught)


def equals(ours: Any, other: Any) -> bool:
    return caught_from(lambda: assert_same(ours, other)) is None


def test_the_files_that_are_left_out_exist() -> None:
    """A renamed file would be interrupted at places where an interrupt may leave half an update."""
    assert [path for path in (*PURE, *INSIDE_OF_OPTIMIZERS) if not Path(path).exists()] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupted_call_is_whole_or_was_not_made(operation: str) -> None:
    possible = [expected(operation, whole=whole) for whole in (True, False)]
    places = count_places(operation)
    assert places > 20
    for number in sorted({round(k * places / SAMPLES) for k in range(SAMPLES)}):
        made, strike = prepared(operation), Strike(operation, number)
        caught = struck(functools.partial(OPERATIONS[operation], made), strike)
        logger.info("%s, place %d of %d: %s", operation, number, places, strike.where)
        with contextlib.closing(made):
            assert caught is (KeyboardInterrupt if strike.has_struck else None)
            assert torch.is_grad_enabled(), strike.where
            Background(made.model.timeline).result()  # no lock was left taken
            result = outcome(made)
            assert any(equals(result, one) for one in possible), f"struck at {strike.where}"
        wait_for_no_threads()


@pytest.mark.timeout(300)
def test_an_interrupted_save_is_complete_or_absent(tmp_path: Path) -> None:
    def save(made: Bench, name: str) -> None:
        checkpoint.save(tmp_path / name / "one", made.model, made.optimizer)

    made, strike = prepared("save"), Strike("save")
    with strike.watching():
        save(made, "first")
    made.close()
    wait_for_no_threads()
    places = strike.count
    num_complete = 0
    for number in sorted({round(k * places / (2 * SAMPLES)) for k in range(2 * SAMPLES)}):
        made, strike = prepared("save"), Strike("save", number)
        caught = struck(functools.partial(save, made, str(number)), strike)
        logger.info("save, place %d of %d: %s", number, places, strike.where)
        with contextlib.closing(made):
            assert caught is (KeyboardInterrupt if strike.has_struck else None)
            made.call(3)
            Background(functools.partial(made.step, is_async=False)).result()  # no layer stays held
            Background(made.model.synchronize).result()
            found = sorted(path.name for path in (tmp_path / str(number)).glob("*"))
            assert found in ([], ["latest", "one"]), strike.where
            if found:
                num_complete += 1
                checkpoint.load(tmp_path / str(number) / "one", made.model, made.optimizer)
        wait_for_no_threads()
    assert num_complete < 2 * SAMPLES


@pytest.mark.timeout(300)
def test_an_interrupted_close_can_be_repeated() -> None:
    def prepare() -> Bench:
        made = prepared("close")
        made.call(3)
        made.step(is_async=True)
        return made

    made, strike = prepare(), Strike("close")
    with strike.watching():
        made.close()
    wait_for_no_threads()
    places = strike.count
    for number in sorted({round(k * places / SAMPLES) for k in range(SAMPLES)}):
        made, strike = prepare(), Strike("close", number)
        caught = struck(made.close, strike)
        logger.info("close, place %d of %d: %s", number, places, strike.where)
        assert caught is (KeyboardInterrupt if strike.has_struck else None)
        made.close()
        assert made.model._engine.group.is_closed
        wait_for_no_threads()
