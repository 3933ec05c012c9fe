"""Models in memory that other libraries have quantised train as the plain model with the same values does.

The modules and tensors of bitsandbytes and torchao are stand-ins with the names and attributes of the libraries' own.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import labelled, livened, plain_loss, small, train_call, wrapped
from torch import Tensor, nn

import helpers_quantised as written
from helpers_packed import packed_places
from helpers_parity import assert_same, grads_of
from roundpipe.errors import ConfigError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
finegrained_fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")


class Params4bit(nn.Parameter):
    quant_state: Any


class Int8Params(nn.Parameter):
    SCB: Tensor


class QuantState:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _OfBitsandbytes(nn.Linear):
    """Writes the tensors of its format into a state dict, as the library's modules do."""

    beside: dict[str, Tensor]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": value for name, value in self.beside.items()})

    def forward(self, input: Tensor) -> Tensor:
        pytest.fail("the library's code ran")


class Linear4bit(_OfBitsandbytes):
    def __init__(self, plain: nn.Linear, compute_dtype: torch.dtype | None) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.compute_dtype, self.quant_state = compute_dtype, QuantState(plain.weight.dtype)
        tensors, self.values = written.four_bits("weight", plain.weight.detach())
        self.weight = Params4bit(tensors.pop("weight"), requires_grad=False)
        self.weight.quant_state, self.bias, self.beside = self.quant_state, plain.bias, tensors


class Linear8bitLt(_OfBitsandbytes):
    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        tensors, self.values = written.int8_rows("weight", plain.weight.detach())
        self.weight = Int8Params(tensors.pop("weight"), requires_grad=False)
        self.state, self.bias, self.beside = object(), plain.bias, tensors


class _OfTorchao(torch.Tensor):
    """A tensor subclass without memory, as torchao makes them."""

    @staticmethod
    def __new__(cls, dtype: torch.dtype, qdata: Tensor, scale: Tensor, zero: Tensor | None, tile: int) -> _OfTorchao:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype)

    def __init__(self, dtype: torch.dtype, qdata: Tensor, scale: Tensor, zero: Tensor | None, tile: int) -> None:
        self.qdata, self.scale, self.zero_point, self.block_size = qdata, scale, zero, [1, tile]
        self.act_quant_kwargs: object = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        return pytest.fail(f"the library's code ran: {func}")


class Int8Tensor(_OfTorchao):
    pass


class Float8Tensor(_OfTorchao):
    pass


class Int4TilePackedTo4dTensor(_OfTorchao):
    pass


for kind in (Params4bit, Int8Params, Linear4bit, Linear8bitLt):
    kind.__module__ = "bitsandbytes.nn.modules"
for kind in (Int8Tensor, Float8Tensor, Int4TilePackedTo4dTensor):
    kind.__module__ = "torchao.quantization"


def of_torchao(plain: nn.Linear, kind: type[_OfTorchao] = Int8Tensor) -> nn.Linear:
    """Groups of 16 columns; whole numbers have a zero point, too."""
    weight, made = plain.weight.detach(), copy.deepcopy(plain)
    groups = weight.float().unflatten(1, (-1, 16))
    if kind is Float8Tensor:
        scale, zero = groups.abs().amax(2) / 448, None
        qdata = (groups / scale.unsqueeze(2)).to(torch.float8_e4m3fn)
        values = qdata.float() * scale.unsqueeze(2)
    else:
        scale = (groups.amax(2) - groups.amin(2)) / 255
        zero = (-128 - groups.amin(2) / scale).round().to(torch.int8)
        qdata = (groups / scale.unsqueeze(2) + zero.unsqueeze(2)).round().clamp(-128, 127).to(torch.int8)
        values = (qdata.float() - zero.float().unsqueeze(2)) * scale.unsqueeze(2)
    quantised = kind(weight.dtype, qdata.flatten(1), scale, zero, 16)
    made._parameters["weight"] = nn.Parameter(quantised, requires_grad=False)
    made.values = values.flatten(1).to(weight.dtype)  # type: ignore[assignment]
    return made


def of_fp8(plain: nn.Linear) -> nn.Linear:
    tensors, values = written.fp8_tiles("weight", plain.weight.detach(), 16)
    made: Any = finegrained_fp8.FP8Linear(
        plain.in_features, plain.out_features, block_size=(16, 16), has_bias=plain.bias is not None
    )
    made.weight.data, made.weight_scale_inv.data = tensors["weight"], tensors["weight_scale_inv"]
    made.bias, made.values = plain.bias, values
    return made


