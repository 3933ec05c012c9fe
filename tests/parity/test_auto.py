"""An AutoRoundPipe trains as the plain model does: values, gradients, weights, one step for all its parts."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from helpers_adam import adam_numbers
from helpers_parity import WAIT_S, StalenessReference, assert_same, assert_same_grads, assert_same_state, batch, seeded
from roundpipe import (
    AutoRoundPipe,
    ClosedError,
    ModelChangedError,
    OptimizerCtx,
    RoundPipe,
    RoundPipePackedData,
    RoundPipeRunConfig,
    StaleGraphError,
    UsageError,
    clip_grad_norm_,
    wrap_model_to_roundpipe,
)
from roundpipe.optim.native.kernel import KernelParameter, one_pass_kernel

WIDTH = 4
WHOLE = RoundPipeRunConfig(num_microbatch=1)  # as plain torch runs a batch
FAULT = {"layer": False, "host": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * gate


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if FAULT["layer"]:
            raise ArithmeticError("a layer failed")
        return self.norm(self.linear(x))


class Net(nn.Module):
    """Parameters in a list of blocks, a Sequential, single modules, the model itself and a module left on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.fragile = Fragile()
        self.chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.on_host = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.act = nn.ReLU()
        self.head = nn.Linear(WIDTH, 2)
        self.vocab_size = 17

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        gate = x.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x, gate)
        x = self.fragile(x)
        if FAULT["host"]:
            raise ArithmeticError("the host failed")
        return self.head(self.act(self.on_host(self.chain(x)) - self.scale))


Wrap = Callable[..., AutoRoundPipe]


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    FAULT.update(layer=False, host=False)


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    """A copy of the model in parts, with `on_host` left alone."""
    opened: list[AutoRoundPipe] = []

    def wrap(net: nn.Module, num_devices: int = 2, **options: Any) -> AutoRoundPipe:
        net = copy.deepcopy(net)
        options.setdefault("skip_modules", [net.on_host] if isinstance(net, Net) else [])
        options = {"lower_threshold": 17, "upper_threshold": 130, "model_run_config": WHOLE, "name": "net"} | options
        model = wrap_model_to_roundpipe(net, devices=["cpu"] * num_devices, **options)
        assert isinstance(model, AutoRoundPipe)
        opened.append(model)
        return model

    yield wrap
    for model in opened:
        model.close()


@pytest.fixture
def net() -> Net:
    net = seeded(Net)
    assert isinstance(net, Net)
    return net


def loss_of(model: nn.Module, seed: int = 7) -> Tensor:
    return model(batch(6, 3, seed=seed)).square().sum()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def stepping(model: AutoRoundPipe) -> Callable[[], None]:
    optimizer = sgd(model.optim_parameters())

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step_fn


