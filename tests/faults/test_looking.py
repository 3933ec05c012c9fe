"""Looking at a model never changes its training: the same bits as in a run that never looks."""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_faults import Background, Boom, raised_by, wait_for, wait_for_no_threads, wait_until
from helpers_parity import assert_same
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, optim
from roundpipe.store.weights import LayerWeights

NUM_LAYERS, WIDTH, NUM_MICROBATCH = 9, 4, 3
STAGES = [range(i, i + 1) for i in range(NUM_LAYERS)]
PLAN = ModelExecutePlan(STAGES[:-1], STAGES[::-1])
CONFIG = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLAN)
PRECISIONS = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, torch.float32)}


class Training:
    """A model with one layer per stage, stepped asynchronously by default."""

    def __init__(self, precision: str) -> None:
        dtype, optim_dtype = PRECISIONS[precision]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
        network = nn.Sequential(*layers).to(dtype)
        self.dtype = dtype
        self.model = RoundPipe(network, optim_dtype, devices=["cpu"] * 3, model_run_config=CONFIG, name="looked at")
        self.optimizer = optim.AdamW(self.model.optim_parameters(), lr=0.02)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 2 * NUM_MICROBATCH, WIDTH, generator=generator).to(self.dtype)
        return x, y

    def call(self, seed: int) -> Tensor:
        x, y = self.batch(seed)
        loss: Tensor = self.model.forward_backward((x,), label=y, loss_fn=nn.functional.mse_loss)
        return loss

    def step(self, is_async: bool = True, fails: bool = False) -> None:
        self.model.step(self._step_fn, is_async, fails)

    def _step_fn(self, fails: bool) -> None:
        self.optimizer.step()
        if fails:
            raise Boom("after the update")
        self.optimizer.zero_grad()

    def everything(self) -> list[Any]:
        self.model.synchronize()
        masters = [p.detach().clone() for p in self.model.optim_parameters()]
        return [masters, *({k: v.clone() for k, v in self.model.state_dict().items()}.items())]

    def close(self) -> None:
        self.model.close()


LOOKS: dict[str, Callable[[Training], object]] = {
    "state_dict": lambda made: made.model.state_dict(),
    "saved state_dict": lambda made: torch.save(made.model.state_dict(), io.BytesIO()),
    "copied state_dict": lambda made: copy.deepcopy(made.model.state_dict()),
    "named_parameters": lambda made: [p.detach().clone() for _, p in made.model.named_parameters()],
    "copied module": lambda made: [copy.deepcopy(p.detach()) for p in made.model.model.parameters()],
    "optimizer copies": lambda made: [p.detach().clone() for p in made.model.optim_parameters()],
    "evaluation": lambda made: evaluate(made),
}
PLACES = ("after the call", "after the step", "everywhere")


def evaluate(made: Training) -> None:
    with torch.no_grad():
        made.model(made.batch(99)[0], roundpipe_run_config=RoundPipeRunConfig(execute_plan=ModelExecutePlan(STAGES)))


def train(
    precision: str, look: Callable[[Training], object] | None = None, place: str = "everywhere", steps: int = 6
) -> list[Any]:
    made = Training(precision)
    seen: list[Any] = []
    for iteration in range(steps):
        seen.append(made.call(iteration))
        if look is not None and place != "after the step":
            look(made)
        made.step(is_async=iteration % 5 != 4)
        if look is not None and place != "after the call":
            look(made)
    seen += made.everything()
    made.close()
    wait_for_no_threads()
    return seen


@functools.cache
def never_looked_at(precision: str) -> list[Any]:
    return train(precision)


FAST_LOOKS = [(look, "bfloat16") for look in LOOKS] + [(look, "float32") for look in ("state_dict", "evaluation")]
SLOW_LOOKS = [(look, "float32") for look in LOOKS if (look, "float32") not in FAST_LOOKS]


