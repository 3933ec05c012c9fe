"""A call of a form not met before may change the layers of a model in the middle of its training; nothing else changes.

Weights, optimizer state and losses are those of a plain loop, to the last bit; after an asynchronous step a call of a
new form, too, reads weights that are one step old.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_adam import NumpyAdam
from helpers_parity import StalenessReference, assert_same, assert_same_grads, call_reference
from helpers_slow import slow_except
from helpers_split import Block, Inputs, SplitModels, own_loss
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, StaleGraphError
from roundpipe.optim import Adam

WIDTH = 16
NUM_MICROBATCH = 2
BARE, HINT, BOTH = "bare", "hint", "both"
MIXED = [True, True, False, True, False, True]
STEPS = {"sync": [False] * 6, "async": [True] * 6, "mixed": MIXED}  # whether asynchronous
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Growing(nn.Module):
    """With a hint the model runs code between blocks, with a parameter at each place; with two, also before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.scales = nn.ParameterList([nn.Parameter(1 + 0.1 * torch.rand(WIDTH)) for _ in range(2)])
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hint: Tensor | None = None, more: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            h = block(h)
            if hint is not None and i < 2:
                h = h * self.scales[i] + hint
        return self.head(h if more is None else h + self.extra(more))


NUM_LAYERS = {BARE: 5, HINT: 7, BOTH: 7}