def test_the_model_is_in_the_parts_these_tests_are_about(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    parts = [path for path, module in model.model.named_modules() if isinstance(module, RoundPipe)]
    assert parts == ["embed", *(f"blocks.{i}" for i in range(3)), "fragile", "chain", "act", "head"]


# Values, gradients, weights.


def test_forward_with_and_without_grad(wrap: Wrap, net: Net, num_devices: int) -> None:
    model = wrap(net, num_devices)
    x = batch(6, 3)
    assert_same(model(x).detach(), net(x).detach())
    with torch.no_grad():
        assert_same(model(x), net(x))
        model.eval()
        net.eval()
        assert_same(model(x), net(x))
    assert_same_state(model, net)


def test_gradients(wrap: Wrap, net: Net, num_devices: int) -> None:
    model = wrap(net, num_devices)
    for one in (model, net):
        loss_of(one).backward()
    model.synchronize()
    assert_same_grads(model, net)


def test_gradients_of_several_backwards_are_summed_in_torchs_order(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    for one in (model, net):
        loss_of(one, 1).backward()
        second, third = loss_of(one, 2), loss_of(one, 3)
        second.backward()
        third.backward()
    model.synchronize()
    assert_same_grads(model, net)
    for one in (model, net):
        loss_of(one, 4).backward()
    model.synchronize()
    assert_same_grads(model, net)


def test_inputs_get_gradients(wrap: Wrap, net: Net) -> None:
    inputs = [batch(6, 3).requires_grad_() for _ in range(2)]
    for one, x in zip((wrap(net), net), inputs, strict=True):
        one(x).square().sum().backward()
    assert_same(inputs[0].grad, inputs[1].grad)


def test_synchronous_steps_are_plain_training(wrap: Wrap, net: Net, num_devices: int) -> None:
    model = wrap(net, num_devices)
    step_fn, optimizer = stepping(model), sgd(net.parameters())
    for seed in range(4):
        ours, plain = loss_of(model, seed), loss_of(net, seed)
        assert_same(ours.detach(), plain.detach())
        ours.backward()
        plain.backward()
        model.step(step_fn, is_async=False)
        optimizer.step()
        optimizer.zero_grad()
        assert_same_state(model, net)


@pytest.mark.parametrize("kinds", ["aaaaa", "asaas", "saasa"], ids=lambda kinds: f"steps {kinds}")
def test_asynchronous_steps_are_one_step_old_everywhere(wrap: Wrap, net: Net, num_devices: int, kinds: str) -> None:
    model = wrap(net, num_devices)
    reference = StalenessReference(net, sgd)
    step_fn = stepping(model)
    for seed, kind in enumerate(kinds):
        ours, stale = loss_of(model, seed), loss_of(reference.module, seed)
        assert_same(ours.detach(), stale.detach(), f"loss {seed}")
        ours.backward()
        stale.backward()
        model.step(step_fn, kind == "a")
        reference.step(is_async=kind == "a")
    assert_same_state(model, net)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model, net)


def test_the_optimizer_may_have_another_precision(wrap: Wrap, net: Net) -> None:
    net = net.bfloat16()
    model = wrap(net, optim_dtype=torch.float32, upper_threshold=70)
    reference = StalenessReference(net, sgd, optim_dtype=torch.float32)
    step_fn = stepping(model)
    for seed in range(4):
        for one in (model, net):
            one(batch(6, 3, seed=seed).bfloat16()).square().sum().backward()
        model.step(step_fn)
        reference.step(is_async=True)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model, net)
    assert_same(list(model.optim_parameters()), reference.masters)


def test_a_parameter_read_by_the_host_although_it_is_in_a_part(wrap: Wrap) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.b(self.a(x)), self.a.weight)

    net = seeded(Reads)
    model = wrap(net, upper_threshold=48)
    reference = StalenessReference(net, sgd)
    step_fn = stepping(model)
    for seed in range(5):
        ours, stale = loss_of(model, seed), loss_of(net, seed)
        torch.testing.assert_close(ours, stale)
        ours.backward()
        stale.backward()
        model.step(step_fn)
        reference.step(is_async=True)
    model.synchronize()
    reference.synchronize()
    torch.testing.assert_close(dict(model.state_dict()), dict(net.state_dict()))


# Microbatches, and how they are handed from element to element.


