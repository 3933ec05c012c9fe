"""Trainings on several machines in which one machine fails in a chosen place."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from typing import Any

import torch
from machine_training import WIDTH, part
from torch import Tensor, nn
from torch import distributed as dist

from roundpipe import MachineError, RoundPipe, RoundPipeRunConfig, clip_grad_norm_, optim
from roundpipe.distributed import exchange as exchange_module
from roundpipe.optim.native.kernel import OnePassKernel

BAD_RANK = 1


class Boom(Exception):
    """The injected fault."""


class Faults:
    """Decides where this machine fails. Armed for one call or step at a time."""

    place = ""
    skips = 0  # how often the place is passed before the failure

    @classmethod
    def arm(cls, place: str) -> None:
        """Fail at `place`; "3 exchange" fails there at the fourth time."""
        number, _, name = place.partition(" ")
        cls.place, cls.skips = (name, int(number)) if number.isdigit() else (place, 0)

    @classmethod
    def at(cls, place: str) -> None:
        if cls.place == place:
            cls.skips -= 1
            if cls.skips >= 0:
                return
            cls.place = ""
            if place.endswith("interrupt"):
                signal.raise_signal(signal.SIGINT)
                time.sleep(1)
            raise Boom(place)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Faults.at("backward")
        return gradients[0]


class Faulty(nn.Module):
    """A layer that can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Faults.at("forward")
        return _Backward.apply(self.linear(x)).tanh()


class Training:
    """A model in training on one machine of several."""

    def __init__(
        self, rank: int, size: int, *, is_async: bool, plain: bool = False, clips: bool = False, by_layer: bool = False
    ) -> None:
        """by_layer: steps return at once and publish layer by layer, from the second one on."""
        torch.manual_seed(11)
        layers = [Faulty(), *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))]
        self.rank, self.size, self.is_async, self.plain = rank, size, is_async or by_layer, plain
        self.model = RoundPipe(
            nn.Sequential(*layers).to(torch.bfloat16),
            optim_dtype=torch.float32,
            name="net",
            model_run_config=RoundPipeRunConfig(num_microbatch=2),
            devices=["cpu"] * 2,
            process_group=dist.group.WORLD,
            staleness=0 if by_layer else 1,
        )
        self.clips = clips
        self.optimizer = optim.AdamW(self.model.optim_parameters(), lr=0.01)
        self.batch = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)

    def loss_fn(self, output: Tensor, label: Tensor) -> Tensor:
        Faults.at("loss_fn")
        return ((output - label) ** 2).float().sum()

    def step_fn(self) -> None:
        Faults.at("step_fn")
        if self.clips:
            clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        Faults.at("step_fn after the update")
        self.optimizer.zero_grad()

    def iteration(self) -> float:
        """One call and one step; returns the loss."""
        x = part(self.batch, self.rank, self.size)
        Faults.at("between calls")
        Faults.at("between calls interrupt")
        if self.plain:
            loss = self.loss_fn(self.model(x), x.flip(0))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            loss = self.model.forward_backward((x,), label=x.flip(0), loss_fn=self.loss_fn)
            Faults.at("before the step")
            self.model.step(self.step_fn, self.is_async)
        return float(loss)

    def weights(self) -> Tensor:
        """All weights, flat."""
        self.model.synchronize()
        return torch.cat([param.detach().float().flatten().clone() for param in self.model.model.parameters()])


def _make_places() -> None:
    """Let exchanges fail before their headers, and the kernel before it updates a layer."""
    real_packed, real_update = exchange_module._packed, OnePassKernel.update

    def packed(*args: Any) -> Any:
        Faults.at("exchange")
        return real_packed(*args)

    def update(self: OnePassKernel, parameters: Any) -> None:
        Faults.at("kernel")
        real_update(self, parameters)

    exchange_module._packed = packed
    OnePassKernel.update = update  # type: ignore[method-assign]


def fail_once(
    rank: int,
    size: int,
    place: str,
    is_async: bool,
    warm_up: int,
    plain: bool = False,
    clips: bool = False,
    by_layer: bool = False,
) -> dict[str, Any]:
    """Train, fail on one machine in one iteration, and go on; returns what this machine has seen.

    warm_up: number of iterations before; after one, exact steps overlap with the backward pass.
    """
    if exchange_module._packed.__name__ == "_packed":
        _make_places()
    training = Training(rank, size, is_async=is_async, plain=plain, clips=clips, by_layer=by_layer)
    seen: list[tuple[str, str, int | None, str]] = []
    with training.model:
        for _ in range(warm_up):
            training.iteration()
        before = training.weights()
        if rank == BAD_RANK:
            Faults.arm(place)
        try:
            training.iteration()
            training.model.synchronize()  # a failure in the background appears at the latest here
        except (Exception, KeyboardInterrupt) as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            seen.append((type(error).__name__, str(error), getattr(error, "rank", None), notes))
        assert rank != BAD_RANK or Faults.place == "", "the fault was not reached"
        failed = training.weights()
        training.model.zero_grad()
        losses = [training.iteration() for _ in range(2)]
        after = training.weights()
    return {"seen": seen, "before": before, "failed": failed, "after": after, "losses": losses}


def end_between_calls(rank: int, size: int, place: str) -> None:
    """One machine raises outside of any call, which ends its process or at least closes its model."""
    training = Training(rank, size, is_async=False)
    with training.model:
        training.iteration()
        if rank == BAD_RANK:
            Faults.place = place
        training.iteration()