def inputs_of(form: str, seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    x, hint, more = (torch.randn(4, WIDTH, generator=generator).to(dtype) for _ in range(3))
    return {BARE: {"x": x}, HINT: {"x": x, "hint": hint}, BOTH: {"x": x, "hint": hint, "more": more}}[form]


def float_loss(output: Tensor, label: Any) -> Tensor:
    return output.float().square().mean()


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def our_adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Adam(params, lr=0.01)


def torchs_adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return NumpyAdam(params, lr=0.01)


@dataclass
class Pair:
    """A wrapped model and the plain one beside it, each with its optimizer."""

    model: RoundPipe
    reference: StalenessReference
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    seed: int = 0

    def call(self, form: str) -> None:
        self.seed += 1
        inputs = inputs_of(form, self.seed, self.dtype)
        expected = call_reference(self.reference.module, (), inputs, None, float_loss, NUM_MICROBATCH).loss
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
        loss = self.model.forward_backward((), inputs, None, float_loss, run_config=config)
        assert_same(loss, expected, f"loss of call {self.seed}, {form}")

    def step(self, is_async: bool) -> None:
        def step_fn() -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.model.step(step_fn, is_async)
        self.reference.step(is_async)

    def check(self) -> None:
        """Weights, the optimizer's copies and its state."""
        self.model.synchronize()
        self.reference.synchronize()
        assert_same(dict(self.model.state_dict()), dict(self.reference.module.state_dict()), "weights")
        copies = [param.detach() for param in self.model.optim_parameters()]
        assert_same(copies, [param.detach() for param in self.reference.masters], "optimizer's copies")
        ours, plain = self.optimizer.state_dict()["state"], self.reference.optimizer.state_dict()["state"]
        assert_same(dict(sorted(ours.items())), dict(sorted(plain.items())), "optimizer state")


def pair(
    models: SplitModels,
    num_devices: int,
    ours: MakeOptimizer = adamw,
    plain: MakeOptimizer | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    optim_dtype: torch.dtype | None = None,
    module: nn.Module | None = None,
    first: str = BARE,
    **options: Any,
) -> Pair:
    torch.manual_seed(3)
    module = (Growing() if module is None else module).to(dtype)
    example = inputs_of(first, 0, dtype)
    model = models.wrap(copy.deepcopy(module), example, num_devices, optim_dtype=optim_dtype, **options)
    reference = StalenessReference(module, plain or ours, optim_dtype)
    return Pair(model, reference, ours(list(model.optim_parameters())), dtype)


@pytest.fixture(params=[1, 3], ids=["1dev", "3dev"])
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def assert_looks_right(model: RoundPipe, form: str) -> None:
    module = model.original_model
    assert module is not None
    assert model.num_layers == len(model.model) == NUM_LAYERS[form]
    assert f"layers={NUM_LAYERS[form]}" in model.extra_repr()
    assert list(model.state_dict()) == list(module.state_dict())
    named = dict(module.named_parameters())
    assert {name: id(param) for name, param in model.named_parameters()} == {n: id(p) for n, p in named.items()}
    assert list(dict(model.optim_named_parameters())) == list(named)
    assert {id(param) for param in named.values()} <= {id(param) for param in model.model.parameters()}
    with OptimizerCtx():
        assert list(map(id, model.parameters())) == [id(p) for _, p in model.optim_named_parameters()]


# Training over a change.


# Every pin mode with every kind of step, on one device or three.
SCENES = [
    *((1, "sync", "alloc"), (3, "async", "alloc"), (1, "mixed", "alloc")),
    *((3, "sync", "register"), (1, "async", "register"), (3, "mixed", "register")),
    *((1, "sync", "off"), (3, "async", "off"), (1, "mixed", "off")),
]
FAST_SCENES = [(3, "async", "alloc"), (3, "mixed", "register"), (1, "sync", "off")]


@pytest.mark.parametrize(("num_devices", "steps", "pin_model"), slow_except(FAST_SCENES, SCENES))
def test_weights_and_optimizer_state_survive_a_change_of_layers(
    models: SplitModels, num_devices: int, steps: str, pin_model: str
) -> None:
    made = pair(models, num_devices, pin_model=pin_model)
    for is_async, form in zip(STEPS[steps], (BARE, BARE, HINT, BARE, BOTH, HINT), strict=True):
        made.call(form)
        made.step(is_async)
    made.check()
    assert_looks_right(made.model, BOTH)


@pytest.mark.parametrize(("num_devices", "steps", "pin_model"), slow_except(FAST_SCENES, SCENES))
def test_low_precision_weights_with_our_adam(models: SplitModels, num_devices: int, steps: str, pin_model: str) -> None:
    made = pair(
        *(models, num_devices, our_adam, torchs_adam),
        dtype=torch.bfloat16,
        optim_dtype=torch.float32,
        pin_model=pin_model,
    )
    for is_async, form in zip(STEPS[steps], (BARE, HINT, BARE, HINT, BOTH, BARE), strict=True):
        made.call(form)
        made.step(is_async)
    made.check()


def test_our_adam_in_full_precision(models: SplitModels) -> None:
    made = pair(models, 3, our_adam)
    for is_async, form in zip(MIXED, (BARE, HINT, BARE, HINT, BOTH, BARE), strict=True):
        made.call(form)
        made.step(is_async)
    made.check()


def test_the_first_form_may_be_the_larger_one(models: SplitModels) -> None:
    made = pair(models, 1, first=BOTH)
    for is_async, form in zip(MIXED, (BOTH, BARE, HINT, BOTH, BARE, HINT), strict=True):
        made.call(form)
        made.step(is_async)
        assert made.model.num_layers == 7
    made.check()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_gradients_of_calls_of_old_and_new_form_go_into_one_step(
    models: SplitModels, num_devices: int, is_async: bool
) -> None:
    made = pair(models, num_devices)
    for forms in ((BARE,), (BARE, HINT), (HINT, BARE, BOTH), (BOTH, BARE)):
        for form in forms:
            made.call(form)
        made.step(is_async)
    made.check()


def test_gradients_summed_before_a_change_are_visible_after_it(models: SplitModels) -> None:
    made = pair(models, 3)
    made.call(BARE)
    made.call(HINT)
    made.model.synchronize()
    assert_same_grads(made.model.original_model, made.reference.module)
    made.call(BOTH)
    made.model.synchronize()
    assert_same_grads(made.model.original_model, made.reference.module)


def test_a_forward_before_a_change_cannot_run_backward_after_it(models: SplitModels) -> None:
    made = pair(models, 3)
    before = made.model(**inputs_of(BARE, 1)).square().mean()
    made.model(**inputs_of(HINT, 2))
    with pytest.raises(StaleGraphError, match="split into other layers for a call with other arguments"):
        before.backward()
    outputs = [made.model(**inputs_of(form, 3)).square().mean() for form in (BARE, HINT)]  # both forms are known now
    sum(outputs).backward()
    expected = [made.reference.module(**inputs_of(form, 3)).square().mean() for form in (BARE, HINT)]
    sum(expected).backward()
    for (name, found), plain in zip(made.model.named_parameters(), made.reference.module.parameters(), strict=True):
        assert (found.grad is None) == (plain.grad is None), name
        if plain.grad is not None:
            torch.testing.assert_close(found.grad, plain.grad)


def test_many_changes_one_after_the_other(models: SplitModels) -> None:
    """Calls without grad have another form than calls with grad."""
    made = pair(models, 3)
    for form in (BARE, HINT, BOTH):
        made.call(form)
        made.step(True)
        with torch.no_grad():
            made.model.synchronize()
            made.reference.synchronize()
            inputs = inputs_of(form, 77)
            output = made.model(**inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
            assert_same(output, made.reference.module(**inputs))
    made.check()


def test_layers_that_a_call_in_evaluation_adds_are_in_evaluation(models: SplitModels) -> None:
    module = Growing().eval()
    model = models.wrap(copy.deepcopy(module), inputs_of(BARE, 0), 2)
    inputs = inputs_of(HINT, 1)
    with torch.no_grad():
        found = model(**inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
        assert_same(found, module(**inputs))


def test_an_optimizer_made_after_a_change(models: SplitModels) -> None:
    torch.manual_seed(3)
    module = Growing()
    model = models.wrap(copy.deepcopy(module), inputs_of(BARE, 0), 2)
    model(**inputs_of(HINT, 1))
    made = Pair(model, StalenessReference(module, adamw), adamw(list(model.optim_parameters())), torch.float32)
    for form in (HINT, BARE, HINT):
        made.call(form)
        made.step(False)
    made.check()


# The user's view.


def test_objects_that_the_user_holds_stay_valid(models: SplitModels) -> None:
    made = pair(models, 3)
    assert_looks_right(made.model, BARE)
    masters = dict(made.model.optim_named_parameters())
    made.call(BARE)
    made.step(True)
    made.call(HINT)
    assert_looks_right(made.model, HINT)
    assert {n: id(p) for n, p in made.model.optim_named_parameters()} == {n: id(p) for n, p in masters.items()}
    made.call(BARE)
    assert_looks_right(made.model, HINT)
    weights = copy.deepcopy(made.reference.module.state_dict())
    made.model.load_state_dict(weights)
    assert_same(dict(made.model.state_dict()), dict(weights))


def test_closing_after_a_change_gives_the_plain_model_back(models: SplitModels) -> None:
    made = pair(models, 2)
    made.call(HINT)
    made.step(True)
    made.model.close()
    made.reference.synchronize()
    module = made.model.original_model
    assert module is not None
    inputs = inputs_of(HINT, 9)
    assert_same(module(**inputs).detach(), made.reference.module(**inputs).detach())


# Failures in the first call of a new form.


class FailingLate(Growing):
    """Fails on device threads only, so not during calibration."""

    fails = False

    class Block(Block):
        def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
            if FailingLate.fails and threading.current_thread() is not threading.main_thread():
                raise ZeroDivisionError("in a block")
            return super().forward(h, bias)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Block(WIDTH)


@pytest.fixture
def _failing() -> Any:
    yield
    FailingLate.fails = False


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.usefixtures("_failing")
def test_an_exception_in_a_layer_leaves_everything_as_it_was(
    models: SplitModels, num_devices: int, is_async: bool
) -> None:
    torch.manual_seed(3)
    made = pair(models, num_devices, module=FailingLate())
    for _ in range(2):
        made.call(BARE)
        made.step(is_async)
    made.model.synchronize()  # nothing is left in the background that could meet the failure first
    made.reference.synchronize()
    FailingLate.fails = True
    with pytest.raises(ZeroDivisionError, match="in a block"):
        made.model.forward_backward((), inputs_of(HINT, 50), None, own_loss)
    FailingLate.fails = False
    assert_looks_right(made.model, HINT)
    for form in (BARE, HINT, BOTH):
        made.call(form)
        made.step(is_async)
    made.check()


def test_a_form_that_cannot_be_split_leaves_everything_as_it_was(models: SplitModels) -> None:
    made = pair(models, 2)
    made.call(BARE)
    made.step(True)
    with pytest.raises(RuntimeError, match=r"size of tensor|shape"):
        made.model.forward_backward((), {"x": torch.ones(4, WIDTH), "hint": torch.ones(4, 3)}, None, own_loss)
    assert_looks_right(made.model, BARE)
    for form in (BARE, HINT, BARE):
        made.call(form)
        made.step(True)
    made.check()


def test_a_call_of_two_new_forms_of_which_one_cannot_be_split(models: SplitModels) -> None:
    """The plan made for the first microbatch must not leave the layers half changed."""
    made = pair(models, 2)
    made.call(BARE)
    made.step(False)
    good, bad = inputs_of(HINT, 50), {"x": torch.ones(4, WIDTH), "more": torch.ones(4, 3)}
    config = RoundPipeRunConfig(num_microbatch=2, split_input=lambda args, kwargs, count: ([()] * 2, [good, bad]))
    with pytest.raises(RuntimeError):
        made.model.forward_backward((), good, None, own_loss, run_config=config)
    for form in (BARE, HINT, BARE):
        made.call(form)
        made.step(False)
    made.check()
    assert made.model.num_layers == len(made.model.model)
