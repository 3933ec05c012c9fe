"""Quantised tensors and tensor subclasses are refused when a model is wrapped; plain packed integers are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bad_input_scene import refused
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError

DEVICES = ["cpu"] * 3
WIDTH = 4
THREE_MICROBATCHES = RoundPipeRunConfig(num_microbatch=3)


class Params4bit(nn.Parameter):
    """Like a parameter of bitsandbytes: packed bytes, scales in an attribute, and an overridden `to`."""

    quant_state: float

    def __new__(cls, data: Tensor, quant_state: float) -> Params4bit:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made

    def to(self, *args: Any, **kwargs: Any) -> Params4bit:  # type: ignore[override]
        return Params4bit(self.data.to(*args, **kwargs), self.quant_state)


class WrapperTensor(torch.Tensor):
    """Like a tensor of torchao or DTensor: no memory, an inner tensor, and overridden operators."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> WrapperTensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return func(*(a.inner.float() if isinstance(a, cls) else a for a in args), **(kwargs or {}))


class FunctionTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Marker(nn.Parameter):
    """A subclass of Parameter that overrides nothing."""


class MarkerWithConstructor(nn.Parameter):
    """A subclass of Parameter with another constructor, which overrides nothing else."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, width: int = WIDTH) -> MarkerWithConstructor:
        return super().__new__(cls, torch.eye(width) / 2)  # type: ignore[return-value]

    def __repr__(self) -> str:  # type: ignore[override]
        return "half of the identity"


def packed() -> Tensor:
    return torch.arange(WIDTH * WIDTH, dtype=torch.uint8).view(WIDTH, WIDTH)


class Layer(nn.Module):
    """Computes with `weight`, which is quantised."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, Params4bit) or weight.dtype is torch.uint8:
            assert getattr(weight, "quant_state", None) is not None
            return x @ (weight.float() * weight.quant_state)
        return x @ (weight.dequantize() if weight.is_quantized else weight)


def with_attribute(parameter: nn.Parameter) -> nn.Parameter:
    parameter.scales = torch.ones(WIDTH)  # type: ignore[attr-defined]
    return parameter


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning")
def quantised() -> nn.Parameter:
    return nn.Parameter(torch.quantize_per_tensor(torch.eye(WIDTH), 0.1, 0, torch.qint8), requires_grad=False)


SPECIAL: dict[str, tuple[Any, list[str]]] = {
    "bitsandbytes": (lambda: Params4bit(packed(), 0.5), ["Params4bit", "quant_state", "torch.bfloat16"]),
    "wrapper": (lambda: nn.Parameter(WrapperTensor(torch.eye(WIDTH)), False), ["WrapperTensor", "__torch_dispatch__"]),
    "function": (
        lambda: nn.Parameter(torch.eye(WIDTH).as_subclass(FunctionTensor)),
        ["FunctionTensor", "__torch_function__"],
    ),
    "attribute": (lambda: with_attribute(Marker(torch.eye(WIDTH))), ["Marker", "scales"]),
    "quantised": (quantised, ["quantised", "qint8", "dequantize()"]),
}


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning")
@pytest.mark.parametrize("wrap", [RoundPipe, wrap_model_to_roundpipe])
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_weight_that_cannot_travel_is_refused_by_name(kind: str, wrap: Any) -> None:
    make, fragments = SPECIAL[kind]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(make()))
    place = model[0].weight.data_ptr()
    with refused(ConfigError, "'1.weight'", *fragments):
        wrap(model, devices=DEVICES)
    assert model[0].weight.data_ptr() == place
    assert not hasattr(model[0].weight, "_roundpipe_owner")


def test_a_buffer_that_cannot_travel_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model[0].register_buffer("table", torch.eye(WIDTH).as_subclass(FunctionTensor))
    with refused(ConfigError, "buffer '0.table'", "FunctionTensor"):
        RoundPipe(model, devices=DEVICES)


@pytest.mark.parametrize("kind", ["bitsandbytes", "wrapper"])
def test_a_model_of_transformers_is_refused_before_it_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: pytest.fail("the model ran"))
    make, fragments = SPECIAL[kind]
    model.model.layers[1].mlp.up_proj.weight = make()
    with refused(ConfigError, "'model.layers.1.mlp.up_proj.weight'", *fragments):
        wrap_model_to_roundpipe(model, devices=DEVICES)


@pytest.mark.parametrize("make", [lambda: Marker(torch.eye(WIDTH) / 2), MarkerWithConstructor])
def test_a_subclass_that_adds_nothing_trains_like_a_parameter(make: Any) -> None:
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(make()), nn.Linear(WIDTH, WIDTH))
        x = torch.randn(6, WIDTH)
        if not wrapped:
            for part in x.chunk(3):
                model(part).square().sum().backward()
            results.append(model[1].weight.grad)
            continue
        with RoundPipe(model, devices=DEVICES) as pipe:
            pipe.forward_backward(
                input_args=(x,), loss_fn=lambda out, _: out.square().sum(), run_config=THREE_MICROBATCHES
            )
            pipe.synchronize()
            results.append(model[1].weight.grad)
    assert torch.equal(results[0], results[1])


class PackedIntegers(nn.Module):
    """Like a layer of GPTQ or AWQ: plain integer tensors that forward unpacks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.arange(WIDTH * WIDTH, dtype=torch.int32).view(WIDTH, WIDTH))
        self.zeros = nn.Parameter(packed(), requires_grad=False)
        self.scales = nn.Parameter(torch.linspace(0.1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ ((self.qweight - self.zeros.to(torch.int32)).float() * self.scales + math.pi)


@pytest.mark.parametrize("mode", ["alloc", "register", "off"])
def test_packed_integers_in_plain_tensors_travel(mode: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), PackedIntegers())
    x = torch.randn(6, WIDTH)
    with torch.no_grad():
        expected = torch.cat([model(part) for part in x.chunk(3)])
        with RoundPipe(model, devices=DEVICES, pin_model=mode) as pipe:
            assert torch.equal(pipe(x, roundpipe_run_config=THREE_MICROBATCHES), expected)
