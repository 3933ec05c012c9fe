"""A wrapped network can be saved and copied as if it were plain, with torch's and with other libraries' functions."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from helpers_parity import Models, assert_same, assert_same_state, batch, mlp, mse, seeded
from roundpipe import AutoRoundPipe, RoundPipe, UsageError, wrap_model_to_roundpipe

WIDTH = 64
PIN_MODES = ("alloc", "register", "off")


class Tied(nn.Module):
    """Two names of one weight, a bias, a parameter without elements and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.none = nn.Parameter(torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


class Parts(nn.Module):
    """A model that is wrapped part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = nn.ModuleList(mlp(1, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_parts(net: nn.Module) -> AutoRoundPipe:
    model = wrap_model_to_roundpipe(net, lower_threshold=1024, upper_threshold=600, devices=["cpu"] * 2)
    assert isinstance(model, AutoRoundPipe)
    return model


def trained(model: Any, num_steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    for _ in range(num_steps):
        model(batch(6, WIDTH)).square().mean().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    model.synchronize()


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_own_storages(module: nn.Module) -> None:
    """Each parameter has a storage of exactly its bytes, which no other one has."""
    params = list(module.parameters())
    for param in params:
        assert param.untyped_storage().nbytes() == param.nbytes
        assert param.storage_offset() == 0
    addresses = [param.untyped_storage().data_ptr() for param in params if param.numel()]
    assert len(set(addresses)) == len(addresses)


# Tensors that save as what they are.


@pytest.mark.parametrize("pin_model", PIN_MODES)
def test_parameters_and_gradients_have_storages_of_their_own(models: Models, pin_model: str) -> None:
    model = models.wrap(seeded(lambda: nn.Sequential(Tied(), *mlp(2, WIDTH))), 2, pin_model=pin_model)
    model.forward_backward((batch(6, WIDTH),), label=batch(6, WIDTH, seed=8), loss_fn=mse)
    model.synchronize()
    assert_own_storages(model.model)
    for param in model.model.parameters():
        if param.grad is not None:
            assert param.grad.untyped_storage().nbytes() == param.grad.nbytes


def test_one_bias_saves_as_a_bias(models: Models) -> None:
    model = models.wrap(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), 1)
    state = model.state_dict()
    assert saved_bytes(state["0.bias"]) < 20_000
    assert saved_bytes(model.model[1].bias) < 20_000
    assert_same(through_file(state["0.bias"]), state["0.bias"])


def test_safetensors_saves_and_loads_the_model(models: Models, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    net = seeded(lambda: nn.Sequential(Tied(), *mlp(2, WIDTH)))
    model = models.wrap(net, 2)
    trained(model)
    safetensors.save_model(model.model, tmp_path / "model.safetensors")
    loaded = seeded(lambda: nn.Sequential(Tied(), *mlp(2, WIDTH)), seed=11)
    safetensors.load_model(loaded, tmp_path / "model.safetensors")
    assert_same_state(loaded, model.model)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert len(saved) == len(model.state_dict()) - 1, "one of the tied names, and nothing else, is left out"
    for name, tensor in saved.items():
        assert_same(tensor, model.state_dict()[name], name)
    safetensors.load_model(model.model, tmp_path / "model.safetensors")
    assert_same_state(model, loaded)


def test_accelerate_saves_every_tensor(models: Models, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    model = models.wrap(seeded(lambda: nn.Sequential(Tied(), *mlp(2, WIDTH))), 2)
    trained(model)
    accelerate.Accelerator(cpu=True).save_model(model.model, tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    missing = model.state_dict().keys() - saved.keys()
    assert len(missing) == 1
    assert missing <= {"0.first.weight", "0.second.weight"}


def test_tied_weights_stay_tied_in_a_file(models: Models) -> None:
    model = models.wrap(seeded(lambda: nn.Sequential(Tied())), 1)
    state = through_file(model.state_dict())
    assert state["0.first.weight"].data_ptr() == state["0.second.weight"].data_ptr()
    assert state["0.none"].shape == (0, 3)
    assert saved_bytes({"w": model.state_dict()["0.first.weight"]}) < 2 * WIDTH * WIDTH * 4


def test_parameters_outlive_the_wrapper(models: Models) -> None:
    net = seeded(lambda: mlp(2, WIDTH))
    expected = copy.deepcopy(net.state_dict())
    model = models.wrap(net, 1)
    bias, state = net[1][0].bias, model.state_dict()
    gone = weakref.ref(model._engine.store.layers[0].flat)
    models.close()
    del model, net
    assert gone() is None
    assert_same(state["0.0.weight"], expected["0.0.weight"])
    assert_same(bias.detach(), expected["1.0.bias"])


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_state_dict_can_be_saved_while_the_model_is_open(models: Models, keep_vars: bool) -> None:
    model = models.wrap(seeded(lambda: nn.Sequential(Tied())), 2)
    trained(model)
    loaded = through_file(model.state_dict(keep_vars=keep_vars))
    assert_same({k: v.detach() for k, v in loaded.items()}, dict(model.state_dict()))
    assert isinstance(loaded["0.first.weight"], nn.Parameter) == keep_vars


# The network itself.


def wrapped_whole(net: nn.Module) -> RoundPipe:
    return RoundPipe(net, devices=["cpu"] * 2)


WRAPPED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "chain": (lambda: nn.Sequential(Tied(), *mlp(2, WIDTH)), wrapped_whole),
    "one layer": (Tied, wrapped_whole),
    "parts": (Parts, in_parts),
}


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_the_original_model_can_be_copied_while_it_is_wrapped(kind: str, how: str) -> None:
    build, wrap = WRAPPED[kind]
    net = seeded(build)
    structure = [(name, type(module)) for name, module in net.named_modules()]
    with wrap(net) as model:
        assert model.original_model is net
        trained(model)
        twin = copy.deepcopy(model.original_model) if how == "deepcopy" else through_file(model.original_model)
        assert [(name, type(module)) for name, module in twin.named_modules()] == structure
        assert_own_storages(twin)
        assert_same_state(twin, model)
        assert all(param.is_leaf and not vars(param) for param in twin.parameters())
        mine = {param.data_ptr() for param in net.parameters() if param.numel()}
        assert mine.isdisjoint(param.data_ptr() for param in twin.parameters())
        before = copy.deepcopy(twin.state_dict())
        trained(model, 1)
        assert_same(dict(twin.state_dict()), dict(before))
        twin(batch(6, WIDTH)).sum().backward()
    plain = copy.deepcopy(net)
    assert_same(plain.eval()(batch(6, WIDTH)), net.eval()(batch(6, WIDTH)))
    with wrap(twin) as again:
        trained(again, 1)


@pytest.mark.parametrize("kind", WRAPPED)
def test_an_averaged_model_follows_the_original_model(kind: str) -> None:
    build, wrap = WRAPPED[kind]
    net = seeded(build)
    sums = {name: torch.zeros_like(param) for name, param in net.named_parameters()}
    with wrap(net) as model:
        averaged = AveragedModel(model.original_model)
        for _ in range(3):
            trained(model, 1)
            averaged.update_parameters(model.original_model)
            with torch.no_grad():
                for name, param in net.named_parameters():
                    sums[name] += param / 3
        averaged(batch(6, WIDTH))
    for name, param in averaged.module.named_parameters():
        torch.testing.assert_close(param.detach(), sums[name])


def test_a_roundpipe_itself_is_not_copied(models: Models) -> None:
    model = models.wrap(mlp(2), 1)
    for copied in (copy.deepcopy, copy.copy, lambda value: copy.deepcopy([value])):
        with pytest.raises(UsageError, match=r"copy\.deepcopy\(wrapper\.original_model\)"):
            copied(model)
    with in_parts(Parts()) as auto:
        for copied in (copy.deepcopy, lambda value: copy.deepcopy(value.blocks[0])):
            with pytest.raises(UsageError, match=r"copy\.deepcopy\(wrapper\.original_model\)"):
                copied(auto)
