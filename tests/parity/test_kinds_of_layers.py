"""Layers of many kinds compute what they compute in a plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import Models, batch, check_forward, check_fused, mse, seeded, total


class First(nn.Module):
    """Takes the first of a tuple, as after an LSTM."""

    def forward(self, values: tuple[Any, ...]) -> Any:
        return values[0]


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, need_weights=self.need_weights)
        return x + y if weights is None else x + y * weights.mean()


class ScaledDotProduct(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return x + y.transpose(1, 2).flatten(2)


class Branching(nn.Module):
    """One layer that is no Sequential, with several arguments and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Sequential(nn.Linear(6, 6), nn.GELU())
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor | None = None, *, flip: bool = False) -> Tensor:
        z = self.left(x) + self.scale * self.right(x if y is None else y)
        return z.flip(1) if flip else z


class HasUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class UsesMicrobatch(nn.Module):
    """Each of its parameters takes part in some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if x[0, 0] > 0 else self.negative(x)


def image(*shape: int) -> Tensor:
    return batch(*shape).contiguous(memory_format=torch.channels_last)


def conv_channels_last() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return model.to(memory_format=torch.channels_last)


Build = Callable[[], nn.Module]
LAYERS: dict[str, tuple[Build, Tensor]] = {
    "lstm": (lambda: nn.Sequential(nn.LSTM(6, 7, batch_first=True), First(), nn.Linear(7, 6)), batch(6, 4, 6)),
    "two-layer bidirectional gru": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.GRU(6, 5, 2, batch_first=True, bidirectional=True), First()),
        batch(6, 4, 6),
    ),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3)), batch(6, 3, 8, 8)),
    "conv channels last": (conv_channels_last, image(6, 3, 8, 8)),
    "conv channels last weights only": (conv_channels_last, batch(6, 3, 8, 8)),
    "conv1d and transposed conv": (
        lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.ConvTranspose1d(5, 3, 3), nn.MaxPool1d(2)),
        batch(6, 3, 9),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 8, padding_idx=2), nn.Linear(8, 8), nn.LayerNorm(8)),
        torch.arange(24).view(6, 4) % 11,
    ),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 3)), torch.arange(24).view(6, 4) % 11),
    "attention": (lambda: nn.Sequential(Attention(False), nn.LayerNorm(8), Attention(True)), batch(6, 5, 8)),
    "scaled dot product": (
        lambda: nn.Sequential(ScaledDotProduct(True), nn.LayerNorm(8), ScaledDotProduct(False)),
        batch(6, 5, 8),
    ),
    "transformer layers": (
        lambda: nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]),
        batch(6, 5, 8),
    ),
    "group norm and others": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Softmax(1), nn.InstanceNorm2d(4)),
        batch(6, 3, 5, 5),
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6)),
        batch(6, 6),
    ),
    "single module": (Branching, batch(6, 6)),
    "single linear": (lambda: nn.Linear(6, 6), batch(6, 6)),
    "nested sequentials": (
        lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Tanh()), nn.Sequential(nn.Linear(6, 6))),
        batch(6, 6),
    ),
    "no parameters in between": (
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Identity(), nn.Softplus(), nn.Linear(6, 6), nn.Flatten()),
        batch(6, 6),
    ),
    "one layer": (lambda: nn.Sequential(nn.Linear(6, 6)), batch(6, 6)),
    "unused parameters": (lambda: nn.Sequential(HasUnused(), nn.Tanh(), HasUnused()), batch(6, 6)),
    "parameters of some microbatches": (lambda: nn.Sequential(UsesMicrobatch(), UsesMicrobatch()), batch(6, 6)),
    "double precision": (lambda: mlp_of(torch.float64), batch(6, 6).double()),
}


def mlp_of(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(dtype)


@pytest.mark.parametrize("layers", LAYERS)
def test_fused_equals_the_reference(models: Models, num_devices: int, layers: str) -> None:
    build, x = LAYERS[layers]
    check_fused(models, seeded(build), num_devices, (x,), loss_fn=first_total)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("num_devices", [2, 3])
def test_forward_and_backward_equal_the_reference(models: Models, num_devices: int, layers: str) -> None:
    build, x = LAYERS[layers]
    check_forward(models, seeded(build), num_devices, (x,), loss_of=lambda output: first_total(output, None))


def first_total(output: Any, label: Any) -> Tensor:
    return total(output, label) if isinstance(output, Tensor) else total(output[0], label)


def test_a_single_module_gets_all_arguments(models: Models, num_devices: int) -> None:
    x, y = batch(6, 6), batch(6, 6, seed=1)
    check_fused(models, seeded(Branching), num_devices, (x,), {"y": y, "flip": True}, label=y)
    check_forward(models, seeded(Branching), num_devices, (x, y), {"flip": True})


def test_gradients_of_unused_parameters_stay_none(models: Models, num_devices: int) -> None:
    model = models.wrap(seeded(lambda: nn.Sequential(HasUnused(), HasUnused())), num_devices)
    model.forward_backward((batch(6, 6),), label=batch(6, 6), loss_fn=mse)
    model.synchronize()
    assert [p.grad is None for _, p in model.named_parameters()] == [False, False, True, True] * 2
    seen: list[bool] = []
    model.step(lambda: seen.extend(p.grad is None for p in model.optim_parameters()), is_async=False)
    assert seen == [False, False, True, True] * 2


def test_models_in_float16_and_bfloat16_give_what_torch_gives(models: Models, num_devices: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        module = seeded(lambda dtype=dtype: mlp_of(dtype))
        check_fused(
            models, module, num_devices, (batch(6, 6).to(dtype),), loss_fn=lambda o, y: o.float().square().sum()
        )


def test_kernels_with_several_threads_equal_the_reference(models: Models) -> None:
    torch.set_num_threads(2)
    module = seeded(lambda: nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.LayerNorm(300), nn.Linear(300, 64)))
    check_fused(models, module, 3, (batch(200, 64),), label=batch(200, 64))
