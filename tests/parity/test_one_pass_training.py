"""Low-precision training through the one-pass optimizer equals a plain loop with float32 masters, to the last bit.

The reference casts gradients to float32, updates masters in numpy (Lion: in torch) and rounds them back. Widths are
odd, so that every tensor ends with an incomplete vector.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_adam import NumpyAdam, NumpyAdamW, NumpySGD
from helpers_parity import (
    Models,
    StalenessReference,
    assert_same,
    assert_same_state,
    batch,
    call_reference,
    clip_in_double,
    microbatches,
    mlp,
    mse,
    seeded,
)
from roundpipe import GradScaler, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, clip_grad_norm_
from roundpipe.optim import SGD, Adam, AdamW, Lion
from roundpipe.optim.lion import PlainLion
from roundpipe.optim.native.kernel import KernelParameter

WIDTH, ROWS, NUM_MICROBATCH = 13, 8, 3
SYNC, ASYNC = [False] * 4, [True] * 5
MIXED = [False, True, True, False, True, False, False, True]
BF16 = torch.bfloat16

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Step = Callable[[torch.optim.Optimizer, list[nn.Parameter]], object]


SLOW = pytest.mark.slow
# Each kind of steps alone is slow: the mixed ones contain them, and test_a_bfloat16_model_with_our_optimizer runs all.
ALL_STEPS = {"sync": SYNC, "async": ASYNC, "mixed": MIXED}


@pytest.fixture(params=[pytest.param(1, marks=SLOW), 3], ids=["1dev", "3dev"])
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[pytest.param(SYNC, marks=SLOW), pytest.param(ASYNC, marks=SLOW), MIXED], ids=ALL_STEPS)
def steps(request: pytest.FixtureRequest) -> list[bool]:
    return list(request.param)


def low_mlp(dtype: torch.dtype = BF16) -> nn.Sequential:
    return mlp(width=WIDTH).to(dtype)


def float_mse(output: Tensor, label: Tensor) -> Tensor:
    return mse(output.float(), label.float())


def data(seed: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    x, y = (batch(ROWS, WIDTH, seed=2 * seed + i).to(dtype) for i in range(2))
    return x, y


def plainly(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.step()
    optimizer.zero_grad()


class Masters(StalenessReference):
    """As in torch, a gradient that is not cleared is added to. `run_step` decides whether it clears them."""

    def step(self, is_async: bool) -> None:
        for master, param in zip(self.masters, self.trainable, strict=True):
            if param.grad is not None:
                new = param.grad.to(master.dtype)
                master.grad = new if master.grad is None else master.grad.add_(new)
                param.grad = None
        self.run_step(self.optimizer)
        self.versions.append(self._snapshot())
        self._show(len(self.versions) - (2 if is_async else 1))


@dataclass
class Pair:
    """A wrapped model and the plain one beside it, each with its optimizer and its own step."""

    model: RoundPipe
    copies: list[nn.Parameter]
    reference: Masters
    optimizer: torch.optim.Optimizer
    step: Step
    dtype: torch.dtype
    loss_fn: Callable[[Any, Any], Any]
    seed: int = 0

    def call(self) -> None:
        x, y = data(self.seed, self.dtype)
        expected = call_reference(self.reference.module, (x,), {}, y, self.loss_fn, NUM_MICROBATCH).loss
        config = microbatches(NUM_MICROBATCH)
        loss = self.model.forward_backward((x,), label=y, loss_fn=self.loss_fn, run_config=config)
        assert_same(loss, expected, f"loss of call {self.seed}")
        self.seed += 1

    def train(self, steps: list[bool], calls: int = 1) -> None:
        for is_async in steps:
            for _ in range(calls):
                self.call()
            self.model.step(self.step, is_async, self.optimizer, self.copies)
            self.reference.step(is_async)

    def check(self) -> None:
        """Weights, optimizer's copies and optimizer state."""
        self.model.synchronize()
        self.reference.synchronize()
        assert_same_state(self.model.model, self.reference.module)
        ours, plain = (side.optimizer.state_dict()["state"] for side in (self, self.reference))
        assert_same(dict(sorted(ours.items())), dict(sorted(plain.items())), "optimizer state")
        masters = [p.detach() for p in self.reference.masters]
        assert_same([p.detach().clone() for p in copy.deepcopy(self.copies)], masters, "deep copies")
        assert_same([p.detach() for p in self.copies], masters, "optimizer's copies")


