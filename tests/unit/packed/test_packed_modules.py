"""A module with packed weights computes what the plain module computes, and keeps no expanded weight for backward."""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers_packed import packed_places, unpacked
from helpers_parity import assert_same, batch, seeded
from roundpipe.errors import ConfigError, UsageError
from roundpipe.packed import FORMS, PackedWeight, pack_frozen


class Experts(nn.Module):
    """Matrices of experts in one parameter, used one by one or all together."""

    def __init__(self, is_whole: bool = False) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 10, 6))
        self.down = nn.Parameter(torch.randn(4, 6, 10))
        self.bias = nn.Parameter(torch.randn(4, 6))
        self.is_whole = is_whole

    def forward(self, x: Tensor) -> Tensor:
        if self.is_whole:
            hidden = torch.einsum("ni,eoi->neo", x, self.up).tanh()
            return torch.einsum("neo,eio->ni", hidden, self.down) + self.bias.sum(0)
        out = torch.zeros_like(x)
        for expert in range(4):
            hidden = nn.functional.linear(x, self.up[expert]).tanh()
            out = out + nn.functional.linear(hidden, self.down[expert], self.bias[expert])
        return out


def linear() -> nn.Module:
    return nn.Linear(6, 6)


def packed_copy(plain: nn.Module, form: str = "nf4") -> nn.Module:
    packed = copy.deepcopy(plain)
    pack_frozen(packed, FORMS[form], "model")
    return packed


def trained(module: nn.Module, x: Tensor, run: Callable[..., Tensor] | None = None) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = module(x) if run is None else run(module, x)
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "experts": Experts,
    "experts together": lambda: Experts(is_whole=True),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_the_unpacked_weights(make: Callable[[], nn.Module], form: str) -> None:
    before = seeded(make).requires_grad_(False)
    packed = packed_copy(before, form)
    plain = unpacked(before, packed)
    x = batch(2, 5, 6) if isinstance(before, nn.TransformerEncoderLayer) else batch(5, 6)
    assert_same(trained(packed, x), trained(plain, x))
    assert not torch.equal(trained(before, x)[0], trained(plain, x)[0]), "packing has changed nothing"


def test_three_dimensions_autocast_checkpoints_and_no_grad() -> None:
    before = seeded(linear).requires_grad_(False)
    packed = packed_copy(before)
    plain, x = unpacked(before, packed), batch(2, 3, 6)

    def cast(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x).float()

    def recomputed(module: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda x: module(module(x).tanh()), x, use_reentrant=False)
        return found

    for run in (None, cast, recomputed):
        assert_same(trained(packed, x, run), trained(plain, x, run))
    with torch.no_grad():
        assert_same(packed(x), plain(x))
    with torch.inference_mode():
        assert_same(packed(x).clone(), plain(x).clone())


@pytest.mark.parametrize("make", [linear, Experts], ids=["linear", "experts"])
def test_no_expanded_weight_is_kept_for_backward(make: Callable[[], nn.Module], monkeypatch: Any) -> None:
    packed = packed_copy(seeded(make).requires_grad_(False))
    alive: list[weakref.ref[Tensor]] = []
    sizes: list[int] = []
    real = PackedWeight.expand

    def expand(self: PackedWeight, *args: Any) -> Tensor:
        found = real(self, *args)
        alive.append(weakref.ref(found))
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(PackedWeight, "expand", expand)
    out = packed(batch(5, 6).requires_grad_())
    gc.collect()
    whole = [described.num_elements for described in packed_places(packed).values()]
    assert sizes == whole, "each weight is expanded once"
    assert all(ref() is None for ref in alive)
    del sizes[:]
    out.sum().backward()
    assert sum(sizes) == sum(whole), "backward expands what was used, once"
    assert all(ref() is None for ref in alive)


@pytest.mark.parametrize("form", FORMS)
def test_compiled_code_keeps_packed_bytes_for_backward(form: str) -> None:
    torch._dynamo.reset()
    before = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 6)).requires_grad_(False)
    before[2].bias.requires_grad_(True)
    packed = packed_copy(before, form)
    plain = unpacked(before, packed)
    run = torch.compile(packed, backend="aot_eager", fullgraph=True)
    out = run(batch(5, 30).requires_grad_())
    shapes = {tuple(each.shape) for each in out.grad_fn.saved_tensors}
    assert not shapes & {(40, 30), (30, 40), (6, 40), (40, 6)}
    assert tuple(packed.get_parameter(f"0.weight_{form}").shape) in shapes
    assert_same(trained(packed, batch(5, 30), lambda _, x: run(x)), trained(plain, batch(5, 30)))
    assert_same(packed[2].bias.grad, plain[2].bias.grad)


def test_what_trains_beside_packed_weights_gets_its_gradient() -> None:
    before = seeded(Experts).requires_grad_(False)
    before.bias.requires_grad_(True)
    packed = packed_copy(before)
    plain = unpacked(before, packed)
    for module in (packed, plain):
        module(batch(5, 6)).sum().backward()
    assert_same(packed.bias.grad, plain.bias.grad)
    assert packed.get_parameter("up_nf4").dtype is torch.uint8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.positions = nn.Parameter(torch.randn(1, 5, 6))
        self.head = nn.Linear(6, 9)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_what_is_packed_and_what_is_not() -> None:
    model = Model().requires_grad_(False)
    model.second.requires_grad_(True)
    pack_frozen(model, FORMS["int8"], "model")
    assert set(packed_places(model)) == {"first.weight"}
    assert [name for name, _ in model.named_parameters()][2:4] == ["first.weight_int8", "first.bias"]
    assert "weight=int8" in str(model)
    assert "PackedLinear" in str(model)
    assert isinstance(model.first, nn.Linear)


