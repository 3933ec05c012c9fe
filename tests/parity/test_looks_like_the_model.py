"""The wrapper looks like the model it wraps: attributes, keys, modes, hooks, parameters, gradients, closing."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    Models,
    assert_same,
    assert_same_grads,
    assert_same_state,
    batch,
    call_reference,
    microbatches,
    mlp,
    mse,
    seeded,
)
from roundpipe import (
    AutoRoundPipe,
    ModelExecutePlan,
    OptimizerCtx,
    RoundPipe,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from roundpipe.errors import ClosedError, OwnershipError, UsageError


def train_step(model: RoundPipe, optimizer: torch.optim.Optimizer, seed: int = 0) -> Tensor:
    loss: Tensor = model.forward_backward(
        (batch(8, 5, seed=seed),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3)
    )
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return loss


def train_step_plain(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> Tensor:
    expected = call_reference(module, (batch(8, 5, seed=seed),), label=batch(8, 5), num_microbatch=3)
    optimizer.step()
    optimizer.zero_grad()
    loss: Tensor = expected.loss
    return loss


def pair(
    models: Models, num_devices: int, lr: float = 0.1
) -> tuple[RoundPipe, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    return (
        model,
        torch.optim.SGD(model.optim_parameters(), lr=lr),
        module,
        torch.optim.SGD(module.parameters(), lr=lr),
    )


# Names and attributes.


def test_keys_are_those_of_the_wrapped_model(models: Models) -> None:
    module = nn.Sequential(OrderedDict(first=nn.Linear(5, 5), norm=nn.BatchNorm1d(5), last=nn.Linear(5, 5)))
    keys, names = list(module.state_dict()), [name for name, _ in module.named_parameters()]
    model = models.wrap(module, 2)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.optim_named_parameters()] == names
    assert [name for name, _ in model.optim_named_parameters(prefix="p")] == [f"p.{name}" for name in names]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in module.named_buffers()]
    assert [name for name, _ in model.named_children()] == ["first", "norm", "last"]
    assert all(ours is own for ours, own in zip(model.parameters(), module.parameters(), strict=True))


class Hidden(nn.Module):
    """Its submodule, parameter and buffer have names of a wrapper's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(5, 5)
        self.name = nn.Parameter(torch.ones(5))
        self.register_buffer("num_layers", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x) * self.name + self.num_layers
        return result


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.original_model = Hidden()
        self.last = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.original_model(x))
        return result


@pytest.mark.parametrize("build", [mlp, Hidden, Outer, lambda: nn.Sequential(Hidden(), Hidden())])
@pytest.mark.parametrize("in_parts", [False, True])
def test_names_lead_to_parameters_modules_and_buffers(build: Callable[[], nn.Module], in_parts: bool) -> None:
    """Also if a wrapper has an attribute of that name. In step_fn a parameter's name leads to its master."""
    module = build()
    parameters, buffers, paths = (
        dict(named) for named in (module.named_parameters(), module.named_buffers(), module.named_modules())
    )
    with wrap_model_to_roundpipe(
        module,
        use_sequential_preset=False,
        lower_threshold=0 if in_parts else 2**30,
        upper_threshold=0 if in_parts else 2**30,
        optim_dtype=torch.float64,
        devices=["cpu"],
    ) as model:
        assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
        assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())
        for path, plain in paths.items():
            found = model.get_submodule(path)
            assert (found.original_model if isinstance(found, RoundPipe | AutoRoundPipe) else found) is plain
        with OptimizerCtx():
            masters = dict(model.named_parameters())
            assert all(model.get_parameter(name) is masters[name] for name in parameters)
        assert masters.keys() == parameters.keys()
        for name in ("missing", "model.missing", ""):
            with pytest.raises(AttributeError):
                model.get_parameter(name)