def pair(
    models: Models,
    num_devices: int,
    ours: MakeOptimizer,
    plain: MakeOptimizer,
    *,
    module: nn.Module | None = None,
    step: Step = plainly,
    plain_step: Step | None = None,
    dtype: torch.dtype = BF16,
    optim_dtype: torch.dtype | None = torch.float32,
    loss_fn: Callable[[Any, Any], Any] = float_mse,
    **options: Any,
) -> Pair:
    module = seeded(lambda: low_mlp(dtype)) if module is None else module
    model = models.wrap_copy(module, num_devices, optim_dtype=optim_dtype, **options)
    reference = Masters(module, plain, optim_dtype)
    reference.run_step = lambda optimizer: (plain_step or step)(optimizer, reference.masters)
    copies = list(model.optim_parameters())
    return Pair(model, copies, reference, ours(copies), step, dtype, loss_fn)


def our_adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Adam(params, lr=0.01)


def plain_adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return NumpyAdam(params, lr=0.01)


def torchs_fused_adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, fused=True)


OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adam": (Adam, NumpyAdam, {"lr": 0.01}),
    "adam-decay": (Adam, NumpyAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam-decoupled": (Adam, NumpyAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adam-amsgrad": (Adam, NumpyAdam, {"lr": 0.02, "amsgrad": True}),
    "adamw": (AdamW, NumpyAdamW, {"lr": 0.01}),
    "adamw-maximize": (AdamW, NumpyAdamW, {"lr": 0.01, "maximize": True}),
    "adamw-all": (
        *(AdamW, NumpyAdamW),
        {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3, "amsgrad": True, "maximize": True},
    ),
    "lion": (Lion, PlainLion, {"lr": 0.003}),
    "lion-all": (Lion, PlainLion, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.3, "maximize": True}),
    "sgd": (SGD, NumpySGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd-momentum": (SGD, NumpySGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "maximize": True}),
    "sgd-nesterov": (SGD, NumpySGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def both(kind: str) -> tuple[MakeOptimizer, MakeOptimizer]:
    """Ours and the plain one."""
    ours, plain, options = OPTIMIZERS[kind]
    return lambda params: ours(params, **options), lambda params: plain(params, **options)


# One of each rule. Only Adam's runs in all tests: what a rule cannot change is tested with it.
of_each_rule = pytest.mark.parametrize("kind", ["adam", "lion", "sgd-momentum"])


# Plain training.


@pytest.mark.parametrize(
    ("num_devices", "steps"),
    [
        pytest.param(1, SYNC, marks=SLOW),
        pytest.param(1, ASYNC, marks=SLOW),
        *[(1, MIXED), (3, SYNC), (3, ASYNC), (3, MIXED)],
    ],
    ids=["1dev-sync", "1dev-async", "1dev-mixed", "3dev-sync", "3dev-async", "3dev-mixed"],
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_bfloat16_model_with_our_optimizer(
    models: Models, num_devices: int, steps: list[bool], kind: str, updates: list[KernelParameter]
) -> None:
    ours, plain, options = OPTIMIZERS[kind]
    made = pair(models, num_devices, lambda p: ours(p, **options), lambda p: plain(p, **options))
    made.train(steps)
    assert all(copy.halves is not None for copy in made.copies), "no copy has taken memory for its values"
    made.check()
    assert len(updates) == len(steps) * len(made.copies), "every update was the kernel's"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["adam", "adamw-all", "lion-all", "sgd-momentum"])
def test_a_model_in_another_precision(
    models: Models, steps: list[bool], dtype: torch.dtype, kind: str, updates: list[KernelParameter]
) -> None:
    ours, plain, options = OPTIMIZERS[kind]
    made = pair(*(models, 3, lambda p: ours(p, **options), lambda p: plain(p, **options)), dtype=dtype)
    made.train(steps)
    made.check()
    assert len(updates) == len(steps) * len(made.copies)


@pytest.mark.parametrize("optim_dtype", [None, torch.float64], ids=str)
def test_copies_that_are_not_float32_are_torchs(
    models: Models, steps: list[bool], optim_dtype: torch.dtype | None, updates: list[KernelParameter]
) -> None:
    made = pair(models, 3, our_adam, torchs_fused_adam, optim_dtype=optim_dtype)
    made.train(steps)
    made.check()
    assert updates == []


@pytest.mark.parametrize("pin_model", ["register", "off"])
def test_weights_that_are_not_moved_train_the_same(models: Models, steps: list[bool], pin_model: str) -> None:
    made = pair(models, 3, our_adam, plain_adam, pin_model=pin_model)
    made.train(steps)
    made.check()


def in_groups(kind: Any, **options: Any) -> MakeOptimizer:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": params[:3], "lr": 0.05},
            {"params": params[3:5], "weight_decay": 0.2, "amsgrad": True},
            {"params": params[5:], "lr": 0.002, "betas": (0.5, 0.9), "maximize": True},
        ]
        return kind(groups, lr=0.01, **options)

    return make


def test_groups_and_a_scheduler(
    models: Models, num_devices: int, steps: list[bool], updates: list[KernelParameter]
) -> None:
    """Groups end in the middle of layers."""
    schedules: dict[int, torch.optim.lr_scheduler.LRScheduler] = {}

    def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        if id(optimizer) not in schedules:
            schedules[id(optimizer)] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        plainly(optimizer, params)
        schedules[id(optimizer)].step()

    made = pair(models, num_devices, in_groups(AdamW), in_groups(NumpyAdamW), step=step)
    made.train(steps)
    made.check()
    assert len(updates) == len(steps) * len(made.copies)


def test_calls_before_a_step_accumulate(models: Models, num_devices: int, steps: list[bool]) -> None:
    made = pair(models, num_devices, our_adam, plain_adam)
    made.train(steps, calls=2)
    made.check()


# Gradients that step_fn does something with.


@pytest.mark.parametrize(
    ("clip", "norm_type"),
    [*((clip_grad_norm_, norm_type) for norm_type in (2.0, 1.0, float("inf"))), (nn.utils.clip_grad_norm_, 2.0)],
    ids=["ours", "ours-1", "ours-inf", "torchs"],
)
@of_each_rule
def test_clipping(models: Models, steps: list[bool], clip: Any, norm_type: float, kind: str) -> None:
    norms: dict[int, list[Tensor]] = {}

    def step_with(how: Any) -> Step:
        def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
            norms.setdefault(id(optimizer), []).append(how(params, 0.01, norm_type))
            plainly(optimizer, params)

        return step

    made = pair(
        *(models, 3, *both(kind)),
        step=step_with(clip),
        plain_step=step_with(clip_in_double if clip is clip_grad_norm_ else nn.utils.clip_grad_norm_),
    )
    made.train(steps)
    made.check()
    assert_same(norms[id(made.optimizer)], norms[id(made.reference.optimizer)], "norms")


@of_each_rule
def test_loss_scaling_with_overflows_in_sync_steps(models: Models, num_devices: int, kind: str) -> None:
    """The scale begins so high that gradients overflow, and falls until they do not."""
    options = {"init_scale": 2.0**121, "growth_interval": 2}
    ours, plain = GradScaler(**options), torch.amp.GradScaler("cpu", **options)
    in_call: dict[str, Any] = {}

    def step_with(scaler: Any, clip: Any) -> Step:
        def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
            scaler.unscale_(optimizer)
            clip(params, 0.1)
            scaler.step(optimizer)
            optimizer.zero_grad()

        return step

    made = pair(
        *(models, num_devices, *both(kind)),
        step=step_with(ours, clip_grad_norm_),
        plain_step=step_with(plain, clip_in_double),
        loss_fn=lambda output, label: in_call["scaler"].scale(1e3 * float_mse(output, label)),
    )
    scales = []
    for seed in range(8):
        x, y = data(seed)
        in_call["scaler"] = plain
        expected = call_reference(made.reference.module, (x,), {}, y, made.loss_fn, NUM_MICROBATCH).loss
        in_call["scaler"] = ours
        loss = made.model.forward_backward((x,), label=y, loss_fn=made.loss_fn, run_config=microbatches(NUM_MICROBATCH))
        assert_same(loss, expected)
        made.model.step(made.step, False, made.optimizer, made.copies)
        ours.update(is_async=False)
        made.reference.step(is_async=False)
        plain.update()
        assert ours.get_scale() == plain.get_scale()
        scales.append(ours.get_scale())
    made.check()
    assert scales[0] < 2.0**121, "it overflowed"
    assert len(made.optimizer.state_dict()["state"]) == len(made.copies), "and then it did not"


def divided(scale: float, rest: Step) -> Step:
    """What a scaler does to the reference's gradients when none of them overflows."""

    def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        for param in params:
            assert param.grad is not None
            param.grad.mul_(1 / scale)
        rest(optimizer, params)

    return step


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@of_each_rule
def test_loss_scaling_in_all_kinds_of_steps(models: Models, steps: list[bool], dtype: torch.dtype, kind: str) -> None:
    scaler = GradScaler(init_scale=2.0**7)

    def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, 0.01)
        scaler.step(optimizer)
        optimizer.zero_grad()

    def clipped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        clip_in_double(params, 0.01)
        plainly(optimizer, params)

    made = pair(
        *(models, 3, *both(kind)),
        step=step,
        plain_step=divided(2.0**7, clipped),
        loss_fn=lambda output, label: float_mse(output, label) * 2.0**7,
        dtype=dtype,
    )
    made.train(steps)
    made.check()


