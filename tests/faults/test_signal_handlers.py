"""Signal handlers that call the model are refused while a call is half done; `request_stop` is always safe."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_faults import WAIT_S, Bench, batch, bench, caught_from, mse
from helpers_parity import assert_same
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import UsageError

CALLS: dict[str, Callable[[Bench], object]] = {
    "synchronize": lambda made: made.model.synchronize(),
    "state_dict": lambda made: made.model.state_dict(),
    "step": lambda made: made.step(True),
    "forward_backward": lambda made: made.call(7),
    "zero_grad": lambda made: made.model.zero_grad(),
    "close": lambda made: made.model.close(),
}


class Handler:
    """Handles SIGUSR1 on the main thread by calling something; keeps what that raised."""

    def __init__(self) -> None:
        self.call: Callable[[], object] = lambda: None
        self.handled = threading.Event()
        self.caught: BaseException | None = None
        self._before = signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, *_: object) -> None:
        self.caught = caught_from(self.call)
        self.handled.set()

    def strike(self) -> None:
        """From a thread of ours: interrupt the main thread, and go on when the handler has returned."""
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGUSR1)
        assert self.handled.wait(WAIT_S), "the handler is stuck"

    def remove(self) -> None:
        signal.signal(signal.SIGUSR1, self._before)


@pytest.fixture
def handler() -> Iterator[Handler]:
    made = Handler()
    yield made
    made.remove()


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("point", ["forward", "backward", "loss_fn"])
def test_a_handler_that_calls_the_model_during_a_call_is_refused(handler: Handler, what: str, point: str) -> None:
    """The interrupted call goes on as if nothing had happened."""
    with bench(2) as made:
        made.train_right(1)
        handler.call = lambda: CALLS[what](made)
        made.traps.act(point, None if point == "loss_fn" else 2, 0, handler.strike)
        made.train_right(2)
        assert isinstance(handler.caught, UsageError)
        assert "request_stop" in str(handler.caught)
        made.train_right(3)


@pytest.mark.parametrize("what", CALLS)
def test_a_handler_that_calls_the_model_during_a_step_is_refused(handler: Handler, what: str) -> None:
    with bench(2) as made:
        made.train_right(1)
        handler.call = lambda: CALLS[what](made)
        made.traps.act("step_fn", None, 0, handler.strike)
        made.train_right(2)
        assert isinstance(handler.caught, UsageError)
        made.train_right(3)


def test_a_handler_may_call_the_model_between_calls(handler: Handler) -> None:
    with bench(2) as made:
        made.train_right(1)
        handler.call = made.model.synchronize
        signal.raise_signal(signal.SIGUSR1)
        assert handler.handled.is_set()
        assert handler.caught is None
        made.train_right(2)


def test_a_handler_may_raise(handler: Handler) -> None:
    """Its exception ends the call, as Ctrl-C does."""
    with bench(2) as made:
        made.train_right(1)
        before = made.snapshot()
        error = TimeoutError("from the handler")
        signal.signal(signal.SIGUSR1, lambda *_: (_ for _ in ()).throw(error))
        ident = threading.main_thread().ident
        assert ident is not None
        made.traps.act("forward", 2, 0, lambda: signal.pthread_kill(ident, signal.SIGUSR1))
        assert caught_from(lambda: made.call(2)) is error
        assert_same(made.snapshot(), before, "after the handler has raised")
        made.train_right(3)


# Calls inside calls that are meant.


def test_a_model_may_run_backward_into_itself() -> None:
    """An input that the same model has made: its gradient flows on inside of forward_backward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, label = batch(1)
    config = RoundPipeRunConfig(num_microbatch=1)
    expected = [mse(network(network(x)), label)]
    expected[0].backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in network.parameters()]
    for p in network.parameters():
        p.grad = None
    with RoundPipe(network, devices=["cpu"] * 2, model_run_config=config) as model:
        loss = model.forward_backward((model(x),), label=label, loss_fn=mse)
        model.synchronize()
        torch.testing.assert_close([loss, *(p.grad for p in network.parameters())], [expected[0].detach(), *gradients])


def test_split_functions_may_call_the_model_and_handlers_are_still_refused(handler: Handler) -> None:
    with bench(2, plan=None) as made:
        x, _ = batch(1)
        with torch.no_grad():
            expected = made.model(x)

        def split(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                handler.call = made.model.synchronize
                made.traps.act("forward", 2, 0, handler.strike)
                assert_same(made.model(x), expected)
            return [(part,) for part in args[0][0].chunk(3)], [{}] * 3

        with torch.no_grad():
            made.model(x, roundpipe_run_config=RoundPipeRunConfig(split_input=split))
        assert isinstance(handler.caught, UsageError)


# The flag.


def test_a_requested_stop_is_seen_after_the_step(handler: Handler) -> None:
    with bench(2) as made:
        handler.call = made.model.request_stop
        made.traps.act("forward", 2, 0, handler.strike)
        assert not made.model.stop_requested
        steps = 0
        for seed in range(10):
            made.train_right(seed)
            steps += 1
            if made.model.stop_requested:
                break
        assert steps == 1
        assert handler.caught is None
        made.train_right(20)  # nothing is refused: the loop decides


def test_request_stop_needs_no_lock() -> None:
    with bench(2) as made, made.model._engine.group.lock, made.model._engine.store.monitor:
        thread = threading.Thread(target=made.model.request_stop)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert made.model.stop_requested


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
        self.second = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) * self.scale + self.second(x)
        return y


def test_an_auto_round_pipe_and_its_parts_share_the_flag(handler: Handler) -> None:
    model = wrap_model_to_roundpipe(Branching(), lower_threshold=512, devices=["cpu"] * 2)
    assert isinstance(model, AutoRoundPipe)
    with model:
        part = next(iter(model._parts.values()))
        handler.call = part.request_stop
        signal.raise_signal(signal.SIGUSR1)
        assert model.stop_requested
        assert part.stop_requested
        model(torch.randn(6, 4)).sum().backward()
        model.step(lambda: None, False)


def test_a_handler_is_refused_while_a_part_of_an_auto_round_pipe_runs(handler: Handler) -> None:
    model = wrap_model_to_roundpipe(Branching(), lower_threshold=512, devices=["cpu"] * 2)
    assert isinstance(model, AutoRoundPipe)
    with model:
        handler.call = model.synchronize
        inner = next(iter(model._parts))
        hook = inner[1].register_forward_hook(lambda *_: handler.strike())  # type: ignore[index]
        model(torch.randn(6, 4)).sum().backward()
        hook.remove()
        assert isinstance(handler.caught, UsageError)
        model.step(lambda: None, False)
