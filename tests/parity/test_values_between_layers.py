"""Whatever travels between layers (nests, shared tensors, odd strides) arrives, and its gradients come back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import Models, batch, check_forward, check_fused, mse, seeded, total


class Layer(nn.Module):
    """A layer made of a function and a linear map for it to use."""

    def __init__(self, function: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


def linear(lin: nn.Linear, x: Tensor) -> Tensor:
    return lin(x).tanh()


def model_of(*functions: Callable[..., Any]) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(*[Layer(function) for function in functions])


Pair = namedtuple("Pair", ["left", "right"])


def swap_in_dict(lin: nn.Linear, values: dict[str, Any]) -> dict[str, Any]:
    return {"b": lin(values["a"]), "a": [values["b"], {"deep": values["a"] * 2}], "n": 3, "none": None}


def from_dict(lin: nn.Linear, values: dict[str, Any]) -> Tensor:
    assert values["n"] == 3
    assert values["none"] is None
    return lin(values["b"]) + values["a"][0] * values["a"][1]["deep"]


def same_tensor(lin: nn.Linear, pair: tuple[Tensor, Tensor]) -> Tensor:
    assert pair[0] is pair[1]
    return lin(pair[0]) * pair[1] + pair[0].sin()


def with_integers(lin: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return lin(x), x.argmax(1), x > 0


def use_integers(lin: nn.Linear, values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, index, mask = values
    return lin(x).masked_fill(mask, 0.5) + nn.functional.one_hot(index, 6)


VALUES: dict[str, Callable[[], nn.Sequential]] = {
    "tuple": model_of(lambda lin, x: (lin(x), x), lambda lin, v: (v[1], lin(v[0])), lambda lin, v: lin(v[0]) * v[1]),
    "list": model_of(lambda lin, x: [lin(x), x], lambda lin, v: lin(v[0]) + v[1]),
    "dict": model_of(lambda lin, x: {"a": lin(x), "b": x}, swap_in_dict, from_dict),
    "ordered dict": model_of(
        lambda lin, x: OrderedDict(z=lin(x), a=x), lambda lin, v: OrderedDict(v), lambda lin, v: lin(v["z"]) + v["a"]
    ),
    "namedtuple": model_of(lambda lin, x: Pair(lin(x), x), lambda lin, v: lin(v.left) * v.right),
    "same tensor twice": model_of(lambda lin, x: (lin(x),) * 2, same_tensor, linear),
    "pass-through": model_of(
        lambda lin, x: (lin(x), x.sin()),
        lambda lin, v: (lin(v[0]), v[1]),
        lambda lin, v: (lin(v[0]) + v[1], v[1]),
        lambda lin, v: v[0] + lin(v[1]) + v[1],
    ),
    "input as output": model_of(lambda lin, x: (x, lin(x)), lambda lin, v: lin(v[0] * v[1]) + v[1] + v[0]),
    "transposed": model_of(lambda lin, x: lin(x).t(), lambda lin, x: lin(x.t()), linear),
    "expanded": model_of(lambda lin, x: lin(x)[:, :1].expand(-1, 6), linear, linear),
    "expanded from one": model_of(lambda lin, x: (x, lin(x).mean().expand(2, 6)), lambda lin, v: lin(v[0]) + v[1][0]),
    "sliced": model_of(lambda lin, x: torch.cat([lin(x), x], 1)[:, 1:12:2], linear, linear),
    "sliced rows": model_of(lambda lin, x: torch.cat([x, lin(x)])[1:], lambda lin, x: lin(x[len(x) // 2 :]), linear),
    "a view and its base": model_of(
        lambda lin, x: (y := lin(x), y[:, 2:], y[:, :2]), lambda lin, v: lin(v[0]) + v[1].sum() + v[2].mean(), linear
    ),
    "empty tensor": model_of(lambda lin, x: (lin(x), x[:, :0]), lambda lin, v: lin(v[0]) + v[1].sum()),
    "scalar tensor": model_of(lambda lin, x: (lin(x), x.mean()), lambda lin, v: lin(v[0]) * v[1]),
    "integers and masks": model_of(with_integers, use_integers),
    "detached": model_of(lambda lin, x: (lin(x), lin(x).detach()), lambda lin, v: lin(v[0]) * v[1]),
    "output that is not used": model_of(lambda lin, x: (lin(x), lin(x).sin()), lambda lin, v: lin(v[0])),
    "complex": model_of(lambda lin, x: torch.complex(lin(x), x), lambda lin, z: lin(z.abs()) + z.conj().imag),
    "conjugated": model_of(lambda lin, x: torch.complex(lin(x), x).conj(), lambda lin, z: lin(z.real) + z.imag),
    "double": model_of(lambda lin, x: lin(x).double(), lambda lin, x: lin(x.float()) + x.float()),
    "many uses": model_of(linear, lambda lin, x: lin(x) + x * x.sin() + x.exp() + lin(x * 0.5), linear),
}


@pytest.mark.parametrize("values", VALUES)
def test_fused_equals_the_reference(models: Models, num_devices: int, values: str) -> None:
    check_fused(models, seeded(VALUES[values]), num_devices, (batch(7, 6),), label=batch(7, 6), num_calls=1)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("num_devices", [1, 3])
def test_forward_and_backward_equal_the_reference(models: Models, num_devices: int, values: str) -> None:
    check_forward(models, seeded(VALUES[values]), num_devices, (batch(7, 6),))


@pytest.mark.parametrize("loss", ["sum", "mean", "transposed", "broadcast"])
def test_gradients_of_odd_strides_from_the_loss_equal_the_reference(
    models: Models, num_devices: int, loss: str
) -> None:
    losses: dict[str, Callable[[Tensor, Any], Tensor]] = {
        "sum": lambda output, label: output.sum(),
        "mean": lambda output, label: output.mean(),
        "transposed": lambda output, label: total(output.t().contiguous(), label),
        "broadcast": lambda output, label: output.sum(1).sin().sum(),
    }

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 33), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 9))

    check_fused(models, seeded(build), num_devices, (batch(37, 6),), loss_fn=losses[loss])


def test_outputs_of_every_kind_are_merged(models: Models, num_devices: int) -> None:
    def outputs(lin: nn.Linear, x: Tensor) -> dict[str, Any]:
        return {"t": lin(x), "mean": lin(x).mean(), "name": "n", "pair": (x.argmax(1), lin(x).t().t())}

    check_fused(
        models,
        seeded(model_of(linear, outputs)),
        num_devices,
        (batch(8, 6),),
        loss_fn=lambda output, label: output["t"].sum() + output["mean"] + output["pair"][1].mean(),
    )


def test_loss_on_some_of_the_outputs_leaves_the_others_alone(models: Models, num_devices: int) -> None:
    module = seeded(model_of(linear, lambda lin, x: (lin(x), x, x.cos()), lambda lin, v: (v[1], lin(v[0]), v[2])))
    check_fused(models, module, num_devices, (batch(8, 6),), loss_fn=lambda output, label: output[0].sum())
    check_forward(models, module, num_devices, (batch(8, 6),), loss_of=lambda output: output[0].exp().sum())


def test_the_first_layer_gets_all_arguments(models: Models, num_devices: int) -> None:
    def first(lin: nn.Linear, x: Tensor, y: Tensor, *, scale: float, mask: Tensor, deep: dict[str, Any]) -> Tensor:
        assert deep["text"] == "t"
        return (lin(x) + y * scale).masked_fill(mask, 0.0) + deep["list"][0] * deep["zero"]

    module = seeded(model_of(first, linear))
    args = (batch(8, 6), batch(8, 6, seed=1))
    deep = {"list": [batch(8, 6, seed=3)], "text": "t", "zero": torch.tensor(0.25)}
    kwargs = {"scale": 2.0, "mask": batch(8, 6, seed=2) > 0, "deep": deep}
    check_fused(models, module, num_devices, args, kwargs, label=batch(8, 6))
    check_forward(models, module, num_devices, args, kwargs)


def test_a_loss_that_needs_no_label_and_a_nested_label(models: Models, num_devices: int) -> None:
    def loss_fn(output: Tensor, label: dict[str, Any]) -> Tensor:
        assert label["name"] == "l"
        return mse(output, label["y"]) * label["weight"]

    label = {"y": batch(8, 6), "weight": torch.tensor(0.5), "name": "l"}
    check_fused(models, seeded(model_of(linear)), num_devices, (batch(8, 6),), label=label, loss_fn=loss_fn)
    check_fused(models, seeded(model_of(linear)), num_devices, (batch(8, 6),), loss_fn=total)


@pytest.mark.parametrize("view", ["sliced", "transposed", "expanded", "channels"])
def test_inputs_of_odd_strides_equal_the_reference(models: Models, num_devices: int, view: str) -> None:
    base = batch(8, 12)
    inputs = {
        "sliced": base[:, 3:9],
        "transposed": batch(6, 8).t(),
        "expanded": base[:, :1].expand(8, 6),
        "channels": base.view(8, 2, 6).movedim(1, 2)[..., 1],
    }
    check_fused(models, seeded(model_of(linear, linear)), num_devices, (inputs[view],), label=batch(8, 6))