def test_wrapper_is_an_instance_of_the_models_class(models: Models) -> None:
    class Special(nn.Linear):
        pass

    model = models.wrap(Special(5, 5), 1)
    assert isinstance(model, Special)
    assert isinstance(model, nn.Linear)
    assert isinstance(model, RoundPipe)
    assert not isinstance(model, nn.Sequential)
    assert type(model) is RoundPipe
    assert str(model).startswith("RoundPipe(")


def test_attributes_are_read_written_and_deleted_on_the_model(models: Models) -> None:
    class Configured(nn.Linear):
        config = "class level"

        def describe(self) -> str:
            return f"{self.config} {self.in_features}"

    module = Configured(5, 5)
    model = models.wrap(module, 1)
    assert model.config == "class level"
    assert model.describe() == "class level 5"
    model.config = "set through the wrapper"
    assert module.config == "set through the wrapper"
    del model.config
    assert module.config == "class level"
    assert not hasattr(model, "missing")
    with pytest.raises(AttributeError):
        model.missing
    with pytest.raises(AttributeError):
        del model.missing
    assert model.weight is module.weight
    assert "describe" in dir(model)


def test_set_original_model_gives_its_names_and_attributes(models: Models, num_devices: int) -> None:
    class Original(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)
            self.outer = nn.Linear(5, 5)
            self.config = "original"

    original = seeded(Original)
    module = nn.Sequential(original.inner, nn.Tanh(), original.outer)
    plain = copy.deepcopy(module)
    model = models.wrap(module, num_devices)
    model.set_original_model(original)
    names = ["inner.weight", "inner.bias", "outer.weight", "outer.bias"]
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.optim_named_parameters()] == names
    assert model.config == "original"
    assert model.original_model is original
    assert model.model is module
    ours = torch.optim.SGD([p for _, p in model.optim_named_parameters()], lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        assert_same(train_step(model, ours), train_step_plain(plain, theirs))
    assert_same([*model.state_dict().values()], [*plain.state_dict().values()])
    model.eval()
    assert not module.training
    assert not original.training


@pytest.mark.parametrize(
    "plan",
    [ModelExecutePlan([], [range(3)]), ModelExecutePlan([range(2)], [range(2, 3), range(2)])],
    ids=["fused", "recomputed"],
)
def test_attributes_set_on_layers_reach_the_devices_and_numbers_come_back(
    models: Models, num_devices: int, plan: ModelExecutePlan
) -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return x * self.factor

    module = nn.Sequential(nn.Linear(5, 5), Scaling(), nn.Linear(5, 5))
    plain = copy.deepcopy(module)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    model = models.wrap(module, num_devices, model_run_config=config)
    for factor in (1.0, 3.0, 0.5):
        module[1].factor = plain[1].factor = factor
        loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)
        assert_same(loss, call_reference(plain, (batch(8, 5),), label=batch(8, 5), num_microbatch=3).loss)
    model.synchronize()
    assert module[1].runs == plain[1].runs == 9


# Modes.


def test_train_and_eval_reach_every_module(models: Models) -> None:
    model = models.wrap(seeded(lambda: nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Dropout(), nn.ReLU()))), 2)
    assert model.training
    assert model.eval() is model
    assert not model.training
    assert not any(module.training for module in model.model.modules())
    model.model[1].train()
    assert [module.training for module in model.model.modules()] == [False, False, True, True, True]
    model.train()
    assert all(module.training for module in model.model.modules())


def test_one_layer_in_evaluation_mode(models: Models, num_devices: int) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Dropout(0.9)))
    module[1].eval()
    module[3].eval()
    model = models.wrap_copy(module, num_devices)
    expected = call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
    loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
    assert_same(loss, expected.loss)
    assert_same_state(model.model, module)


def test_eval_right_after_a_call_does_not_reach_its_backward(models: Models, num_devices: int) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5))

    module = seeded(build)
    plan = ModelExecutePlan([range(3)], [range(3, 4), range(2, 3), range(2)])
    model = models.wrap_copy(module, num_devices, model_run_config=RoundPipeRunConfig(execute_plan=plan))
    for _ in range(3):
        call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
        model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
        model.eval()
        model.synchronize()
        assert_same_grads(model.model, module)
        model.train()


