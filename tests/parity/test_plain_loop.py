"""The ordinary training loop: backward(), optimizer.step() and zero_grad() outside step_fn.

It must train exactly as `step(step_fn, is_async=False)` does, and in float32 as plain PyTorch does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same, batch, microbatches, mlp, seeded
from roundpipe import (
    GradScaler,
    RoundPipe,
    clip_grad_norm_,
    optim,
    wrap_model_to_roundpipe,
)
from roundpipe.errors import ClosedError, StaleGraphError, UsageError
from roundpipe.store import OptimizerCopy

WIDTH = 5
STEPS = 4
Params = Iterable[Tensor]
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def torch_adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def our_adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return optim.AdamW(params, lr=0.01)


def our_lion(params: list[Tensor]) -> torch.optim.Optimizer:
    return optim.Lion(params, lr=0.003)


def our_sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


OPTIMIZERS = pytest.mark.parametrize("make_optimizer", [sgd, torch_adam, our_adamw, our_lion, our_sgd])
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "optim_dtype"), [(torch.float32, None), (torch.bfloat16, torch.float32)], ids=["float32", "bf16"]
)


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Models to close after the test."""
    models: list[Any] = []
    yield models
    for model in models:
        model.close()


class Job:
    """A small model in training, through RoundPipe; `data` gives the same batches to every job of a test."""

    def __init__(
        self,
        opened: list[Any],
        make_optimizer: MakeOptimizer = sgd,
        dtype: torch.dtype = torch.float32,
        optim_dtype: torch.dtype | None = None,
        *,
        on_own_parameters: bool = False,
        num_devices: int = 3,
        num_microbatch: int = 2,
    ) -> None:
        self.network = seeded(lambda: mlp(4, WIDTH)).to(dtype)
        self.model = RoundPipe(
            self.network,
            optim_dtype,
            devices=["cpu"] * num_devices,
            model_run_config=microbatches(num_microbatch),
        )
        opened.append(self.model)
        params = self.model.parameters() if on_own_parameters else self.model.optim_parameters()
        self.params = list(params)
        self.optimizer = make_optimizer(self.params)
        self.dtype = dtype

    def loss(self, step: int) -> Tensor:
        points, labels = data(step, self.dtype)
        return nn.functional.mse_loss(self.model(points).float(), labels.float())

    def weights(self) -> dict[str, Tensor]:
        self.model.synchronize()
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def data(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return batch(6, WIDTH, seed=step).to(dtype), batch(6, WIDTH, seed=100 + step).to(dtype)


def train_in_step_fn(job: Job, before: Callable[[Params], object] = lambda params: None) -> list[Tensor]:
    def step_fn() -> None:
        before(job.model.optim_parameters())
        job.optimizer.step()
        job.optimizer.zero_grad()

    losses = []
    for step in range(STEPS):
        loss = job.loss(step)
        loss.backward()
        job.model.step(step_fn, is_async=False)
        losses.append(loss.detach())
    return losses


def train_plainly(job: Job, before: Callable[[Params], object] = lambda params: None) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        loss = job.loss(step)
        loss.backward()
        before(job.params)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def train_plain_pytorch(make_optimizer: MakeOptimizer) -> tuple[list[Tensor], dict[str, Tensor]]:
    network = seeded(lambda: mlp(4, WIDTH))
    optimizer = make_optimizer(list(network.parameters()))
    losses = []
    for step in range(STEPS):
        points, labels = data(step)
        loss = nn.functional.mse_loss(network(points), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, dict(network.state_dict())


def torch_clip(params: Params) -> None:
    torch.nn.utils.clip_grad_norm_(list(params), 0.05)


def our_clip(params: Params) -> None:
    clip_grad_norm_(list(params), 0.05)


def nothing(params: Params) -> None:
    return


@OPTIMIZERS
@PRECISIONS
@pytest.mark.parametrize("before", [nothing, torch_clip, our_clip])
def test_the_plain_loop_equals_exact_steps(
    opened: list[Any],
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype,
    optim_dtype: torch.dtype | None,
    before: Callable[[Params], None],
) -> None:
    reference = Job(opened, make_optimizer, dtype, optim_dtype)
    job = Job(opened, make_optimizer, dtype, optim_dtype)
    assert_same(train_plainly(job, before), train_in_step_fn(reference, before))
    assert_same(job.weights(), reference.weights())


@OPTIMIZERS
@pytest.mark.parametrize("on_own_parameters", [False, True])
def test_the_plain_loop_equals_plain_pytorch_in_float32(
    opened: list[Any], make_optimizer: MakeOptimizer, on_own_parameters: bool
) -> None:
    job = Job(opened, make_optimizer, on_own_parameters=on_own_parameters, num_microbatch=1)
    losses, weights = train_plain_pytorch(make_optimizer)
    assert_same(train_plainly(job), losses)
    assert_same(job.weights(), weights)


@OPTIMIZERS
@pytest.mark.parametrize("before", [nothing, torch_clip])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_on_the_models_own_parameters_trains_them(
    opened: list[Any], make_optimizer: MakeOptimizer, before: Callable[[Params], None], dtype: torch.dtype
) -> None:
    reference, job = Job(opened, make_optimizer, dtype), Job(opened, make_optimizer, dtype, on_own_parameters=True)
    assert_same(train_plainly(job, before), train_in_step_fn(reference, before))
    assert_same(job.weights(), reference.weights())


def test_gradients_of_forward_backward_are_stepped_and_clipped_alike(opened: list[Any]) -> None:
    """The call returns before its gradients are there; reading, clipping and stepping wait for them."""

    def train(job: Job, params: Callable[[], Params]) -> dict[str, Tensor]:
        for step in range(STEPS):
            points, labels = data(step)
            job.model.forward_backward((points,), label=labels, loss_fn=nn.functional.mse_loss)
            torch.nn.utils.clip_grad_norm_(list(params()), 0.05)
            job.optimizer.step()
            job.optimizer.zero_grad()
        return job.weights()

    reference, on_copies, on_own = Job(opened), Job(opened), Job(opened, on_own_parameters=True)

    def step_fn() -> None:
        torch_clip(reference.params)
        reference.optimizer.step()
        reference.optimizer.zero_grad()

    for step in range(STEPS):
        points, labels = data(step)
        reference.model.forward_backward((points,), label=labels, loss_fn=nn.functional.mse_loss)
        reference.model.step(step_fn, is_async=False)
    assert_same(train(on_copies, on_copies.model.optim_parameters), reference.weights())
    assert_same(train(on_own, on_own.model.parameters), reference.weights())


def test_an_optimizer_on_low_precision_parameters_beside_float32_copies_is_refused(opened: list[Any]) -> None:
    job = Job(opened, dtype=torch.bfloat16, optim_dtype=torch.float32, on_own_parameters=True)
    before = job.weights()
    job.loss(0).backward()
    with pytest.raises(
        UsageError, match=r"'0\.0\.weight' is one, torch\.bfloat16.*optim_dtype=torch\.float32.*optim_p"
    ):
        job.optimizer.step()
    assert_same(job.weights(), before)
    assert job.params[0].grad is not None


def test_copies_and_parameters_of_one_model_in_one_optimizer_are_refused(opened: list[Any]) -> None:
    job = Job(opened)
    optimizer = sgd([*list(job.model.parameters())[:2], *job.params[2:]])
    job.loss(0).backward()
    with pytest.raises(UsageError, match="one of the two"):
        optimizer.step()


@PRECISIONS
def test_a_scaler_works_in_the_plain_loop(
    opened: list[Any], dtype: torch.dtype, optim_dtype: torch.dtype | None
) -> None:
    def train(job: Job, *, plainly: bool) -> tuple[dict[str, Tensor], float]:
        scaler = GradScaler(init_scale=2.0**8, growth_interval=2)

        def step_fn() -> None:
            scaler.unscale_(job.optimizer)
            clip_grad_norm_(job.model, 0.05)
            scaler.step(job.optimizer)
            job.optimizer.zero_grad()

        for step in range(STEPS + 2):
            loss = scaler.scale(job.loss(step))
            (loss * float("inf") if step == 2 else loss).backward()  # one step is skipped
            if plainly:
                step_fn()
            else:
                job.model.step(step_fn, is_async=False)
            scaler.update(is_async=False)
        return job.weights(), scaler.get_scale()

    reference, job = (Job(opened, our_adamw, dtype, optim_dtype) for _ in range(2))
    ours, expected = train(job, plainly=True), train(reference, plainly=False)
    assert_same(ours[0], expected[0])
    assert ours[1] == expected[1] != 2.0**8


def test_a_schedule_works_in_the_plain_loop(opened: list[Any]) -> None:
    job = Job(opened, num_microbatch=1)
    network = seeded(lambda: mlp(4, WIDTH))
    optimizer = sgd(list(network.parameters()))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.1) for each in (job.optimizer, optimizer)]
    for step in range(STEPS):
        points, labels = data(step)
        job.loss(step).backward()
        nn.functional.mse_loss(network(points), labels).backward()
        for stepped, schedule in zip((job.optimizer, optimizer), schedules, strict=True):
            stepped.step()
            schedule.step()
            stepped.zero_grad()
    assert_same(job.weights(), dict(network.state_dict()))