class Cut(nn.Module):
    """Runs its module on three microbatches, as a part does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        pieces = zip(*[arg.tensor_split(3) for arg in args], strict=True)
        return torch.cat([self.module(*piece) for piece in pieces])


def cut(net: Net) -> Net:
    net = copy.deepcopy(net)
    for name in ("embed", "fragile", "chain", "act", "head"):
        setattr(net, name, Cut(getattr(net, name)))
    net.blocks = nn.ModuleList(Cut(block) for block in net.blocks)
    return net


def test_parts_run_in_microbatches(wrap: Wrap, net: Net, num_devices: int) -> None:
    plain = cut(net)
    model = wrap(net, num_devices, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    first = wrap(net, 1, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    for one in (model, first, plain):
        loss_of(one).backward()
    assert_same(loss_of(model).detach(), loss_of(plain).detach())
    for one in (model, first):
        one.synchronize()
    assert_same_grads(model, first)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, msg=name)


def test_elements_of_a_list_hand_packed_data_on(wrap: Wrap, net: Net) -> None:
    model = wrap(net, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    x, gate = batch(6, WIDTH), batch(6, 1)
    packed = model.blocks[0](x, gate)
    assert isinstance(packed, RoundPipePackedData)
    assert len(packed) == 3
    merged = model.blocks[2](model.blocks[1](packed, gate), gate)
    for block in net.blocks:
        x = block(x, gate)
    torch.testing.assert_close(merged, x)


def test_a_merged_element_can_be_looked_at(wrap: Wrap, net: Net) -> None:
    net = copy.deepcopy(net)
    with wrap_model_to_roundpipe(
        net,
        upper_threshold=130,
        override_config={net.blocks[0]: RoundPipeRunConfig(merge_output=True)},
        devices=["cpu"],
    ) as model:
        assert isinstance(model.blocks[0](batch(6, WIDTH), batch(6, 1)), Tensor)
        assert isinstance(model.blocks[1](batch(6, WIDTH), batch(6, 1)), RoundPipePackedData)


# The optimizer's side.


def test_every_trainable_parameter_has_one_optimizer_copy(wrap: Wrap, net: Net) -> None:
    net.chain[0].weight.requires_grad_(False)
    net.on_host[1].bias.requires_grad_(False)
    model = wrap(net, optim_dtype=torch.float64)
    named = dict(model.optim_named_parameters())
    assert list(named) == [name for name, param in net.named_parameters() if param.requires_grad]
    assert {param.dtype for param in named.values()} == {torch.float64}
    assert all(one is other for one, other in zip(named.values(), model.optim_parameters(), strict=True))
    assert list(dict(model.optim_named_parameters("p"))) == [f"p.{name}" for name in named]
    own = {id(param) for param in model.parameters()}
    assert not own & {id(param) for param in named.values()}


def test_parameters_are_redirected_on_the_optimizers_side(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    masters = [id(param) for param in model.optim_parameters()]
    seen: list[list[int]] = []
    with OptimizerCtx():
        assert [id(param) for param in model.parameters()] == masters
    loss_of(model).backward()
    model.step(lambda: seen.append([id(param) for param in model.parameters()]), is_async=False)
    assert seen == [masters]
    assert not set(masters) & {id(param) for param in model.parameters()}


def test_one_step_runs_step_fn_once_with_its_arguments(wrap: Wrap, net: Net) -> None:
    model, calls = wrap(net), []
    loss_of(model).backward()
    model.step(lambda *args, **kwargs: calls.append((args, kwargs)), False, 1, two=2)
    assert calls == [((1,), {"two": 2})]


def test_an_asynchronous_step_returns_at_once(wrap: Wrap, net: Net) -> None:
    model, gate = wrap(net), threading.Event()
    for seed in range(2):
        loss_of(model, seed).backward()
        model.step(lambda: gate.wait(WAIT_S))
    gate.set()
    model.synchronize()


def test_clipping_sees_the_gradients_of_all_parts(wrap: Wrap, net: Net) -> None:
    model, norms = wrap(net), []
    for one in (model, net):
        loss_of(one).backward()
    model.step(lambda: norms.append(clip_grad_norm_(model, 1e9)), is_async=False)
    assert_same(norms[0], torch.nn.utils.get_total_norm([param.grad for param in net.parameters()]))


def test_zero_grad_drops_what_was_gathered_everywhere(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    loss_of(model, 1).backward()
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    for one in (model, net):
        loss_of(one, 2).backward()
    model.synchronize()
    assert_same_grads(model, net)


def test_what_the_user_writes_into_parameters_reaches_the_optimizer(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    step_fn, optimizer = stepping(model), sgd(net.parameters())
    for one in (model, net):
        with torch.no_grad():
            for param in one.parameters():
                param.mul_(0.5)
        loss_of(one).backward()
    model.step(step_fn, is_async=False)
    optimizer.step()
    assert_same_state(model, net)


def test_an_optimizer_on_the_models_own_parameters_is_refused(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    optimizer = sgd([model.model.scale])
    loss_of(model).backward()
    with pytest.raises(UsageError, match="'scale' is one"):
        model.step(optimizer.step, is_async=False)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_backward_after_a_step_is_refused_for_parameters_on_the_host_too(wrap: Wrap, net: Net, is_async: bool) -> None:
    model = wrap(net)
    step_fn = stepping(model)
    loss_of(model).backward()
    model.step(step_fn, is_async)
    in_parts, on_host = loss_of(model), (model.scale * model.scale).sum()
    loss_of(model).backward()
    model.step(step_fn, is_async)
    with pytest.raises(StaleGraphError):
        in_parts.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        on_host.backward()


def test_backward_after_a_step_is_right_where_the_weights_are_still_the_same(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    reference = StalenessReference(net, sgd)
    step_fn = stepping(model)
    late = [loss_of(one, 1) for one in (model, net)]
    for one in (model, net):
        loss_of(one, 2).backward()
    model.step(step_fn)  # calls go on reading version 0
    for param, master in zip(net.parameters(), reference.masters, strict=True):
        master.grad, param.grad = param.grad, None
    reference.optimizer.step()
    for loss in late:
        loss.backward()
    model.step(step_fn)
    for param, master in zip(net.parameters(), reference.masters, strict=True):
        master.grad = param.grad
    reference.optimizer.step()
    assert_same(list(_settled(model)), reference.masters)


def _settled(model: AutoRoundPipe) -> Iterator[nn.Parameter]:
    model.synchronize()
    return model.optim_parameters()


class KernelAdamW:
    """The optimizer's own kernel over plain tensors: torch's rounds what does not fill a vector otherwise."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        self._params, self._lr, self._count = params, lr, 0
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]

    def step(self) -> None:
        self._count += 1
        numbers = adam_numbers(self._count, lr=self._lr, weight_decay=0.01)
        kernel = one_pass_kernel()
        assert kernel is not None
        for param, (first, second) in zip(self._params, self._moments, strict=True):
            assert param.grad is not None
            kernel.update([KernelParameter(param.data, param.grad, [first, second], None, numbers)])

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