def zeroing(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def never_clearing(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.step()


def clearing_every_second(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.step()
    for param in params[::2]:
        param.grad = None


def twice(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


def with_a_closure(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    def closure() -> Tensor:
        for param in params:
            assert param.grad is not None
            param.grad.mul_(0.5)
        return torch.ones(())

    assert optimizer.step(closure) == 1
    optimizer.zero_grad()


def negating_some(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for param in params[1::3]:
        assert param.grad is not None
        param.grad = -param.grad
    plainly(optimizer, params)


def dropping_some(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for param in params[1::3]:
        param.grad = None
    plainly(optimizer, params)


def writing_after(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    plainly(optimizer, params)
    with torch.no_grad():
        params[0].mul_(0.75)
        params[3].data.add_(0.125)


def writing_before(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        params[2].add_(0.03125)
        params[5].data = params[5].data * 0.5
    plainly(optimizer, params)


def then_by_a_fused_kernel(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """Which writes without leaving a trace in version counters."""
    optimizer.step()
    torch.optim.SGD(params, lr=0.1, fused=True).step()
    optimizer.zero_grad()


STEPS: tuple[Step, ...] = (
    *(zeroing, never_clearing, clearing_every_second, twice, with_a_closure, negating_some, dropping_some),
    *(writing_after, writing_before, then_by_a_fused_kernel),
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@of_each_rule
def test_other_step_functions(models: Models, steps: list[bool], step: Step, kind: str) -> None:
    made = pair(models, 3, *both(kind), step=step)
    made.train(steps)
    made.check()


@pytest.mark.parametrize("clear", [zeroing, never_clearing, clearing_every_second], ids=lambda step: step.__name__)
def test_clipping_counts_gradients_that_were_not_cleared(models: Models, steps: list[bool], clear: Step) -> None:
    def step_with(clip: Any) -> Step:
        return lambda optimizer, params: (clip(params, 0.01), clear(optimizer, params))

    made = pair(
        *(models, 3, our_adam, plain_adam),
        step=step_with(clip_grad_norm_),
        plain_step=step_with(clip_in_double),
    )
    made.train(steps)
    made.check()


@pytest.mark.parametrize("clear", [zeroing, clearing_every_second], ids=lambda step: step.__name__)
def test_unscaling_reaches_gradients_that_were_not_cleared(models: Models, steps: list[bool], clear: Step) -> None:
    scaler = GradScaler(init_scale=2.0**7)

    def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        scaler.unscale_(optimizer)
        clear(optimizer, params)

    made = pair(
        *(models, 3, our_adam, plain_adam),
        step=step,
        plain_step=divided(2.0**7, clear),
        loss_fn=lambda output, label: float_mse(output, label) * 2.0**7,
    )
    made.train(steps)
    made.check()


# Models that are not all alike.


class Seldom(nn.Module):
    """Uses its second linear only while it is told to."""

    uses_both = False

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value = self.always(x)
        return self.seldom(value) if self.uses_both else value


@of_each_rule
def test_a_parameter_without_a_gradient_stays(models: Models, num_devices: int, steps: list[bool], kind: str) -> None:
    """One fused stage: nothing is recomputed when the layers are told otherwise."""
    module = seeded(lambda: nn.Sequential(Seldom(), nn.Tanh(), Seldom(), nn.Linear(WIDTH, WIDTH)).to(BF16))
    config = RoundPipeRunConfig(execute_plan=ModelExecutePlan([], [range(0, 4)]))
    made = pair(models, num_devices, *both(kind), module=module, model_run_config=config)
    for iteration, is_async in enumerate(2 * steps):
        for side in (made.model.model, module):
            side[0].uses_both, side[2].uses_both = iteration == 1, iteration % 3 == 2
        made.train([is_async])
    made.check()
    counts = {int(state["step"]) for state in made.optimizer.state_dict()["state"].values() if "step" in state}
    assert kind != "adam" or len(counts) == 3, "some were stepped less often"


def tied_mlp() -> nn.Sequential:
    module = low_mlp()
    module[3][0].weight = module[0][0].weight
    return module


@of_each_rule
def test_a_weight_that_two_layers_share(models: Models, steps: list[bool], kind: str) -> None:
    """Its gradients are added in another order than autograd adds them, so both sides get them from RoundPipe."""
    results = []
    for make_optimizer in both(kind):
        model = models.wrap(seeded(tied_mlp), 3, optim_dtype=torch.float32)
        copies = list(model.optim_parameters())
        optimizer = make_optimizer(copies)
        for seed, is_async in enumerate(2 * steps):
            x, y = data(seed)
            model.forward_backward((x,), label=y, loss_fn=float_mse, run_config=microbatches(NUM_MICROBATCH))
            model.step(plainly, is_async, optimizer, copies)
        model.synchronize()
        results.append([dict(model.state_dict()), [copy.detach().clone() for copy in copies]])
    assert_same(*results)


def test_frozen_parameters_stay_and_may_thaw(models: Models, num_devices: int, steps: list[bool]) -> None:
    module = seeded(low_mlp)
    for frozen in (module[1], module[2][0].weight):  # a whole layer, and half of one
        frozen.requires_grad_(False)
    made = pair(models, num_devices, our_adam, plain_adam, module=module)
    made.train(steps)
    made.check()
    for side in (made.model.model, module):
        side[0][0].bias.requires_grad_(False)
    made.train(steps)
    made.check()
    for side in (made.model.model, module):
        side[0][0].bias.requires_grad_(True)
    made.train(steps)
    made.check()


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.weight[0]


def test_parameters_that_are_not_contiguous(models: Models, steps: list[bool]) -> None:
    """The reference updates contiguous masters: torch's kernel would take the one layout for the other."""

    def contiguous(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        for param in params:
            param.data = param.data.contiguous()
        return plain_adam(params)

    def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        for param in params:
            assert param.grad is not None
            param.grad = param.grad.contiguous()
        plainly(optimizer, params)

    module = seeded(lambda: nn.Sequential(*[nn.Sequential(Transposed(), nn.Tanh()) for _ in range(3)]).to(BF16))
    assert not module[0][0].weight.is_contiguous()
    made = pair(models, 3, our_adam, contiguous, module=module, step=plainly, plain_step=step)
    made.train(steps)
    made.check()


def test_a_tied_parameter_is_trained_once(models: Models, num_devices: int, steps: list[bool]) -> None:
    """The reference has two parameters for one, and adds up their gradients as RoundPipe says it does."""
    apart = seeded(low_mlp)
    with torch.no_grad():
        apart[3][0].weight.copy_(apart[0][0].weight)
    tied = copy.deepcopy(apart)
    tied[3][0].weight = tied[0][0].weight
    model = models.wrap(tied, num_devices, optim_dtype=torch.float32)
    optimizer = our_adam(list(model.optim_parameters()))
    trained = [param for name, param in apart.named_parameters() if name != "3.0.weight"]
    masters = [nn.Parameter(param.detach().float()) for param in trained]
    plain, versions = plain_adam(masters), [[master.detach().clone() for master in masters]]

    def show(version: int) -> None:
        with torch.no_grad():
            for param, weight in zip(trained, versions[version], strict=True):
                param.copy_(weight)
            apart[3][0].weight.copy_(apart[0][0].weight)

    for seed, is_async in enumerate(steps):
        x, y = data(seed)
        expected = call_reference(apart, (x,), {}, y, float_mse, NUM_MICROBATCH).loss
        config = microbatches(NUM_MICROBATCH)
        assert_same(model.forward_backward((x,), label=y, loss_fn=float_mse, run_config=config), expected)
        model.step(lambda: plainly(optimizer, []), is_async)
        apart[0][0].weight.grad = apart[3][0].weight.grad.add_(apart[0][0].weight.grad)
        for master, param in zip(masters, trained, strict=True):
            master.grad = param.grad.float()
        plainly(plain, masters)
        apart.zero_grad()
        versions.append([master.detach().clone() for master in masters])
        show(len(versions) - (2 if is_async else 1))
    model.synchronize()
    show(-1)
    assert_same_state(model.model, apart)
    assert_same([p.detach() for p in model.optim_parameters()], [p.detach() for p in masters])


# Looking at the copies, and writing into the model, in the middle of training.


def test_values_of_copies_are_right_whenever_they_are_read(models: Models, num_devices: int, steps: list[bool]) -> None:
    """Inside step functions and between them; one copy after the other gets memory, and training stays exact."""
    seen: dict[int, list[Any]] = {}

    def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        own = seen.setdefault(id(optimizer), [])
        position = len(own) % len(params)
        before, grad = params[position].data.clone(), params[position - 1].grad
        assert grad is not None
        own += [before, grad.clone(), params[position].sum().detach()]
        plainly(optimizer, params)
        own += [params[position - 2].detach().clone(), params[position - 2].grad is None]

    made = pair(models, num_devices, our_adam, plain_adam, step=step)
    for is_async in steps:
        made.train([is_async])
        made.model.synchronize()
        made.reference.synchronize()
        position = made.seed % len(made.copies)
        assert_same(made.copies[position].sum().detach(), made.reference.masters[position].sum().detach())
        assert all(param.grad is None for param in made.copies)
    made.train(steps)
    made.check()
    assert_same(seen[id(made.optimizer)], seen[id(made.reference.optimizer)], "what step functions saw")


def test_deep_copies_and_pickles_of_copies(models: Models, steps: list[bool]) -> None:
    made = pair(models, 3, our_adam, plain_adam)
    made.train(steps)
    made.model.synchronize()
    masters = [param.detach().clone() for param in made.reference.masters]
    saved = io.BytesIO()
    torch.save(made.copies[:2], saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    twins = [*loaded, *pickle.loads(pickle.dumps(made.copies[2:4])), *copy.deepcopy(made.copies[4:])]
    assert_same([twin.detach() for twin in twins], masters)
    with torch.no_grad():
        for twin in twins:
            twin.fill_(9.0)  # must change neither the copy nor the model
    made.reference.synchronize()
    made.train(steps)
    made.check()


def test_what_the_user_writes_into_the_model_counts(models: Models, num_devices: int, steps: list[bool]) -> None:
    made = pair(models, num_devices, our_adam, plain_adam)
    for iteration in range(3):
        made.train(steps)
        made.model.synchronize()
        made.reference.synchronize()
        written = batch(WIDTH, WIDTH, seed=iteration).to(BF16) / 4
        with torch.no_grad():
            for side in (made.model.model, made.reference.module):
                side[iteration][0].weight.copy_(written)
            made.reference.masters[2 * iteration].copy_(written)
        made.reference.versions[-1] = made.reference._snapshot()
    made.train(steps)
    made.check()


def test_what_the_user_writes_between_asynchronous_steps_counts(models: Models, num_devices: int) -> None:
    """Without synchronize(): the weights the user sees, and those that are due, become what he writes."""
    made = pair(models, num_devices, our_adam, plain_adam)
    for iteration in range(4):
        made.train(ASYNC[: 2 + iteration % 2])
        assert_same(dict(made.model.state_dict()), dict(made.reference.module.state_dict()), "what calls read")
        written = batch(WIDTH, WIDTH, seed=iteration).to(BF16) / 4
        with torch.no_grad():
            for side in (made.model.model, made.reference.module):
                side[iteration][0].weight.copy_(written)
            made.reference.masters[2 * iteration].copy_(written)
        made.reference.versions[-1] = made.reference._snapshot()
    made.train(ASYNC)
    made.check()


def test_a_state_dict_of_the_model_loaded_in_the_middle(models: Models, steps: list[bool]) -> None:
    made = pair(models, 3, our_adam, plain_adam)
    made.train(steps)
    state = seeded(low_mlp, seed=11).state_dict()
    made.model.load_state_dict(state)
    made.reference.module.load_state_dict(state)
    with torch.no_grad():
        for master, param in zip(made.reference.masters, made.reference.trainable, strict=True):
            master.copy_(param)
    made.reference.versions = [made.reference._snapshot()]
    made.train(steps)
    made.check()


# Optimizers.


@pytest.mark.parametrize("kind", ["adamw-all", "lion-all", "sgd-momentum"])
def test_an_optimizers_state_is_saved_and_loaded_in_the_middle(
    models: Models, num_devices: int, steps: list[bool], kind: str, updates: list[KernelParameter]
) -> None:
    ours, plain, options = OPTIMIZERS[kind]
    made = pair(models, num_devices, lambda p: ours(p, **options), lambda p: plain(p, **options))
    made.train(steps)
    made.model.synchronize()
    saved = copy.deepcopy(made.optimizer.state_dict())
    assert_same(saved["state"], made.reference.optimizer.state_dict()["state"])
    made.optimizer = ours(made.copies, lr=5.0)
    made.optimizer.load_state_dict(saved)
    assert all(copy.halves is not None for copy in made.copies), "no values were needed for that"
    made.reference.synchronize()
    made.train(steps)
    made.check()
    assert len(updates) == 2 * len(steps) * len(made.copies)


def test_training_goes_on_in_another_model(models: Models, steps: list[bool]) -> None:
    """Weights, optimizer's copies and optimizer state make a whole checkpoint."""
    made = pair(models, 3, our_adam, plain_adam)
    made.train(steps)
    made.model.synchronize()
    made.reference.synchronize()
    weights, states = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))
    saved = [param.detach().clone() for param in made.copies]
    made.model = models.wrap(seeded(low_mlp, seed=12), 3, optim_dtype=torch.float32)
    made.model.load_state_dict(weights)
    made.copies = list(made.model.optim_parameters())
    with torch.no_grad():
        for param, value in zip(made.copies, saved, strict=True):
            param.copy_(value)
    made.optimizer = our_adam(made.copies)
    made.optimizer.load_state_dict(states)
    made.train(steps)
    made.check()


OTHERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adam-fused": torchs_fused_adam,
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("other", OTHERS)
def test_torchs_optimizers_on_the_same_copies(
    models: Models, steps: list[bool], other: str, updates: list[KernelParameter]
) -> None:
    made = pair(models, 3, OTHERS[other], OTHERS[other])
    made.train(steps)
    made.check()
    assert updates == []


@pytest.mark.parametrize("other", OTHERS)
def test_two_optimizers_over_halves_of_the_copies(models: Models, steps: list[bool], other: str) -> None:
    """The halves meet in every layer: weights belong to one, biases to the other."""
    of_biases: dict[int, torch.optim.Optimizer] = {}

    def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        if id(optimizer) not in of_biases:
            of_biases[id(optimizer)] = OTHERS[other](params[1::2])
        of_biases[id(optimizer)].step()
        plainly(optimizer, params)
        of_biases[id(optimizer)].zero_grad()

    made = pair(*(models, 3, lambda params: our_adam(params[::2]), lambda params: plain_adam(params[::2])), step=step)
    made.train(steps)
    made.check()


def test_optimizers_that_take_turns(models: Models, steps: list[bool]) -> None:
    """Ours, torch's on the same copies, ours again."""
    made = pair(models, 3, our_adam, plain_adam)
    for _ in range(2):
        made.train(steps)
        first, plain = made.optimizer, made.reference.optimizer
        made.optimizer = OTHERS["sgd"](made.copies)
        made.reference.optimizer = OTHERS["sgd"](made.reference.masters)
        made.train(steps)
        made.optimizer, made.reference.optimizer = first, plain
    made.train(steps)
    made.check()