# Gradients between backward and step.


@PRECISIONS
def test_reading_gradients_changes_no_number(
    opened: list[Any], dtype: torch.dtype, optim_dtype: torch.dtype | None
) -> None:
    def train(job: Job, look: Callable[[], object], *, is_async: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        def step_fn() -> None:
            job.optimizer.step()
            job.optimizer.zero_grad()

        losses = []
        for step in range(STEPS):
            for part in range(3):  # sums over calls depend on the precision they are made in
                loss = job.loss(10 * step + part)
                look()
                loss.backward()
                look()
                losses.append(loss.detach())
            job.model.step(step_fn, is_async)
            look()
        return losses, job.weights()

    for is_async in (True, False):
        reference, job = (Job(opened, our_adamw, dtype, optim_dtype) for _ in range(2))
        seen = []

        def look(job: Job = job, seen: list[float] = seen) -> None:
            seen.append(sum(float(p.grad.float().norm()) for p in job.params if p.grad is not None))
            clip_grad_norm_(job.params, float("inf"))  # only measures

        assert_same(train(job, look, is_async=is_async), train(reference, lambda: None, is_async=is_async))
        assert any(seen)


def test_a_gradient_that_was_changed_is_stepped_with(opened: list[Any]) -> None:
    def halve(params: Params) -> None:
        for param in params:
            assert param.grad is not None
            param.grad.data.mul_(0.5)  # leaves no trace in a version counter

    reference, job, other = Job(opened), Job(opened), Job(opened)
    expected = train_in_step_fn(reference, halve)
    assert_same(train_plainly(job, halve), expected)

    def halve_and_evaluate(params: Params) -> None:
        halve(params)
        with torch.no_grad():
            other.model(data(0)[0])  # a call in between ends the view

    assert_same(train_plainly(other, halve_and_evaluate), expected)
    assert_same(job.weights(), reference.weights())
    assert_same(other.weights(), reference.weights())


def test_gradients_add_up_over_calls_and_stay_until_they_are_cleared(opened: list[Any]) -> None:
    """Two calls are summed for the first and the last step; the second step leaves its gradients to the third."""
    job = Job(opened, num_microbatch=1)
    network = seeded(lambda: mlp(4, WIDTH))
    optimizer = sgd(list(network.parameters()))
    for step, (num_calls, clears) in enumerate([(2, True), (1, False), (1, True), (2, True)]):
        for part in range(num_calls):
            points, labels = data(10 * step + part)
            job.loss(10 * step + part).backward()
            nn.functional.mse_loss(network(points), labels).backward()
        for stepped in (job.optimizer, optimizer):
            stepped.step()
            if clears:
                stepped.zero_grad()
        assert_same([p.grad for p in job.params], [p.grad for p in network.parameters()])
    assert_same(job.weights(), dict(network.state_dict()))


@pytest.mark.parametrize("clear", ["optimizer", "optimizer to zeros", "model", "each"])
def test_cleared_gradients_are_not_stepped_with(opened: list[Any], clear: str) -> None:
    job, reference = Job(opened), Job(opened)
    for step in range(STEPS):
        job.loss(50 + step).backward()
        match clear:
            case "optimizer":
                job.optimizer.zero_grad()
            case "optimizer to zeros":
                job.optimizer.zero_grad(set_to_none=False)
            case "model":
                job.model.zero_grad()
            case "each":
                for param in job.params:
                    param.grad = None
        for each in (job, reference):
            each.loss(step).backward()
            each.optimizer.step()
            each.optimizer.zero_grad()
    assert_same(job.weights(), reference.weights())


def test_zero_grad_of_the_model_clears_what_a_plain_step_has_left(opened: list[Any]) -> None:
    job, reference = Job(opened), Job(opened)
    for step in range(STEPS):
        for each in (job, reference):
            each.loss(step).backward()
            each.optimizer.step()
        job.model.zero_grad()
        reference.optimizer.zero_grad()
    assert_same(job.weights(), reference.weights())


@pytest.mark.parametrize("make_optimizer", [sgd, our_adamw])
def test_zero_grad_behind_an_asynchronous_step_does_not_take_its_gradients(
    opened: list[Any], make_optimizer: MakeOptimizer
) -> None:
    job, reference = Job(opened, make_optimizer), Job(opened, make_optimizer)

    def step_and_clear() -> None:
        reference.optimizer.step()
        reference.optimizer.zero_grad()

    for step in range(STEPS):
        job.loss(step).backward()
        job.model.step(job.optimizer.step)
        job.optimizer.zero_grad()
        reference.loss(step).backward()
        reference.model.step(step_and_clear)
    assert_same(job.weights(), reference.weights())


def test_backward_fills_the_gradients_of_the_models_own_parameters(opened: list[Any]) -> None:
    job = Job(opened, num_microbatch=1)
    network = seeded(lambda: mlp(4, WIDTH))
    points, labels = data(0)
    nn.functional.mse_loss(network(points), labels).backward()
    job.loss(0).backward()
    assert_same([p.grad for p in job.network.parameters()], [p.grad for p in network.parameters()])


def test_a_plain_step_keeps_halved_masters_and_low_precision_gradients(opened: list[Any]) -> None:
    """The plain loop costs no float32 gradients and no float32 masters where our optimizer works in one pass."""
    job = Job(opened, our_adamw, torch.bfloat16, torch.float32)
    train_plainly(job, our_clip)
    assert all(isinstance(param, OptimizerCopy) and param.halves is not None for param in job.params)
    job.loss(0).backward()
    our_clip(job.params)
    job.optimizer.step()
    assert not any(torch.Tensor.grad.__get__(param) is not None for param in job.params)


# Optimizers and models that do not come in pairs.


def test_two_optimizers_of_one_model_both_step(opened: list[Any]) -> None:
    job = Job(opened, num_microbatch=1)
    network = seeded(lambda: mlp(4, WIDTH))
    ours = [sgd(job.params[:3]), our_adamw(job.params[3:])]
    params = list(network.parameters())
    plain = [sgd(params[:3]), our_adamw(params[3:])]
    for step in range(STEPS):
        points, labels = data(step)
        job.loss(step).backward()
        nn.functional.mse_loss(network(points), labels).backward()
        for optimizer in (*ours, *plain):
            optimizer.step()
        for optimizer in (*ours, *plain):
            optimizer.zero_grad()
    assert_same(job.weights(), dict(network.state_dict()))


def test_one_optimizer_steps_two_models(opened: list[Any]) -> None:
    first, second = Job(opened), Job(opened, num_devices=2)
    both = sgd([*first.params, *second.params])
    references = [Job(opened), Job(opened, num_devices=2)]
    for step in range(STEPS):
        (first.loss(step) + second.loss(step + 1)).backward()
        both.step()
        both.zero_grad()
        for offset, reference in enumerate(references):
            reference.loss(step + offset).backward()
            reference.optimizer.step()
            reference.optimizer.zero_grad()
    assert_same(first.weights(), references[0].weights())
    assert_same(second.weights(), references[1].weights())


def test_an_optimizer_of_another_model_in_step_fn_is_refused(opened: list[Any]) -> None:
    first, second = Job(opened), Job(opened, num_devices=2)
    both = sgd([*first.params, *second.params])
    (first.loss(0) + second.loss(0)).backward()
    with pytest.raises(UsageError, match="another model than the one whose step runs"):
        first.model.step(both.step, is_async=False)


def test_plain_and_asynchronous_steps_follow_each_other(opened: list[Any]) -> None:
    job, reference = Job(opened, our_adamw), Job(opened, our_adamw)

    def step_fn_of(each: Job) -> Callable[[], None]:
        def step_fn() -> None:
            each.optimizer.step()
            each.optimizer.zero_grad()

        return step_fn

    losses: list[list[Tensor]] = [[], []]
    for step in range(3 * STEPS):
        for each, seen in zip((job, reference), losses, strict=True):
            loss = each.loss(step)
            seen.append(loss.detach())
            loss.backward()
        is_async = step % 3 != 0
        if is_async or step % 2:
            job.model.step(step_fn_of(job), is_async)
        else:
            step_fn_of(job)()
        reference.model.step(step_fn_of(reference), is_async)
    assert_same(losses[0], losses[1])
    assert_same(job.weights(), reference.weights())


def test_a_model_wrapped_part_by_part_trains_in_the_plain_loop(opened: list[Any]) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.first, self.second = mlp(2, WIDTH), mlp(2, WIDTH)

        def forward(self, points: Tensor) -> Tensor:
            return self.second(self.first(points) * self.scale)

    network = seeded(Parts)
    plain = copy.deepcopy(network)
    model = wrap_model_to_roundpipe(network, devices=["cpu"] * 2, model_run_config=microbatches(1), lower_threshold=64)
    opened.append(model)
    optimizer, plain_optimizer = sgd(list(model.optim_parameters())), sgd(list(plain.parameters()))
    for step in range(STEPS):
        points, labels = data(step)
        for run, stepped in ((model, optimizer), (plain, plain_optimizer)):
            nn.functional.mse_loss(run(points), labels).backward()
            stepped.step()
            stepped.zero_grad()
    model.synchronize()
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    late = nn.functional.mse_loss(model(data(0)[0]), data(0)[1])
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|updated between this forward"):
        late.backward()


@pytest.mark.parametrize("on_own_parameters", [False, True])
@pytest.mark.parametrize("kind", ["adam", "lbfgs"])
def test_closures_see_weights_and_gradients_that_are_up_to_date(
    opened: list[Any], kind: str, on_own_parameters: bool
) -> None:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch_adam(params) if kind == "adam" else torch.optim.LBFGS(params, max_iter=4)

    job = Job(opened, make, on_own_parameters=on_own_parameters, num_microbatch=1)
    network = seeded(lambda: mlp(4, WIDTH))
    optimizer = make(list(network.parameters()))
    for step in range(STEPS):
        points, labels = data(step)

        def ours(step: int = step) -> float:
            job.optimizer.zero_grad()
            loss = job.loss(step)
            loss.backward()
            return loss.item()

        def plain(points: Tensor = points, labels: Tensor = labels) -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(network(points), labels)
            loss.backward()
            return loss.item()

        assert job.optimizer.step(ours) == optimizer.step(plain)
    assert_same(job.weights(), dict(network.state_dict()))


# What cannot work.


class Raising(torch.optim.SGD):
    """Updates two parameters, then raises, as often as it is told to."""

    failures = 1

    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        if self.failures:
            self.failures -= 1
            with torch.no_grad():
                for param in params[:2]:
                    param.sub_(param.grad, alpha=0.5)
            raise ValueError("no more")
        super().step(closure)


@pytest.mark.parametrize("on_own_parameters", [False, True])
def test_an_optimizer_that_raises_leaves_gradients_and_can_step_again(
    opened: list[Any], on_own_parameters: bool
) -> None:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        return Raising(params, lr=0.1)

    job = Job(opened, make, on_own_parameters=on_own_parameters, num_microbatch=1)
    network = seeded(lambda: mlp(4, WIDTH))
    optimizer = make(list(network.parameters()))
    for step in range(3):
        points, labels = data(step)
        job.loss(step).backward()
        nn.functional.mse_loss(network(points), labels).backward()
        for stepped in (job.optimizer, optimizer):
            if step == 0:
                with pytest.raises(ValueError, match="no more"):
                    stepped.step()
            stepped.step()
            stepped.zero_grad()
    assert_same(job.weights(), dict(network.state_dict()))


def test_the_model_works_after_an_optimizer_has_raised(opened: list[Any]) -> None:
    job = Job(opened, lambda params: Raising(params, lr=0.1))
    job.loss(0).backward()
    with pytest.raises(ValueError, match="no more"):
        job.optimizer.step()
    job.optimizer.zero_grad()
    assert all(param.grad is None for param in job.params)
    assert torch.isfinite(train_plainly(job)[-1])


@pytest.mark.parametrize("on_own_parameters", [False, True])
def test_backward_after_a_step_is_refused(opened: list[Any], on_own_parameters: bool) -> None:
    job = Job(opened, on_own_parameters=on_own_parameters)
    early, late = job.loss(0), job.loss(1)
    early.backward()
    job.optimizer.step()
    with pytest.raises(StaleGraphError, match="call backward\\(\\) before step\\(\\)"):
        late.backward()


def test_calling_the_model_from_inside_an_optimizer_is_refused(opened: list[Any]) -> None:
    class Curious(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            job.model(data(0)[0])

    job = Job(opened, lambda params: Curious(params, lr=0.1))
    job.loss(0).backward()
    with pytest.raises(UsageError, match=r"during optimizer\.step\(\)"):
        job.optimizer.step()
    job.model.synchronize()


def test_a_step_in_a_gradient_hook_is_refused(opened: list[Any]) -> None:
    job = Job(opened)
    job.network[0][0].weight.register_hook(lambda gradient: job.optimizer.step())
    with pytest.raises(UsageError, match="in a gradient hook"):
        job.loss(0).backward()


def test_an_optimizer_of_a_closed_model_is_refused(opened: list[Any]) -> None:
    job = Job(opened)
    job.loss(0).backward()
    job.model.close()
    with pytest.raises(ClosedError, match="would train nothing"):
        job.optimizer.step()


def test_a_failed_call_is_raised_by_the_plain_step(opened: list[Any]) -> None:
    def fail_in_backward(outputs: Tensor, labels: Tensor) -> Tensor:
        outputs.register_hook(raise_error)
        return nn.functional.mse_loss(outputs, labels)

    def raise_error(gradient: Tensor) -> None:
        raise ValueError("in backward")

    job = Job(opened)
    points, labels = data(0)
    with pytest.raises(ValueError, match="in backward"):  # noqa: PT012 - the call may return before it fails
        job.model.forward_backward((points,), label=labels, loss_fn=fail_in_backward)
        job.optimizer.step()
    assert_same(train_plainly(job), train_plainly(Job(opened)))


def test_optimizers_of_ordinary_tensors_are_left_alone(opened: list[Any]) -> None:
    Job(opened)
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.sum().backward()
    optimizer.step()
    assert_same(param.detach(), torch.zeros(3))