# Weights.


def test_load_state_dict_reaches_devices_and_optimizer_copies(models: Models, num_devices: int) -> None:
    model, ours, module, theirs = pair(models, num_devices)
    other = seeded(mlp, 77).state_dict()
    train_step(model, ours)
    train_step_plain(module, theirs)
    assert str(model.load_state_dict(other)) == str(module.load_state_dict(other))
    assert_same([p.detach() for p in model.optim_parameters()], list(other.values()))
    for seed in range(2):
        assert_same(train_step(model, ours, seed), train_step_plain(module, theirs, seed))
    assert_same_state(model.model, module)


def test_load_state_dict_after_async_steps_wins(models: Models, num_devices: int) -> None:
    model, ours, module, _ = pair(models, num_devices)
    other = seeded(mlp, 77).state_dict()
    for _ in range(2):
        model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)
        model.step(lambda: (ours.step(), ours.zero_grad()))
    model.load_state_dict(other)
    module.load_state_dict(other)
    expected = call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
    loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
    assert_same(loss, expected.loss)
    model.synchronize()
    assert_same_state(model.model, module)


def test_a_state_dict_round_trip_continues_the_run(models: Models, num_devices: int) -> None:
    model, ours, module, theirs = pair(models, num_devices)
    for seed in range(2):
        train_step(model, ours, seed)
        train_step_plain(module, theirs, seed)
    saved = copy.deepcopy(model.state_dict())
    resumed = models.wrap(mlp(), num_devices)
    resumed.load_state_dict(saved)
    optimizer = torch.optim.SGD(resumed.optim_parameters(), lr=0.1)
    assert_same(train_step(resumed, optimizer, 2), train_step_plain(module, theirs, 2))
    assert_same_state(resumed.model, module)


def test_load_state_dict_reports_what_does_not_fit(models: Models) -> None:
    model = models.wrap(mlp(), 2)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    result = model.load_state_dict({"extra": torch.zeros(1)}, strict=False)
    assert result.unexpected_keys == ["extra"]


def test_what_the_user_writes_into_parameters_reaches_devices_and_optimizer(models: Models, num_devices: int) -> None:
    model, ours, module, theirs = pair(models, num_devices)
    for seed in range(3):
        with torch.no_grad():
            for either in (model.model, module):
                either[1][0].weight.mul_(2)
                either[2][0].bias.copy_(torch.arange(5.0))
                nn.init.constant_(either[0][0].bias, 0.25)
        assert_same(train_step(model, ours, seed), train_step_plain(module, theirs, seed))
    assert_same_state(model.model, module)


def test_writes_after_synchronize_count_between_async_steps(models: Models, num_devices: int) -> None:
    model, ours, module, theirs = pair(models, num_devices)
    for seed in range(3):
        assert_same(
            model.forward_backward(
                (batch(8, 5, seed=seed),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3)
            ),
            train_step_plain(module, theirs, seed),
        )
        model.step(lambda: (ours.step(), ours.zero_grad()))
        model.synchronize()
        with torch.no_grad():
            for either in (model.model, module):
                either[1][0].weight.mul_(2)
    assert_same_state(model.model, module)


# Gradients.