def test_roundpipes_optimizer_and_scaler_work(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=0.01)
    scaler = roundpipe.GradScaler(init_scale=8.0)
    plain = KernelAdamW(list(net.parameters()), lr=0.01)

    def step_fn() -> None:
        scaler.step(optimizer)
        optimizer.zero_grad()

    for seed in range(3):
        scaler.scale(loss_of(model, seed)).backward()
        loss_of(net, seed).backward()
        model.step(step_fn, is_async=False)
        scaler.update(is_async=False)
        plain.step()
        net.zero_grad()
    assert_same_state(model, net)  # a power of two scales without rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_roundpipes_optimizer_in_asynchronous_and_exact_steps(wrap: Wrap, dtype: torch.dtype) -> None:
    """Parameters that the host reads where they lie get their weights a step later than the others, as all must."""
    net = seeded(Net).to(dtype)
    model = wrap(net, optim_dtype=torch.float32)
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=0.01)
    reference = StalenessReference(net, lambda params: KernelAdamW(params, lr=0.01), torch.float32)  # type: ignore[arg-type, return-value]

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for seed, is_async in enumerate([True, True, False, True, False, False, True, True, True]):
        x = batch(6, 3, seed=seed).to(dtype)
        losses = [one(x).float().pow(2).mean() for one in (model, net)]
        assert_same(losses[0].detach(), losses[1].detach(), f"loss of step {seed}")
        for loss in losses:
            loss.backward()
        model.step(step_fn, is_async=is_async)
        reference.step(is_async)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model, net)


# Failures.


def test_a_failed_step_publishes_nothing_and_is_told_by_the_next_call(wrap: Wrap, net: Net) -> None:
    model, before = wrap(net), copy.deepcopy(net)
    optimizer = sgd(model.optim_parameters())

    def fail() -> None:
        optimizer.step()
        raise ArithmeticError("step_fn failed")

    net.train(False)
    model.train(False)
    loss_of(model).backward()
    model.step(fail)
    with pytest.raises(ArithmeticError, match="step_fn failed"):
        model.synchronize()
    model.synchronize()
    assert_same_state(model, before)
    loss_of(model).backward()
    with pytest.raises(ArithmeticError, match="step_fn failed"):
        model.step(fail, is_async=False)
    assert_same_state(model, before)