# Calls that differ.


def differing_calls(rank: int, size: int, kind: str) -> tuple[str, str, int | None]:
    """One machine does something else than the others; returns the error."""
    training = Training(rank, size, is_async=kind == "versions")
    model, x = training.model, part(training.batch, rank, size)
    is_bad = rank == BAD_RANK

    def backward() -> Any:
        return model.forward_backward((x,), label=x, loss_fn=training.loss_fn)

    with model:
        training.iteration()
        try:
            if kind == "kinds of calls":
                model(x) if is_bad else backward()
            elif kind == "kinds of steps":
                backward()
                model.step(training.step_fn, is_async=is_bad)
            elif kind == "gradients":
                backward()
                if is_bad:
                    next(model.optim_parameters()).grad
                model.step(training.step_fn, is_async=False)
            elif kind == "writes":
                if is_bad:
                    with torch.no_grad():
                        next(model.model.parameters()).add_(1)
                backward()
            elif kind == "versions":
                if is_bad:
                    model.synchronize()
                backward()
            elif kind == "closing":
                if is_bad:
                    model.close()
                else:
                    backward()
        except Exception as error:
            return type(error).__name__, str(error), getattr(error, "rank", None)
    return "nothing", "", None


def train_until_killed(rank: int, size: int, is_async: bool, marker: str, is_early: bool) -> None:
    """Train until another machine is lost. Makes the file `marker` when training has begun.

    is_early: makes it before the machines connect for the model.
    """
    dist.barrier()
    if is_early and rank == 0:
        open(marker, "w").close()
    training = Training(rank, size, is_async=is_async, clips=is_async)
    with training.model:
        while True:
            training.iteration()
            if rank == 0:
                open(marker, "w").close()


def wait_for_a_sleeper(rank: int, size: int) -> None:
    """One machine does nothing for longer than the timeout."""
    training = Training(rank, size, is_async=False)
    with training.model:
        training.iteration()
        if rank == BAD_RANK:
            time.sleep(7)
        training.iteration()


def wait_under_the_watchdog(rank: int, size: int) -> list[str]:
    """One machine is late; returns what the log of this machine says."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("roundpipe")
    training = Training(rank, size, is_async=False)
    with training.model:
        training.iteration()
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        os.environ["ROUNDPIPE_WATCHDOG_S"] = "0.5"
        try:
            if rank == BAD_RANK:
                time.sleep(2)
            training.iteration()
        finally:
            del os.environ["ROUNDPIPE_WATCHDOG_S"]
            logger.removeHandler(handler)
            logger.setLevel(logging.ERROR)
    return records


def interrupt_often(rank: int, size: int, kind: str, seed: int, seconds: float) -> dict[str, Any]:
    """Train while Ctrl-C hits all machines but the first at random moments; then look whether all is in order."""
    by_layer = kind == "by layer"
    training = Training(rank, size, is_async=kind == "stale", plain=kind == "plain", clips=by_layer, by_layer=by_layer)
    chosen, is_over = random.Random(10 * seed + rank), threading.Event()

    def shoot() -> None:
        while not is_over.wait(chosen.uniform(0.02, 0.3)):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=shoot, daemon=True)
    end, interrupts, others = time.monotonic() + seconds, 0, 0
    if rank:
        thread.start()
    while not is_over.is_set():
        try:
            training.iteration()
        except KeyboardInterrupt:
            interrupts += 1
        except MachineError:
            others += 1
        try:
            if time.monotonic() > end:
                is_over.set()
                time.sleep(0.5)
        except KeyboardInterrupt:
            is_over.set()
    time.sleep(1.0)
    with training.model:
        sums = [_gradients(training, attempts) for attempts in (20, 1)]
        training.model.zero_grad()
        losses = [training.iteration() for _ in range(2)]
        weights = training.weights()
    return {"interrupts": interrupts, "others": others, "sums": sums, "losses": losses, "weights": weights}


def _gradients(training: Training, attempts: int) -> Tensor:
    """The gradients of one call, which are all gradients that there are.

    Other machines may be at another place of the script, as long as they fail together with this one: then all begin
    again.
    """
    for attempt in range(attempts):
        try:
            # As in torch, an optimizer that raises in a plain loop leaves the gradients; some machines have cleared
            # theirs.
            training.optimizer.zero_grad()
            x = part(training.batch, training.rank, training.size)
            training.model.forward_backward((x,), label=x, loss_fn=training.loss_fn)
            gradients = [copy.grad.flatten().clone() for copy in training.model.optim_parameters()]
            training.model.zero_grad()
            return torch.cat(gradients)
        except (Exception, KeyboardInterrupt):
            if attempt == attempts - 1:
                raise
    raise AssertionError("unreachable")


def interrupt(rank: int, size: int) -> Any:
    """Ctrl-C on one machine while it waits for the others."""
    training = Training(rank, size, is_async=False)
    with training.model:
        training.iteration()
        before = training.weights()
        if rank == BAD_RANK:
            threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        elif rank == 0:
            time.sleep(1.5)
        try:
            training.iteration()
            error = None
        except (Exception, KeyboardInterrupt) as raised:
            error = (type(raised).__name__, str(raised), getattr(raised, "rank", None))
        if error is None:
            try:
                training.iteration()
            except Exception as raised:
                error = (type(raised).__name__, str(raised), getattr(raised, "rank", None))
        training.iteration()
        return error, before, training.weights()
