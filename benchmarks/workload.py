"""The benchmarks' model, a decoder-only transformer, and its training in plain PyTorch and with RoundPipe.

Shapes are those of published models; weights are random. Does not know how results are measured or printed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from measuring import Measured, Pace, SpeedTable, has_gpu, measured
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.optim import Adam

LEARNING_RATE = 1e-5
INITIAL_STD = 0.02
NORM_EPS = 1e-6
ROTARY_BASE = 500_000.0
MODES = {"asynchronous": True, "exact": False}
"""The two kinds of optimizer step: name -> is_async."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dimensions of a transformer."""

    hidden: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int


SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151936),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256),
    "small": Shape(32, 28, 4, 2, 8, 64, 128),  # as many layers as 0.6b
    "tiny": Shape(32, 2, 4, 2, 8, 64, 128),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one training step: model and batch size. `lora_rank` 0 trains all parameters."""

    shape_name: str
    num_sequences: int
    sequence_length: int = 4096
    lora_rank: int = 0

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.sequence_length

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.sequence_length}"

    def batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        size = (self.num_sequences, self.sequence_length)
        return torch.randint(self.shape.vocabulary, size, generator=generator)


def sized(work: Work) -> Work:
    """`work` with a GPU; without one, the same work with a tiny model."""
    return work if has_gpu() else dataclasses.replace(work, shape_name="tiny", sequence_length=32)


def compute_device() -> str:
    return "cuda:0" if has_gpu() else "cpu"


# The model.


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trainable low-rank product."""

    def __init__(self, num_inputs: int, num_outputs: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(num_inputs, num_outputs, bias=False)
        self.reduce = nn.Linear(num_inputs, rank, bias=False)
        self.expand = nn.Linear(rank, num_outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.expand(self.reduce(x))


def linear(num_inputs: int, num_outputs: int, lora_rank: int) -> nn.Module:
    if lora_rank:
        return LoraLinear(num_inputs, num_outputs, lora_rank)
    return nn.Linear(num_inputs, num_outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, shape: Shape, lora_rank: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.query = linear(shape.hidden, query_width, lora_rank)
        self.key = linear(shape.hidden, key_width, lora_rank)
        self.value = linear(shape.hidden, key_width, lora_rank)
        self.out = linear(query_width, shape.hidden, lora_rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        cos, sin = rotary_angles(x.shape[1], self.head_dim, x)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def rotary_angles(length: int, head_dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for every position and pair of dimensions, with the device and dtype of `like`."""
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = positions[:, None] * ROTARY_BASE**-exponents
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    real, imaginary = heads.chunk(2, dim=-1)
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, shape: Shape, lora_rank: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (
            nn.RMSNorm(shape.hidden, eps=NORM_EPS),
            nn.RMSNorm(shape.hidden, eps=NORM_EPS),
        )
        self.attention = Attention(shape, lora_rank)
        self.gate = linear(shape.hidden, shape.intermediate, lora_rank)
        self.up = linear(shape.hidden, shape.intermediate, lora_rank)
        self.down = linear(shape.intermediate, shape.hidden, lora_rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.logits = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


def build(work: Work, device: str = "cpu") -> nn.Sequential:
    """The model in bfloat16 with random weights, which are drawn on the GPU if there is one, because that is fast."""
    model = build_on_meta(work)
    torch.manual_seed(0)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_random_like(param).to(device), requires_grad=param.requires_grad))
    return model


def build_on_meta(work: Work) -> nn.Sequential:
    """The model in bfloat16 without weights."""
    shape, rank = work.shape, work.lora_rank
    with torch.device("meta"):
        embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        blocks = [Block(shape, rank) for _ in range(shape.num_blocks)]
        model = nn.Sequential(embedding, *blocks, Head(shape)).to(torch.bfloat16)
    if rank:
        model.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.reduce.requires_grad_()
                module.expand.requires_grad_()
    return model


def _random_like(param: torch.Tensor) -> torch.Tensor:
    value = torch.empty_like(param, device=compute_device())
    return value.fill_(1.0) if param.dim() == 1 else value.normal_(std=INITIAL_STD)


def num_parameters(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def mean_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


# The trainings.


class PlainTraining:
    """Training in the memory of one device: bfloat16 weights, float32 masters, torch's fused Adam."""

    def __init__(self, work: Work) -> None:
        self._model = build(work, compute_device())
        self._weights = [param for param in self._model.parameters() if param.requires_grad]
        self._masters = [weight.detach().float().requires_grad_() for weight in self._weights]
        self._optimizer = torch.optim.Adam(self._masters, lr=LEARNING_RATE, fused=True)

    def measured(self, work: Work, num_microbatch: int, pace: Pace, *, recompute: bool) -> Measured | None:
        """Measure steps with batches of `work`, whose batch size may differ from the constructor's."""
        ids = work.batch()
        step = functools.partial(self.step, ids, num_microbatch, recompute=recompute)
        return measured(step, work.num_tokens, pace)

    def step(self, ids: torch.Tensor, num_microbatch: int, *, recompute: bool) -> float:
        losses = []
        for part in ids.to(compute_device()).chunk(num_microbatch):
            loss = mean_loss(self._forward(part, recompute), part) / num_microbatch
            loss.backward()
            losses.append(loss.detach())
        self._update()
        return float(sum(losses))

    def _forward(self, ids: torch.Tensor, recompute: bool) -> torch.Tensor:
        x = ids
        for layer in self._model:
            is_recomputed = recompute and isinstance(layer, Block)
            x = checkpoint(layer, x, use_reentrant=False) if is_recomputed else layer(x)
        return x

    def _update(self) -> None:
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)


class RoundPipeTraining:
    """Training with weights and optimizer in host memory, by `num_workers` workers on one GPU or virtual devices."""

    def __init__(
        self, model: nn.Sequential, num_workers: int = 1, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.model = RoundPipe(
            model,
            optim_dtype=torch.float32,
            devices=[compute_device()] * num_workers,
            process_group=process_group,
        )
        self._optimizer = Adam(list(self.model.optim_parameters()), lr=LEARNING_RATE)

    def measured(self, work: Work, num_microbatch: int, pace: Pace, *, is_async: bool) -> Measured | None:
        step = functools.partial(self.step, work.batch(), num_microbatch, is_async=is_async)
        return measured(step, work.num_tokens, pace, self.model.synchronize)

    def add_rows(
        self, table: SpeedTable, name: str, work: Work, num_microbatch: int, pace: Pace, reference: Measured | None
    ) -> None:
        for mode, is_async in MODES.items():
            row = self.measured(work, num_microbatch, pace, is_async=is_async)
            table.add(f"{name}: RoundPipe, {mode}", row, reference)

    def step(self, ids: torch.Tensor, num_microbatch: int, *, is_async: bool) -> float:
        loss = self.model.forward_backward(
            input_args=(ids,),
            label=ids,
            loss_fn=mean_loss,
            run_config=RoundPipeRunConfig(num_microbatch=num_microbatch, loss_reduction="mean"),
        )
        self.model.step(self._update, is_async=is_async)
        return float(loss)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


@contextlib.contextmanager
def roundpipe_training(model: nn.Sequential, num_workers: int = 1) -> Iterator[RoundPipeTraining]:
    """Wrap the model inside the block; afterwards it is plain again and may be wrapped once more."""
    training = RoundPipeTraining(model, num_workers)
    try:
        yield training
    finally:
        training.model.close()