def test_a_failed_backward_drops_the_gradients_of_all_parts(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    step_fn, optimizer = stepping(model), sgd(net.parameters())
    net.eval()
    model.eval()
    loss = loss_of(model, 1)
    FAULT["layer"] = True
    with pytest.raises(ArithmeticError, match="a layer failed") as failure:
        loss.backward()
    FAULT["layer"] = False
    assert any("gradients gathered since the last optimizer step were dropped" in n for n in failure.value.__notes__)
    assert all(param.grad is None for param in model.parameters())
    for one in (model, net):
        loss_of(one, 2).backward()
    model.step(step_fn, is_async=False)
    optimizer.step()
    assert_same_state(model, net)


@pytest.mark.parametrize("place", ["layer", "host"])
def test_a_failed_forward_leaves_buffers_as_they_were(wrap: Wrap, net: Net, place: str) -> None:
    model = wrap(net)
    for one in (model, net):
        loss_of(one, 1).backward()
    FAULT[place] = True
    with pytest.raises(ArithmeticError, match=f"{'a layer' if place == 'layer' else 'the host'} failed"):
        loss_of(model, 2)
    FAULT[place] = False
    assert_same_state(model, net)
    for one in (model, net):
        loss_of(one, 3).backward()
    model.synchronize()
    assert_same_grads(model, net)
    assert_same_state(model, net)


def test_forward_backward_is_refused_with_reason_and_advice(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    with pytest.raises(UsageError, match=r"net is an AutoRoundPipe.*Call the model, then backward\(\)"):
        model.forward_backward((batch(6, 3),))


def test_calls_in_the_wrong_place(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    with pytest.raises(UsageError, match="roundpipe_run_config"):
        model(batch(6, 3), roundpipe_run_config=RoundPipeRunConfig())
    with pytest.raises(UsageError, match="inside step_fn"):
        model.step(lambda: model(batch(6, 3)), is_async=False)
    with pytest.raises(TypeError, match="step_fn"):
        model.step(None)


# Looking like the model.


def test_keys_are_those_of_the_model_handed_in(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in net.named_buffers()]


def test_load_state_dict_reaches_the_optimizer(wrap: Wrap, net: Net) -> None:
    other = seeded(Net, 11)
    model = wrap(net)
    step_fn, optimizer = stepping(model), sgd(other.parameters())
    result = model.load_state_dict(other.state_dict())
    assert not result.missing_keys + result.unexpected_keys
    assert_same_state(model, other)
    for one in (model, other):
        loss_of(one).backward()
    model.step(step_fn, is_async=False)
    optimizer.step()
    assert_same_state(model, other)
    with pytest.raises(UsageError, match="assign"):
        model.load_state_dict(other.state_dict(), assign=True)


def test_hooks_of_wrapped_modules_on_loading_are_kept(wrap: Wrap, net: Net) -> None:
    events: list[str] = []
    model = wrap(net)
    inner = model.model.head.model
    inner.register_load_state_dict_pre_hook(lambda *args: events.append("before"))
    inner.register_load_state_dict_post_hook(lambda *args: events.append("after"))
    model.load_state_dict(net.state_dict())
    assert events[-2:] == ["before", "after"]


def test_attributes_are_the_models(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    assert model.vocab_size == 17
    model.vocab_size = 18
    assert model.model.vocab_size == 18
    del model.vocab_size
    assert not hasattr(model, "vocab_size")
    assert model.scale is model.model.scale
    with pytest.raises(UsageError, match="cannot be set"):
        model.name = "other"


def test_train_and_eval_reach_every_module(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    assert model.eval() is model
    assert not model.training
    assert not any(part.training for part in (model.head, model.fragile.norm, model.on_host[0]))
    model.train()
    assert model.training
    assert model.fragile.norm.training


@pytest.mark.parametrize("move", [lambda model: model.to("cuda"), lambda model: model.half()])
def test_moving_and_casting_are_refused(wrap: Wrap, net: Net, move: Callable[[nn.Module], object]) -> None:
    model = wrap(net)
    for one in (model, model.model):
        with pytest.raises(UsageError, match="cannot be moved or cast"):
            move(one)


def test_changing_the_model_is_noticed(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    model.model.extra = nn.Linear(2, 2)
    with pytest.raises(ModelChangedError, match=r"'extra.weight' was added"):
        list(model.optim_parameters())
    del model.model.extra
    model.model.scale = nn.Parameter(torch.ones(WIDTH))
    with pytest.raises(ModelChangedError, match="'scale'"):
        loss_of(model)


# The end.


def test_closing_makes_the_model_plain_again(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    plain = model.model
    with model:
        loss_of(model).backward()
        model.step(stepping(model))
    assert not any(isinstance(module, RoundPipe) for module in plain.modules())
    assert_same(loss_of(plain.eval()).detach(), loss_of(copy.deepcopy(plain)).detach())
    with pytest.raises(ClosedError):
        loss_of(model)
    model.close()
    assert isinstance(wrap_model_to_roundpipe(plain, devices=["cpu"], name="again"), AutoRoundPipe)


def test_closing_a_part_closes_the_whole(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    model.head.close()
    with pytest.raises(ClosedError):
        loss_of(model)
    model.close()
    assert isinstance(model.model.head, nn.Linear)


def test_a_part_can_be_stepped_and_synchronized_for_all(wrap: Wrap, net: Net) -> None:
    model = wrap(net)
    step_fn, optimizer = stepping(model), sgd(net.parameters())
    for one in (model, net):
        loss_of(one).backward()
    model.head.step(step_fn)
    optimizer.step()
    model.blocks[0].synchronize()
    assert_same_state(model, net)


def test_an_unreferenced_model_is_collected_with_its_thread() -> None:
    def threads() -> int:
        return sum(thread.name == "roundpipe-optimizer" for thread in threading.enumerate())

    before, net = threads(), seeded(Net)
    model = wrap_model_to_roundpipe(net, upper_threshold=130, devices=["cpu"])
    loss_of(model).backward()
    model.step(lambda: None, is_async=False)
    assert threads() == before + 1
    face, part = weakref.ref(model), weakref.ref(net.head)
    del model
    gc.collect()
    assert face() is None
    loss_of(net)  # a reference to the plain model keeps its parts alive
    del net
    gc.collect()
    assert part() is None
    assert threads() == before


# Hugging Face.


class PreTrainedModel(nn.Module):
    """As in transformers: `loss_function` is a property with a setter."""

    _loss_function: Callable[..., Tensor]

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        return self.__dict__.get("_loss_function", causal_loss)

    @loss_function.setter
    def loss_function(self, value: Callable[..., Tensor]) -> None:
        self._loss_function = value


THREADS: list[str] = []


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items: Tensor | None = None) -> Tensor:
    THREADS.append(threading.current_thread().name)
    total = nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), reduction="sum")
    return total / (num_items if num_items is not None else labels.numel())


class CausalLM(PreTrainedModel):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.model(x))
        return self.loss_function(logits=logits, labels=labels, vocab_size=5, num_items=torch.tensor(3))


def test_the_loss_function_of_a_hugging_face_model_runs_on_a_device(wrap: Wrap) -> None:
    net = seeded(CausalLM)
    model = wrap(net, upper_threshold=100)
    x, labels = batch(6, 3), torch.arange(6) % 5
    THREADS.clear()
    ours = model(x, labels)
    assert THREADS
    assert "MainThread" not in THREADS
    plain = net(x, labels)
    assert_same(ours.detach(), plain.detach())
    ours.backward()
    plain.backward()
    model.synchronize()
    assert_same_grads(model, net)
    assert list(model.state_dict()) == list(net.state_dict())
    model.close()
    assert model.model.loss_function is causal_loss
