"""GradScaler: torch's numbers where the semantics coincide, one scale per iteration, async updates one update late."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from roundpipe import context
from roundpipe.context import Iteration
from roundpipe.errors import ArgumentTypeError, ConfigError, StallError, UsageError
from roundpipe.monitor import stalls
from roundpipe.optim.grad_scaler import GradScaler

WAIT_S = 20.0


class Loop:
    """The threads of a RoundPipe run without a model: devices for loss_fn, one optimizer thread for step_fn."""

    def __init__(self, num_device: int = 3) -> None:
        self.devices = ThreadPoolExecutor(num_device)
        self.optimizer_thread = ThreadPoolExecutor(1)
        self.iteration = Iteration()
        self.issued: list[Future[Any]] = []

    def losses(self, loss_fn: Callable[[], Any], num_microbatch: int = 1) -> list[Any]:
        def run(iteration: Iteration) -> Any:
            with context.within_iteration(iteration):
                return loss_fn()

        running = [self.devices.submit(run, self.iteration) for _ in range(num_microbatch)]
        return [future.result(WAIT_S) for future in running]

    def step(self, step_fn: Callable[[], Any], gate: threading.Event | None = None) -> Future[Any]:
        def run(iteration: Iteration) -> Any:
            try:
                assert gate is None or gate.wait(WAIT_S)
                with context.within_iteration(iteration):
                    return step_fn()
            finally:
                iteration.step_finished.set()

        iteration, self.iteration = self.iteration, Iteration()
        context.announce_step(iteration)
        self.issued.append(self.optimizer_thread.submit(run, iteration))
        return self.issued[-1]

    def close(self) -> None:
        for pool in (self.devices, self.optimizer_thread):
            pool.shutdown(wait=True)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def make_sgd(num_element: int = 4, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, torch.optim.SGD]:
    param = nn.Parameter(torch.zeros(num_element, dtype=dtype))
    return param, torch.optim.SGD([param], lr=1.0)


def fill_grad(param: nn.Parameter, found_inf: bool) -> None:
    param.grad = torch.full_like(param, math.inf if found_inf else 3.0)


def stepper(scaler: GradScaler, found_inf: bool = False) -> Callable[[], Any]:
    """A step_fn that steps a new optimizer; `found_inf` decides whether its gradients are finite."""
    param, optimizer = make_sgd()
    fill_grad(param, found_inf)
    return lambda: scaler.step(optimizer)


def in_a_thread(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# ---- plain use: torch's numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_sync_updates_give_torchs_scales_and_weights(seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "init_scale": rng.choice([2.0**16, 1000.0, 0.1, 3e38]),
        "growth_factor": rng.choice([2.0, 1.5, 1.1]),
        "backoff_factor": rng.choice([0.5, 0.3]),
        "growth_interval": rng.choice([1, 2, 5]),
    }
    ours, torchs = GradScaler(**options), torch.amp.GradScaler("cpu", **options)
    (our_param, our_sgd), (torch_param, torch_sgd) = make_sgd(), make_sgd()
    for _ in range(60):
        found_inf = rng.random() < 0.3
        coefficient = torch.tensor([math.inf if found_inf else rng.gauss(0, 1), rng.gauss(0, 1), 1e-3, 1e3])
        unscale_first = rng.random() < 0.5
        for scaler, param, sgd in ((ours, our_param, our_sgd), (torchs, torch_param, torch_sgd)):
            sgd.zero_grad()
            scaler.scale((param * coefficient).sum() / 1024).backward()
            if unscale_first:
                scaler.unscale_(sgd)
            scaler.step(sgd)
        assert torch.equal(our_param, torch_param)
        torch.testing.assert_close(our_param.grad, torch_param.grad, rtol=0, atol=0, equal_nan=True)
        new_scale = rng.choice([64.0, 1e-3]) if rng.random() < 0.1 else None
        ours.update(new_scale, is_async=False)
        torchs.update(new_scale)
        assert ours.get_scale() == torchs.get_scale()
        assert {key: value for key, value in ours.state_dict().items() if key != "_deferred"} == torchs.state_dict()


def test_unscale_then_clip_then_step_equals_torch() -> None:
    results = []
    for scaler in (GradScaler(init_scale=1000.0), torch.amp.GradScaler("cpu", init_scale=1000.0)):
        param, sgd = make_sgd()
        scaler.scale((param * torch.arange(4.0)).sum()).backward()
        scaler.unscale_(sgd)
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        scaler.step(sgd)
        results.append(param.detach())
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_unscaling_multiplies_by_the_float32_inverse(dtype: torch.dtype) -> None:
    param, sgd = make_sgd(dtype=dtype)
    param.grad = torch.tensor([1.0, 7.0, -3.0, 1e-3], dtype=dtype)
    inverse = torch.tensor(1.0 / 3000.0, dtype=torch.float32)
    expected = (param.grad.to(torch.promote_types(dtype, torch.float32)) * inverse).to(dtype)
    GradScaler(init_scale=3000.0).unscale_(sgd)
    assert torch.equal(param.grad, expected)


def test_a_nonfinite_gradient_of_one_optimizer_skips_only_that_one_but_lowers_the_scale() -> None:
    scaler = GradScaler(init_scale=8.0)
    (bad, bad_sgd), (good, good_sgd) = make_sgd(), make_sgd()
    fill_grad(bad, True)
    fill_grad(good, False)
    scaler.step(bad_sgd)
    scaler.step(good_sgd)
    assert torch.equal(bad, torch.zeros(4))
    assert torch.equal(good, torch.full((4,), -3.0 / 8.0))
    scaler.update(is_async=False)
    assert scaler.get_scale() == 4.0


def test_step_passes_arguments_and_result_through() -> None:
    class Recording(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    optimizer: Any = Recording([nn.Parameter(torch.zeros(1))], lr=1.0)
    assert GradScaler().step(optimizer, 1, other=2) == ((1,), {"other": 2})


def test_an_optimizer_without_gradients_is_stepped_and_counts() -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    _, optimizer = make_sgd()
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    scaler.step(optimizer)
    scaler.update(is_async=False)
    assert calls == ["step"]
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("duplicate_overflow", [False, True])
def test_sparse_gradients_are_judged_by_their_sums(duplicate_overflow: bool) -> None:
    value = 3e38 if duplicate_overflow else 8.0
    param, sgd = make_sgd(3)
    param.grad = torch.sparse_coo_tensor([[1, 1]], [value, value], (3,), check_invariants=True)
    scaler = GradScaler(init_scale=4.0)
    scaler.step(sgd)
    assert torch.equal(param, torch.zeros(3) if duplicate_overflow else torch.tensor([0.0, -4.0, 0.0]))
    scaler.update(is_async=False)
    assert scaler.get_scale() == (2.0 if duplicate_overflow else 4.0)


def test_a_parameter_listed_twice_is_unscaled_once() -> None:
    param = nn.Parameter(torch.zeros(2))
    with pytest.warns(UserWarning, match="duplicate"):
        sgd = torch.optim.SGD([param, param], lr=1.0)
    param.grad = torch.full((2,), 16.0)
    GradScaler(init_scale=4.0).unscale_(sgd)
    assert torch.equal(param.grad, torch.full((2,), 4.0))


def test_the_tracker_goes_on_after_new_scale_as_torchs_does() -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=2)
    for new_scale in (None, 100.0, None):
        stepper(scaler)()
        scaler.update(new_scale, is_async=False)
    assert scaler.get_scale() == 200.0


def test_an_interval_lowered_below_the_tracker_grows_at_the_next_update() -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=100)
    for _ in range(5):
        stepper(scaler)()
        scaler.update(is_async=False)
    scaler.set_growth_interval(2)
    stepper(scaler)()
    scaler.update(is_async=False)
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize(("found_inf", "init_scale"), [(False, 2.0**127), (True, 2.0**-127)])
def test_the_scale_stays_where_it_can_be_inverted(found_inf: bool, init_scale: float) -> None:
    scaler = GradScaler(init_scale=init_scale, growth_interval=1)
    for _ in range(3):
        stepper(scaler, found_inf)()
        scaler.update(is_async=False)
    assert scaler.get_scale() == init_scale


# ---- scale() ---------------------------------------------------------------------------------------------------------


class Losses(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_scaled_losses_have_torchs_value_type_and_gradient(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    results = []
    for scaler in (GradScaler(init_scale=96.1), torch.amp.GradScaler("cpu", init_scale=96.1)):
        loss = torch.full(shape, 1.7, dtype=dtype, requires_grad=True)
        scaled = scaler.scale(loss)
        scaled.sum().backward()
        assert loss.grad is not None
        results.append((scaled.detach(), loss.grad))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_containers_of_losses_keep_their_type() -> None:
    scaler = GradScaler(init_scale=4.0)
    one, two = torch.tensor(1.0), torch.tensor([2.0])
    assert scaler.scale([one, two]) == [4.0, 8.0]
    assert scaler.scale((one, two)) == (4.0, 8.0)
    nested: Any = scaler.scale([one, (two, [one])])  # type: ignore[list-item]
    assert nested == [4.0, (8.0, [4.0])]
    named = scaler.scale(Losses(one, two))
    assert isinstance(named, Losses)
    assert (named.first, named.second) == (4.0, 8.0)
    lazy = scaler.scale(iter([one, two]))
    scaler.update(1.0, is_async=False)
    assert list(lazy) == [4.0, 8.0]


@pytest.mark.parametrize("wrong", [1.0, None, "loss", {"loss": torch.ones(1)}, [torch.ones(1), 2.0]])
def test_scale_refuses_what_is_no_tensor(wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="pass a tensor"):
        GradScaler().scale(wrong)


def test_a_scaler_first_used_in_inference_mode_can_train() -> None:
    with torch.inference_mode():
        scaler = GradScaler(init_scale=4.0)
        scaler.scale(torch.ones(1))
    weight = torch.ones(1, requires_grad=True)
    scaler.scale(weight * 2).backward()
    assert weight.grad == 8.0


# ---- one scale per iteration -----------------------------------------------------------------------------------------


def test_an_update_between_two_calls_of_one_iteration_does_not_split_it(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0)
    param, sgd = make_sgd(1)
    first = loop.losses(lambda: scaler.scale(torch.ones(())))
    scaler.update(32.0, is_async=False)
    assert scaler.get_scale() == 32.0
    second = loop.losses(lambda: (scaler.scale(torch.ones(())), scaler.get_scale()))
    assert first == [8.0]
    assert second == [(8.0, 8.0)]
    param.grad = torch.tensor([16.0])
    assert loop.step(lambda: (scaler.step(sgd), scaler.get_scale())[1]).result(WAIT_S) == 8.0
    assert torch.equal(param, torch.tensor([-2.0]))
    assert loop.losses(scaler.get_scale) == [32.0]


def test_a_step_keeps_the_scale_it_was_issued_with(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0)
    gate = threading.Event()
    param, sgd = make_sgd(1)
    param.grad = torch.tensor([16.0])  # its loss was scaled on the main thread, with 8
    stepping = loop.step(lambda: scaler.step(sgd), gate)
    scaler.update(2.0)
    scaler.load_state_dict(scaler_state(scale=1.0))
    gate.set()
    stepping.result(WAIT_S)
    assert torch.equal(param, torch.tensor([-2.0]))


def scaler_state(**changed: Any) -> dict[str, Any]:
    return {key: value for key, value in GradScaler().state_dict().items() if key != "_deferred"} | changed


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_divided_by_the_scale_of_their_loss_whatever_the_timing(loop: Loop, seed: int) -> None:
    rng = random.Random(seed)
    scaler = GradScaler(init_scale=2.0**10, growth_interval=1, backoff_factor=0.25)
    expected, got, stepped = [], [], []
    for _ in range(40):
        num_microbatch = rng.randint(1, 5)
        param, sgd = make_sgd(1)
        losses = []
        for _ in range(rng.randint(1, 3)):
            losses += loop.losses(lambda: scaler.scale(torch.ones(())), num_microbatch)
            if rng.random() < 0.3:
                scaler.update(2.0 ** rng.randint(-5, 12), is_async=rng.random() < 0.5)
        found_inf = rng.random() < 0.2
        expected.append(float(len(losses)))
        stepped.append(not found_inf)

        def step_fn(
            param: nn.Parameter = param,
            sgd: torch.optim.SGD = sgd,
            gathered: Tensor = torch.stack(losses).sum(),
            found_inf: bool = found_inf,
            pause_s: float = rng.random() * 0.004,
        ) -> None:
            time.sleep(pause_s)
            param.grad = gathered.reshape(1) + (math.inf if found_inf else 0.0)
            scaler.step(sgd)
            got.append(-param.item())

        loop.step(step_fn)
        if rng.random() < 0.9:
            scaler.update(is_async=rng.random() < 0.7)
    for future in loop.issued:
        future.result(WAIT_S)
    assert got == [value if ran else 0.0 for value, ran in zip(expected, stepped, strict=True)]


# ---- update() --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_async_scales_are_the_sync_ones_one_update_later(loop: Loop, seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2, "backoff_factor": 0.25}
    late, prompt = GradScaler(**options), GradScaler(**options)
    late_scales, prompt_scales = [late.get_scale()], []
    for _ in range(40):
        found_inf = rng.random() < 0.3
        new_scale = 2.0 ** rng.randint(1, 9) if rng.random() < 0.1 else None
        late_step, prompt_step = stepper(late, found_inf), stepper(prompt, found_inf)
        pause_s = rng.random() * 0.004

        def step_fn(late_step: Any = late_step, prompt_step: Any = prompt_step, pause_s: float = pause_s) -> None:
            time.sleep(pause_s)
            late_step()
            prompt_step()

        loop.step(step_fn)
        prompt_scales.append(prompt.get_scale())
        late.update(new_scale)
        late_scales.append(late.get_scale())
        prompt.update(new_scale, is_async=False)
    assert late_scales[1:] == prompt_scales


def test_async_update_does_not_wait_for_the_step_just_issued(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0)
    gate = threading.Event()
    loop.step(stepper(scaler, found_inf=True), gate)
    in_a_thread(scaler.update).result(WAIT_S)
    assert scaler.get_scale() == 8.0
    second = in_a_thread(scaler.update)
    with pytest.raises(TimeoutError):
        second.result(0.1)
    gate.set()
    second.result(WAIT_S)
    assert scaler.get_scale() == 4.0


def test_sync_update_waits_for_every_issued_step_and_applies_the_deferred_first(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0)
    gate = threading.Event()
    loop.step(stepper(scaler, found_inf=True))
    scaler.update()
    loop.step(stepper(scaler, found_inf=True), gate)
    updating = in_a_thread(lambda: scaler.update(is_async=False))
    with pytest.raises(TimeoutError):
        updating.result(0.1)
    assert scaler.get_scale() == 8.0
    gate.set()
    updating.result(WAIT_S)
    assert scaler.get_scale() == 2.0
    scaler.update(is_async=False)
    assert scaler.get_scale() == 2.0


def test_several_steps_in_one_window_are_one_decision(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=2)
    for found_inf in (False, True, True, False):
        loop.step(stepper(scaler, found_inf))
    stepper(scaler)()
    scaler.update(is_async=False)
    assert scaler.get_scale() == 4.0
    assert scaler.state_dict()["_growth_tracker"] == 0


def test_updates_without_steps_change_nothing(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    for is_async in (True, True, False, False, True):
        scaler.update(is_async=is_async)
    loop.step(lambda: None)  # a step that does not use this scaler
    scaler.update(is_async=False)
    assert scaler.state_dict() == GradScaler(init_scale=8.0, growth_interval=1).state_dict() | {"_deferred": None}


def test_a_step_that_failed_changes_nothing_and_blocks_nobody(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=1)

    def failing_step_fn() -> None:
        raise ZeroDivisionError

    failing = loop.step(failing_step_fn)
    scaler.update(is_async=False)
    assert isinstance(failing.exception(WAIT_S), ZeroDivisionError)
    assert scaler.get_scale() == 8.0


def test_an_optimizer_that_failed_may_be_stepped_again_without_unscaling_twice() -> None:
    scaler = GradScaler(init_scale=4.0)
    param, sgd = make_sgd(1)
    param.grad = torch.tensor([8.0])

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    hook = sgd.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        scaler.step(sgd)
    hook.remove()
    scaler.step(sgd)
    assert torch.equal(param, torch.tensor([-2.0]))


def test_new_scale_may_be_a_tensor_and_is_read_at_once() -> None:
    scaler = GradScaler()
    given = torch.tensor([12.0])
    scaler.update(given)
    given.fill_(5.0)
    scaler.update()
    assert scaler.get_scale() == 12.0


def test_a_long_wait_is_logged(loop: Loop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_WATCHDOG_S", "0.05")
    scaler = GradScaler()
    gate = threading.Event()
    loop.step(stepper(scaler), gate)
    with caplog.at_level(logging.WARNING, "roundpipe"):
        updating = in_a_thread(lambda: scaler.update(is_async=False))
        deadline = time.monotonic() + WAIT_S
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        gate.set()
        updating.result(WAIT_S)
    assert len(caplog.records) >= 2
    assert "GradScaler.update()" in caplog.messages[0]
    assert "optimizer step" in caplog.messages[0]
    assert "stack of" in caplog.messages[0]


def test_a_wait_longer_than_the_limit_raises(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_WAIT_LIMIT_S", "0.1")
    scaler = GradScaler()
    gate = threading.Event()
    done = loop.step(stepper(scaler), gate)
    try:
        with pytest.raises(StallError, match=r"optimizer step .* in GradScaler\.update\(\); this is longer"):
            scaler.update(is_async=False)
    finally:
        stalls.clear()
        gate.set()
        done.result(WAIT_S)


def test_watchdog_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_WATCHDOG_S", "soon")
    with pytest.raises(ConfigError, match="'soon'"):
        GradScaler().update()


def test_steps_that_no_update_covers_are_not_gathered(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0)
    for found_inf in [True] + [False] * 50:
        loop.step(stepper(scaler, found_inf)).result(WAIT_S)
    assert len(scaler._window.running) <= 1
    scaler.update(is_async=False)
    assert scaler.get_scale() == 4.0


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_stress_all_threads_at_once(loop: Loop) -> None:
    scaler = GradScaler(init_scale=2.0**10, growth_interval=1, backoff_factor=0.25)
    stop = threading.Event()

    def poke() -> int:
        num_poke = 0
        while not stop.is_set():
            scaler.scale(torch.ones(()))
            scaler.get_scale()
            scaler.set_growth_interval(1 + num_poke % 3)
            scaler.state_dict()
            num_poke += 1
        return num_poke

    pokes = [in_a_thread(poke) for _ in range(3)]
    mismatches: list[tuple[float, float]] = []
    rng = random.Random(0)
    try:
        for _ in range(150):
            losses = loop.losses(lambda: scaler.scale(torch.ones(())).item(), num_microbatch=4)
            param, sgd = make_sgd(1)
            param.grad = torch.tensor([losses[0]])

            def step_fn(losses: list[float] = losses, param: nn.Parameter = param, sgd: Any = sgd) -> None:
                scaler.step(sgd)
                mismatches.extend((losses[0], loss) for loss in losses if loss != losses[0])
                if param.item() != -1.0:
                    mismatches.append((losses[0], param.item()))

            loop.step(step_fn)
            scaler.update(2.0**5 if rng.random() < 0.1 else None, is_async=rng.random() < 0.7)
    finally:
        stop.set()
    assert all(poked.result(WAIT_S) > 0 for poked in pokes)
    for future in loop.issued:
        future.result(WAIT_S)
    assert mismatches == []


# ---- misuse ----------------------------------------------------------------------------------------------------------


def test_unscaling_twice_is_refused() -> None:
    scaler = GradScaler()
    _, sgd = make_sgd()
    scaler.unscale_(sgd)
    with pytest.raises(UsageError, match=r"after unscale_\(\)"):
        scaler.unscale_(sgd)
    scaler.step(sgd)
    with pytest.raises(UsageError, match=r"after step\(\)"):
        scaler.unscale_(sgd)
    with pytest.raises(UsageError, match="twice"):
        scaler.step(sgd)
    scaler.update()
    scaler.unscale_(sgd)


def test_stepping_twice_in_one_iteration_is_refused_but_not_in_two(loop: Loop) -> None:
    scaler = GradScaler()
    _, sgd = make_sgd()
    loop.step(lambda: scaler.step(sgd)).result(WAIT_S)
    loop.step(lambda: scaler.step(sgd)).result(WAIT_S)

    def twice() -> None:
        scaler.step(sgd)
        scaler.step(sgd)

    with pytest.raises(UsageError, match="twice"):
        loop.step(twice).result(WAIT_S)


def test_float16_gradients_are_refused_and_nothing_is_changed() -> None:
    scaler = GradScaler(init_scale=4.0)
    good, half = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float16))
    good.grad, half.grad = torch.tensor([8.0]), torch.tensor([8.0], dtype=torch.float16)
    sgd = torch.optim.SGD([good, half], lr=1.0)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"optim_dtype=torch\.float32"):
            scaler.step(sgd)
    assert good.grad == 8.0
    half.grad = None
    scaler.step(sgd)
    assert good.item() == -2.0


def test_other_gradients_that_cannot_be_unscaled_are_refused() -> None:
    param = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    param.grad = torch.ones(1, dtype=torch.complex64)
    with pytest.raises(UsageError, match="complex64"):
        GradScaler().unscale_(torch.optim.SGD([param], lr=1.0))


def test_closures_are_refused() -> None:
    _, sgd = make_sgd()
    with pytest.raises(UsageError, match="closure"):
        GradScaler().step(sgd, closure=lambda: 1.0)
    with pytest.raises(UsageError, match="closure"):
        GradScaler().step(sgd, lambda: 1.0)


@pytest.mark.parametrize("method", ["update", "state_dict", "load_state_dict"])
def test_main_thread_methods_are_refused_in_loss_fn_and_step_fn(loop: Loop, method: str) -> None:
    scaler = GradScaler()
    args = [scaler.state_dict()] if method == "load_state_dict" else []
    for run in (loop.losses, lambda function: loop.step(function).result(WAIT_S)):
        with pytest.raises(UsageError, match=rf"{method}\(\) was called in loss_fn or step_fn"):
            run(lambda: getattr(scaler, method)(*args))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"init_scale": 0.0}, ConfigError),
        ({"init_scale": -1.0}, ConfigError),
        ({"init_scale": math.inf}, ConfigError),
        ({"init_scale": math.nan}, ConfigError),
        ({"init_scale": 1e39}, ConfigError),
        ({"init_scale": 1e-44}, ConfigError),
        ({"init_scale": "65536"}, ArgumentTypeError),
        ({"growth_factor": 1.0}, ConfigError),
        ({"growth_factor": math.nan}, ConfigError),
        ({"growth_factor": math.inf}, ConfigError),
        ({"backoff_factor": 1.0}, ConfigError),
        ({"backoff_factor": 0.0}, ConfigError),
        ({"backoff_factor": None}, ArgumentTypeError),
        ({"growth_interval": 0}, ConfigError),
        ({"growth_interval": 2.5}, ArgumentTypeError),
        ({"growth_interval": True}, ArgumentTypeError),
    ],
    ids=str,
)
def test_settings_are_checked_by_constructor_setters_and_load(options: dict[str, Any], error: type[Exception]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(error, match=name):
        GradScaler(**options)
    scaler = GradScaler()
    before = scaler.state_dict()
    if name != "init_scale":
        with pytest.raises(error, match=name):
            getattr(scaler, f"set_{name}")(value)
    with pytest.raises(error, match=name.removeprefix("init_")):
        scaler.load_state_dict(scaler_state(**{name.removeprefix("init_"): value}))
    assert scaler.state_dict() == before


@pytest.mark.parametrize("new_scale", [0.0, math.inf, torch.ones(2), torch.ones((), requires_grad=True)], ids=str)
def test_new_scale_is_checked(new_scale: Any) -> None:
    with pytest.raises(ConfigError, match="new_scale"):
        GradScaler().update(new_scale)


def test_setters_are_read_back() -> None:
    scaler = GradScaler()
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
    assert scaler.is_enabled()


# ---- disabled --------------------------------------------------------------------------------------------------------


def test_a_disabled_scaler_passes_everything_through(loop: Loop) -> None:
    scaler = GradScaler(init_scale=-1.0, enabled=False)
    loss, losses = torch.ones(1), [torch.ones(1)]
    assert scaler.scale(loss) is loss
    assert scaler.scale(losses) is losses
    assert scaler.get_scale() == 1.0
    param, sgd = make_sgd(1)
    param.grad = torch.tensor([math.inf])
    scaler.unscale_(sgd)
    scaler.unscale_(sgd)
    scaler.step(sgd, closure=lambda: 1.0)
    assert param.item() == -math.inf
    scaler.update(3.0)
    scaler.update(is_async=False)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"scale": 3.0})
    assert scaler.get_scale() == 1.0
    assert not scaler.is_enabled()
    assert not copy.deepcopy(scaler).is_enabled()


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["state_dict", "torch.save", "deepcopy", "pickle"])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_resumed_scaler_sees_the_scales_of_the_one_that_goes_on(
    loop: Loop, tmp_path: Any, how: str, is_async: bool
) -> None:
    rng = random.Random(7)

    def run(scalers: list[GradScaler], num_step: int) -> list[list[float]]:
        scales = []
        for _ in range(num_step):
            found_inf = rng.random() < 0.4
            new_scale = 2.0 ** rng.randint(1, 9) if rng.random() < 0.2 else None
            for scaler in scalers:
                loop.step(stepper(scaler, found_inf))
                scaler.update(new_scale, is_async=is_async)
            scales.append([scaler.get_scale() for scaler in scalers])
        return scales

    scaler = GradScaler(init_scale=64.0, growth_interval=2)
    for num_step in range(1, 8):
        run([scaler], num_step)
        before = scaler.get_scale()
        resumed = resume(scaler, how, tmp_path)
        assert scaler.get_scale() == resumed.get_scale() == before
        assert resumed.state_dict() == scaler.state_dict()
        assert all(one == other for one, other in run([scaler, resumed], 6))


def resume(scaler: GradScaler, how: str, tmp_path: Any) -> GradScaler:
    if how == "deepcopy":
        return copy.deepcopy(scaler)
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(scaler))
        assert isinstance(copied, GradScaler)
        return copied
    resumed = GradScaler()
    if how == "torch.save":
        torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
        resumed.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    else:
        resumed.load_state_dict(scaler.state_dict())
    return resumed


def test_state_dicts_are_exchanged_with_torch() -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=40.0, growth_factor=3.0, backoff_factor=0.1, growth_interval=9)
    ours = GradScaler()
    ours.update(7.0)
    ours.load_state_dict(torchs.state_dict())
    ours.update()
    assert ours.get_scale() == 40.0  # the earlier decision was dropped
    assert ours.state_dict()["growth_interval"] == 9
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == torchs.state_dict()


def test_state_dict_waits_for_the_steps_the_deferred_decision_covers(loop: Loop) -> None:
    scaler = GradScaler(init_scale=8.0)
    gate = threading.Event()
    loop.step(stepper(scaler, found_inf=True), gate)
    scaler.update()
    saving = in_a_thread(scaler.state_dict)
    with pytest.raises(TimeoutError):
        saving.result(0.1)
    gate.set()
    state = saving.result(WAIT_S)
    assert state["scale"] == 8.0
    assert state["_deferred"] == {"stepped": True, "found_inf": True, "new_scale": None}


@pytest.mark.parametrize(
    "broken",
    [
        {"scale": 1.0},
        scaler_state(extra=1),
        scaler_state(_deferred={"stepped": True}),
        scaler_state(_growth_tracker=-1),
        scaler_state(_deferred={"stepped": True, "found_inf": False, "new_scale": -1.0}),
    ],
)
def test_broken_state_dicts_are_refused_and_change_nothing(broken: dict[str, Any]) -> None:
    scaler = GradScaler(init_scale=8.0)
    before = scaler.state_dict()
    with pytest.raises(ConfigError):
        scaler.load_state_dict(broken)
    assert scaler.state_dict() == before


def test_an_empty_state_dict_is_refused() -> None:
    with pytest.raises(UsageError, match="disabled"):
        GradScaler().load_state_dict({})


def test_a_copy_listens_for_steps_too(loop: Loop) -> None:
    copied = copy.deepcopy(GradScaler(init_scale=8.0))
    loop.step(stepper(copied, found_inf=True))
    copied.update(is_async=False)
    assert copied.get_scale() == 4.0


def test_attributes_of_the_user_are_copied_too() -> None:
    scaler = GradScaler()
    scaler.note = "mine"  # type: ignore[attr-defined]
    assert copy.deepcopy(scaler).note == "mine"  # type: ignore[attr-defined]