MAKERS: dict[str, Any] = {
    "4 bits": lambda plain: Linear4bit(plain, plain.weight.dtype),
    "8 bits": Linear8bitLt,
    "fp8": of_fp8,
    "torchao int8": of_torchao,
    "torchao fp8": lambda plain: of_torchao(plain, Float8Tensor),
}


def quantised_and_plain(make: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A model with quantised linear modules, head aside, and the plain one with the same values, both frozen."""
    model = small("llama", attention_bias=True).to(dtype)
    plain = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            made = make(module)
            plain.get_submodule(name).get_parameter("weight").data = made.values
            del made.values
            model.set_submodule(name, made)
    for each in (model, plain):
        for param in each.parameters():
            if param.is_floating_point():
                param.requires_grad_(False)
    return model, plain


def adapted(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    return livened(peft.get_peft_model(model, config).train())


@pytest.mark.parametrize("kind", MAKERS)
def test_losses_and_gradients_are_those_of_the_plain_model(kind: str) -> None:
    model, plain = (adapted(each) for each in quantised_and_plain(MAKERS[kind]))
    batch = labelled("llama", num_rows=5)
    base = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer")
    with wrapped(model, 2) as ours:
        assert len(packed_places(model)) == 14
        assert model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer") is base
        for _ in range(2):
            assert_same(train_call(ours, batch, 3), plain_loss(plain, batch, 3))
        found, expected = (
            {name: grad for name, grad in grads_of(each).items() if "lora_" in name} for each in (model, plain)
        )
        assert found
        assert all(grad is not None and grad.abs().max() > 0 for grad in found.values())
        assert_same(found, expected)
    assert "weight=" in str(base)
    assert not any(type(param).__module__.startswith(("bits", "torchao")) for param in model.parameters())


def test_modules_of_bitsandbytes_compute_in_their_dtype_and_return_that_of_the_input() -> None:
    """As after prepare_model_for_kbit_training(), which makes norms and embeddings float32."""
    model, plain = quantised_and_plain(lambda each: Linear4bit(each, torch.bfloat16), torch.bfloat16)
    for each in (model, plain):
        for param in each.parameters():
            if param.dtype is torch.bfloat16 and (each is model or param.dim() == 1 or len(param) == 97):
                param.data = param.data.float()
    for module in plain.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype is torch.bfloat16:
            module.register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
            module.register_forward_hook(lambda _, __, out: out.float())
            if module.bias is not None:
                module.bias.data = module.bias.data.to(torch.bfloat16)
    batch = labelled("llama")
    with wrapped(model) as ours, torch.no_grad():
        assert_same(
            ours(**batch).logits,
            torch.cat([plain(**{"input_ids": rows}).logits for rows in batch["input_ids"].tensor_split(3)]),
        )


def replaced(make: Any) -> nn.Module:
    model = small("llama").requires_grad_(False)
    model.set_submodule("model.layers.1.mlp.up_proj", make(model.get_submodule("model.layers.1.mlp.up_proj")))
    return model


def without_scales(plain: nn.Linear) -> nn.Module:
    made = Linear4bit(plain, None)
    made.beside = {}
    return made


def quantising_inputs(plain: nn.Linear) -> nn.Module:
    made = of_torchao(plain)
    made._parameters["weight"].act_quant_kwargs = "dynamic"  # type: ignore[union-attr]
    return made


def experts_in_mxfp4(plain: nn.Linear) -> nn.Module:
    made = nn.Module()
    made.__class__ = type("Mxfp4GptOssExperts", (nn.Module,), {"__module__": "transformers.integrations.mxfp4"})
    return made


def experts_of_torchao(plain: nn.Linear) -> nn.Module:
    made = nn.Module()
    made._parameters["down_proj"] = of_torchao(plain)._parameters["weight"]
    return made


REFUSED: dict[str, Any] = {
    "it has no codes and scales yet": without_scales,
    "Linear of torchao, with a weight of the class Int4TilePackedTo4dTensor": lambda plain: of_torchao(
        plain, Int4TilePackedTo4dTensor
    ),
    "Linear of torchao, with a weight of the class Int8Tensor, which cannot be taken": quantising_inputs,
    "Mxfp4GptOssExperts of transformers": experts_in_mxfp4,
    "Module of torchao": experts_of_torchao,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_taken_is_refused_by_name(message: str) -> None:
    model = replaced(REFUSED[message])
    with pytest.raises(ConfigError, match=rf"'model.layers.1.mlp.up_proj[^ ]*'.*{message}.*roundpipe.load\(folder\)"):
        wrapped(model)
    assert not packed_places(model)