def test_gradients_the_user_adds_are_counted(models: Models, num_devices: int) -> None:
    """A regulariser computed on the model's own parameters, outside any call."""
    model, ours, module, theirs = pair(models, num_devices)
    for seed in range(3):
        call_reference(module, (batch(8, 5, seed=seed),), label=batch(8, 5), num_microbatch=3)
        model.forward_backward((batch(8, 5, seed=seed),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
        for either in (model, module):
            sum(p.square().sum() for p in either.parameters()).backward()
        model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        theirs.step()
        theirs.zero_grad()
        assert_same_state(model.model, module)


def test_gradients_the_user_adds_before_the_call_are_counted(models: Models, num_devices: int) -> None:
    model, ours, module, theirs = pair(models, num_devices)
    for either in (model, module):
        sum(p.square().sum() for p in either.parameters()).backward()
    assert_same(train_step(model, ours), train_step_plain(module, theirs))
    assert_same_state(model.model, module)


def test_gradients_the_user_edits_after_synchronize_are_used(models: Models, num_devices: int) -> None:
    model, ours, module, theirs = pair(models, num_devices)
    call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
    model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
    model.synchronize()
    for either in (model.model, module):
        either[0][0].weight.grad.mul_(0.5)
        either[1][0].weight.grad = None
        either[2][0].weight.grad = torch.ones(5, 5)
    model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
    theirs.step()
    theirs.zero_grad()
    assert_same_state(model.model, module)


def test_zero_grad_of_the_wrapped_module_drops_gradients_too(models: Models, num_devices: int) -> None:
    model, _, module, _ = pair(models, num_devices)
    model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)
    model.synchronize()
    model.model.zero_grad()
    call_reference(module, (batch(8, 5, seed=1),), label=batch(8, 5), num_microbatch=3)
    model.forward_backward((batch(8, 5, seed=1),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
    model.synchronize()
    assert_same_grads(model.model, module)


# Parameters on the optimizer's side.


def test_parameters_are_the_optimizers_inside_optimizer_ctx_and_step_fn(models: Models) -> None:
    module = seeded(mlp).requires_grad_(True)
    module[0].requires_grad_(False)
    model = models.wrap(module, 2, optim_dtype=torch.float64)
    own = list(module.parameters())
    copies = list(model.optim_parameters())
    assert [p is q for p, q in zip(model.parameters(), own, strict=True)] == [True] * 8
    with OptimizerCtx():
        assert [id(p) for p in model.parameters()] == [id(p) for p in copies]
        names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, p in module.named_parameters() if p.requires_grad]
    assert all(p.dtype is torch.float64 for p in copies)
    seen: list[int] = []
    model.step(lambda: seen.extend(id(p) for p in model.parameters()), is_async=False)
    assert seen == [id(p) for p in copies]
    assert [id(p) for p in model.parameters()] == [id(p) for p in own]


def test_optimizer_ctx_does_not_reach_other_threads(models: Models) -> None:
    model = models.wrap(seeded(mlp), 2)
    own = [id(p) for p in model.parameters()]
    seen: list[int] = []
    with OptimizerCtx():
        thread = threading.Thread(target=lambda: seen.extend(id(p) for p in model.parameters()))
        thread.start()
        thread.join(30)
    assert seen == own


def test_optimizer_copies_are_the_same_objects_for_the_life_of_the_model(models: Models) -> None:
    model = models.wrap(seeded(mlp), 2)
    before = [id(p) for p in model.optim_parameters()]
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    train_step(model, optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert [id(p) for p in model.optim_parameters()] == before


# Hooks.


def test_forward_hooks_run_once_per_microbatch_and_may_change_values(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    calls: list[str] = []

    def install(target: nn.Module, name: str) -> None:
        target[0].register_forward_pre_hook(lambda m, args: (calls.append(f"{name} pre"), (args[0] * 2,))[1])
        target[1][0].register_forward_hook(lambda m, args, out: (calls.append(f"{name} hook"), out + 1)[1])
        target[2].register_full_backward_hook(lambda m, gin, gout: (calls.append(f"{name} backward"), (gin[0] * 3,))[1])

    model = models.wrap_copy(module, num_devices)
    install(model.model, "ours")
    install(module, "plain")
    expected = call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=ModelExecutePlan([], [range(4)]))
    loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=config)
    assert_same(loss, expected.loss)
    model.synchronize()
    assert_same_grads(model.model, module)
    for kind in ("pre", "hook", "backward"):
        assert calls.count(f"ours {kind}") == calls.count(f"plain {kind}") == 3


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_hooks_run_in_recomputation_too_and_give_the_same_numbers(models: Models, num_devices: int, grain: str) -> None:
    module = seeded(mlp)
    for layer in module:
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        layer[0].register_forward_hook(lambda m, args, out: out + 1)
        layer[1].register_full_backward_hook(lambda m, gin, gout: (gin[0] * 3,))
        layer[1].register_full_backward_pre_hook(lambda m, gout: (gout[0] * 0.5,))
    model = models.wrap_copy(module, num_devices)
    plan = ModelExecutePlan([range(3)], [range(3, 4), range(3)])
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan, recompute_grain=grain)
    expected = call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
    loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=config)
    assert_same(loss, expected.loss)
    model.synchronize()
    assert_same_grads(model.model, module)