@pytest.mark.parametrize(
    ("look", "precision"), [*FAST_LOOKS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_LOOKS)]
)
def test_reading_the_model_changes_no_bit_of_its_training(
    look: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = never_looked_at(precision)
    for seed, place in enumerate(PLACES):
        monkeypatch.setenv("ROUNDPIPE_VIRTUAL_SEED", str(seed))
        assert_same(train(precision, LOOKS[look], place), expected, f"{look} {place}")


class HeldUpload:
    """Holds a worker that has chosen the memory it will upload from and has not begun to copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layer_id: int) -> None:
        """Of the layer's second upload after `arm`: the one for its backward."""
        self.reached, self.opened = threading.Event(), threading.Event()
        self._uploads_left = 0
        real = LayerWeights.upload_pieces

        def upload_pieces(weights: LayerWeights, layer: int, version: int, image: Tensor) -> Any:
            pieces = real(weights, layer, version, image)
            if layer == layer_id and self._uploads_left:
                self._uploads_left -= 1
                if not self._uploads_left:
                    self.reached.set()
                    wait_for(self.opened)
            return pieces

        monkeypatch.setattr(LayerWeights, "upload_pieces", upload_pieces)

    def arm(self) -> None:
        self._uploads_left = 2

    def open_when_it_waits(self, made: Training, background: Background, what: str) -> None:
        """Let the worker go on once the other thread waits for `what`, or has not waited at all."""
        waits = made.model._engine.store.monitor._waits
        wait_until(lambda: background.is_over() or any(what in text for text in list(waits.values())), what)
        self.opened.set()


def train_around_a_look(precision: str, held: HeldUpload | None) -> list[Any]:
    """After two asynchronous steps calls read the second memory; a look makes it change places with the first."""
    made = Training(precision)
    seen: list[Any] = []
    for iteration in range(4):
        if iteration == 2 and held is not None:
            made.model._engine.group.stepper.wait_until_idle()
            held.arm()
        seen.append(made.call(iteration))
        if iteration == 2 and held is not None:
            wait_for(held.reached)
            looking = Background(made.model.state_dict)
            held.open_when_it_waits(made, looking, "uploads of layer")
            looking.result()
        made.step()
    seen += made.everything()
    made.close()
    return seen


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layer_id", [0, 2, 4])
def test_reading_waits_for_an_upload_that_has_chosen_its_memory(
    precision: str, layer_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_around_a_look(precision, None)
    assert_same(train_around_a_look(precision, HeldUpload(monkeypatch, layer_id)), expected)


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_reading_after_a_failed_step_changes_no_bit(precision: str) -> None:
    """The failed step has updated the optimizer's copies: they stay so, and the next step publishes them."""

    def run(look: Callable[[Training], object] | None) -> list[Any]:
        made = Training(precision)
        seen: list[Any] = []
        for iteration in range(6):
            seen.append(made.call(iteration))
            fails = iteration in (1, 3)
            made.step(fails=fails)
            if fails:
                made.model._engine.group.stepper.wait_until_idle()
                assert isinstance(raised_by(made.model.timeline), Boom)
            if look is not None:
                look(made)
        seen += made.everything()
        made.close()
        return seen

    expected = run(None)
    for name, look in LOOKS.items():
        assert_same(run(look), expected, name)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_good", [1, 2])
def test_synchronize_after_a_failed_step_leaves_the_optimizer_copies_alone(precision: str, num_good: int) -> None:
    """A float32 copy of a bfloat16 weight lies in the memory that the failed step has written."""

    def run(synchronizes: bool) -> list[Tensor]:
        made = Training(precision)
        for iteration in range(num_good + 1):
            made.call(iteration)
            made.step(fails=iteration == num_good)
        made.model._engine.group.stepper.wait_until_idle()
        assert isinstance(raised_by(made.model.timeline), Boom)
        if synchronizes:
            made.model.synchronize()
        masters = [p.detach().clone() for p in made.model.optim_parameters()]
        made.close()
        return masters

    assert_same(run(True), run(False))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_write_by_the_user_does_not_reach_an_upload_of_an_earlier_call(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call brings the written values into the second memory, which an earlier call may still read."""

    def run(held: HeldUpload | None) -> list[Any]:
        made = Training(precision)
        for iteration in range(2):
            made.call(iteration)
            made.step()
        made.model._engine.group.stepper.wait_until_idle()
        if held is not None:
            held.arm()
        made.call(2)
        if held is not None:
            wait_for(held.reached)
        else:
            made.model._engine.group.recovery.wait_for_runs()
        with torch.no_grad():
            made.model.model[0][0].weight.mul_(0.5)  # the first memory: no call reads it now
        following = Background(made.model.timeline)
        if held is not None:
            held.open_when_it_waits(made, following, "to finish")
        following.result()
        made.model.synchronize()
        gradients = {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}
        made.close()
        return [gradients, *gradients.values()]

    expected = run(None)
    assert_same(run(HeldUpload(monkeypatch, 0)), expected)