def test_weights_tied_to_an_embedding_stay_and_others_stay_tied() -> None:
    model = Model().requires_grad_(False)
    model.second.weight = model.first.weight
    tied = nn.ModuleDict({"model": model, "embed": nn.Embedding(6, 6), "out": nn.Linear(6, 6)}).requires_grad_(False)
    tied["out"].weight = tied["embed"].weight
    pack_frozen(tied, FORMS["nf4"], "model")
    assert set(packed_places(tied)) == {"model.first.weight", "model.second.weight"}
    assert model.first.weight_nf4 is model.second.weight_nf4


def test_large_frozen_weights_that_stay_are_named(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("roundpipe.packed.choice._LARGE_BYTES", 100)
    with caplog.at_level(logging.INFO, "roundpipe"):
        pack_frozen(Model().requires_grad_(False), FORMS["fp8"], "my model")
    first, second = caplog.messages
    assert first.startswith("my model: 2 frozen weights are packed as fp8, ")
    assert second == "my model: these frozen weights are not packed: positions"


def test_nothing_to_pack_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no frozen linear weight \(3 train\).*requires_grad_\(False\)"):
        pack_frozen(Model(), FORMS["nf4"], "model")
    model = Model().requires_grad_(False)
    pack_frozen(model, FORMS["nf4"], "model")
    before = dict(model.named_parameters())
    pack_frozen(model, FORMS["nf4"], "model")  # packed already
    assert dict(model.named_parameters()).keys() == before.keys()


def test_a_weight_that_cannot_be_packed_is_named() -> None:
    model = Model().requires_grad_(False)
    model.second.weight[3, 3] = torch.nan
    with pytest.raises(ConfigError, match=r"'second.weight' cannot be packed as nf4: it has values that are infinite"):
        pack_frozen(model, FORMS["nf4"], "model")


# Outside of the forward.


def test_outside_of_the_forward_a_weight_reads_like_a_tensor(monkeypatch: Any) -> None:
    packed = packed_copy(nn.Linear(6, 8).to(torch.bfloat16).requires_grad_(False))
    weight = packed.weight
    values = packed_places(packed)["weight"].expand(packed.weight_nf4).view(8, 6)
    assert_same(weight + 0, values)
    assert_same(weight.float().t(), values.float().t())
    assert_same(nn.functional.linear(torch.ones(6, dtype=torch.bfloat16), weight), values.sum(1))
    assert_same(torch.zeros(8, 6, dtype=torch.bfloat16).copy_(weight), values)
    monkeypatch.setattr(PackedWeight, "expand", lambda *args: pytest.fail("reading these expands nothing"))
    assert (weight.shape, weight.dtype, weight.device.type) == ((8, 6), torch.bfloat16, "cpu")
    assert (weight.numel(), weight.dim(), weight.size(1), len(weight), weight.requires_grad) == (48, 2, 6, 8, False)
    assert weight.is_floating_point()


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.add_(1),
        lambda weight: weight.copy_(torch.zeros(6, 6)),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: weight.__iadd__(1),
        lambda weight: setattr(weight, "data", torch.zeros(6, 6)),
        lambda weight: nn.init.zeros_(weight),
    ],
    ids=["add_", "copy_", "item", "iadd", "data", "init"],
)
def test_writes_that_would_be_lost_are_refused(write: Callable[[Tensor], object]) -> None:
    packed = packed_copy(linear().requires_grad_(False))
    with pytest.raises(UsageError, match=r"'weight' is a frozen weight that is packed as nf4.*cannot be merged"):
        write(packed.weight)


def test_replacing_a_packed_weight_raises() -> None:
    packed = packed_copy(linear().requires_grad_(False))
    with pytest.raises(KeyError, match="already exists"):
        packed.weight = nn.Parameter(torch.zeros(6, 6))
    with pytest.raises((AttributeError, TypeError)):
        packed.weight = torch.zeros(6, 6)


def test_copies_pickles_and_state_dicts() -> None:
    before = nn.Sequential(seeded(Experts), linear()).requires_grad_(False)
    packed, x = packed_copy(before), batch(5, 6)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    for same in (copy.deepcopy(packed), torch.load(file, weights_only=False)):
        assert_same(trained(same, x), trained(packed, x))
    assert sorted(packed.state_dict()) == ["0.bias", "0.down_nf4", "0.up_nf4", "1.bias", "1.weight_nf4"]
    other = packed_copy(nn.Sequential(Experts(), linear()).requires_grad_(False))
    other.load_state_dict(packed.state_dict())
    assert_same(trained(other, x), trained(packed, x))


def test_state_of_another_form_or_of_plain_weights_is_refused_by_name() -> None:
    before = linear().requires_grad_(False)
    packed = packed_copy(before, "int8")
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight_int8".*\n.*Unexpected key.*"weight_nf4"'):
        packed.load_state_dict(packed_copy(before, "nf4").state_dict())
    with pytest.raises(RuntimeError, match=r'"weight_int8"'):
        packed.load_state_dict(before.state_dict())
    other = packed_copy(nn.Linear(64, 64).requires_grad_(False), "int8").state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight_int8"):
        packed.load_state_dict({**other, "bias": before.bias})