def test_hooks_may_be_added_and_removed_between_calls(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    handles: list[Any] = []
    for call in range(3):
        if call == 1:
            handles = [m[2][0].register_forward_hook(lambda m, args, out: out * 2) for m in (model.model, module)]
        if call == 2:
            for handle in handles:
                handle.remove()
        expected = call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
        loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
        assert_same(loss, expected.loss, f"call {call}")


# The end.


def test_close_leaves_the_newest_weights_in_the_module_and_frees_it(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    plain = copy.deepcopy(module)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    with RoundPipe(module, devices=["cpu"] * num_devices) as model:
        ours = torch.optim.SGD(model.optim_parameters(), lr=0.1)
        assert_same(
            model.forward_backward((batch(8, 5, seed=0),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3)),
            train_step_plain(plain, theirs),
        )
        model.step(lambda: (ours.step(), ours.zero_grad()))
    assert_same_state(module, plain)
    with pytest.raises(ClosedError):
        model(batch(8, 5))
    model.close()
    again = models.wrap(module, num_devices)
    with torch.no_grad():
        assert_same(again(batch(8, 5), roundpipe_run_config=microbatches(1)), plain(batch(8, 5)))


def test_a_parameter_belongs_to_one_model_until_that_is_gone(models: Models) -> None:
    module = seeded(mlp)
    model = RoundPipe(module, devices=["cpu"])
    with pytest.raises(OwnershipError):
        RoundPipe(nn.Sequential(module[0]), devices=["cpu"])
    model(batch(8, 5))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    models.wrap(module, 2)


@pytest.mark.parametrize("move", ["half", "cuda", "to dtype", "to cuda", "double"])
def test_moving_or_casting_the_wrapper_is_refused(models: Models, move: str) -> None:
    model = models.wrap(seeded(mlp), 1)
    moves = {
        "half": model.half,
        "double": model.double,
        "cuda": model.cuda,
        "to dtype": lambda: model.to(torch.float64),
        "to cuda": lambda: model.to("cuda"),
    }
    with pytest.raises(UsageError):
        moves[move]()
    assert model.cpu() is model
    assert model.to("cpu") is model


# What ran when.


def test_the_timeline_has_a_span_for_every_task_and_microbatch(models: Models, num_devices: int) -> None:
    plan = ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(1, 3), range(1)])
    model = models.wrap(seeded(mlp), num_devices, model_run_config=RoundPipeRunConfig(execute_plan=plan))
    model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
    spans = model.timeline().spans
    found = sorted((span.label, span.microbatch) for span in spans)
    assert found == sorted((label, j) for label in ("F0", "F1", "FB2", "B3", "B4") for j in range(3))
    assert all(span.start_s <= span.end_s for span in spans)
    at = {(span.label, span.microbatch): span for span in spans}
    for before, after in (("F0", "F1"), ("F1", "FB2"), ("FB2", "B3"), ("B3", "B4")):
        assert all(at[before, j].start_s <= at[after, j].start_s for j in range(3))
    devices = {span.label: span.device for span in spans}
    assert len(set(devices.values())) == min(num_devices, 5)


def test_a_model_that_has_not_run_has_an_empty_timeline(models: Models) -> None:
    assert models.wrap(seeded(mlp), 2).timeline().spans == ()
