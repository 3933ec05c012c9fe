"""Costs of layers on paper: the cut is that of wrapping, activations are those of plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers_tiny_hf import tiny_model
from roundpipe import RoundPipe, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe.estimate import layer_costs as layer_costs_module
from roundpipe.estimate.figures import GPUS
from roundpipe.estimate.layer_costs import (
    PaperModel,
    add_adapters,
    causal_lm_on_paper,
    layer_costs,
    sequential_on_paper,
)

GPU = GPUS["RTX4090"]
WORDS, WIDTH = 128, 64


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Pair(nn.Module):
    """Two blocks in one, so that its costs can be compared with those of the two."""

    def __init__(self, first: Block, second: Block) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def sequential(*inner: int, device: str = "meta") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *map(Block, inner), nn.Linear(WIDTH, WORDS))


def on_paper(make: Callable[[], Any]) -> PaperModel:
    with torch.device("meta"):
        return causal_lm_on_paper(make())


def test_sizes_of_layers_are_those_that_wrapping_plans_with() -> None:
    paper = sequential_on_paper(sequential(256, 128, 256), loss_of)
    costs = layer_costs(paper, GPU, 2, 16)
    with RoundPipe(sequential(256, 128, 256, device="cpu"), devices=["cpu"]) as model:
        planned = model.planning_profile().layers
    assert [(c.weight_bytes, c.grad_bytes) for c in costs] == [(c.weight_bytes, c.grad_bytes) for c in planned]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # qwen3 has a tied head
def test_the_cut_of_a_transformers_model_is_that_of_wrapping(kind: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_layers": 3}  # every weight fills its aligned place
    paper = on_paper(lambda: tiny_model(kind, **sizes))
    costs = layer_costs(paper, GPU, 2, 16)
    with wrap_model_to_roundpipe(tiny_model(kind, **sizes), devices=["cpu"]) as model:
        ids = torch.randint(64, (2, 8))
        model(input_ids=ids, labels=ids)
        planned = model.planning_profile().layers
    assert [c.weight_bytes for c in costs] == [c.weight_bytes for c in planned]
    assert [c.grad_bytes for c in costs] == [c.grad_bytes for c in planned]


def saved_bytes(block: nn.Module, x: torch.Tensor) -> int:
    """Bytes of memory that plain PyTorch keeps for the backward of a block, weights and input not counted."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = block(x)
    kept[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes()
    for known in (x, *block.parameters()):
        kept.pop(known.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def test_activations_of_a_block_are_those_that_plain_pytorch_saves() -> None:
    costs = layer_costs(sequential_on_paper(sequential(256, 128), loss_of), GPU, 2, 16)
    x = torch.randn(2, 16, WIDTH, requires_grad=True)
    assert costs[1].activation_bytes == saved_bytes(Block(256), x)
    assert costs[2].activation_bytes == saved_bytes(Block(128), x)
    assert costs[1].input_bytes == x.nbytes


def test_blocks_of_one_kind_are_metered_once_and_cost_the_same() -> None:
    model = sequential(256, 128, 256, 256)
    ran: list[nn.Module] = []
    for block in model[1:-1]:
        block.register_forward_pre_hook(lambda module, args: ran.append(module))
    costs = layer_costs(sequential_on_paper(model, loss_of), GPU, 2, 16)
    assert ran == [model[1], model[2], model[3]]  # the first block is always metered by itself
    assert costs[3] == costs[4]
    assert costs[2] != costs[3]
    assert costs[1].activation_bytes == costs[3].activation_bytes
    assert costs[1].forward_s == pytest.approx(costs[3].forward_s, rel=1e-9)


def test_times_add_up_over_blocks() -> None:
    model = sequential(4096, 2048)
    apart = layer_costs(sequential_on_paper(model, loss_of), GPU, 64, 512)
    together = nn.Sequential(model[0], Pair(model[1], model[2]), model[3])
    joined = layer_costs(sequential_on_paper(together, loss_of), GPU, 64, 512)
    assert joined[1].forward_s == pytest.approx(apart[1].forward_s + apart[2].forward_s, rel=1e-9)
    assert joined[1].backward_s == pytest.approx(apart[1].backward_s + apart[2].backward_s, rel=1e-9)
    assert joined[1].activation_bytes == apart[1].activation_bytes + apart[2].activation_bytes
    assert joined[0] == apart[0]
    assert joined[2].forward_s == pytest.approx(apart[3].forward_s, rel=1e-9)


def test_small_work_takes_the_time_of_launches() -> None:
    costs = layer_costs(sequential_on_paper(sequential(32), loss_of), GPU, 1, 1)
    assert costs[1].forward_s > 5 * GPU.launch_s


def test_adapters_train_the_linear_layers_of_blocks_and_nothing_else() -> None:
    network = tiny_model("llama", num_layers=2).to("meta")
    add_adapters(network, 4)
    paper = causal_lm_on_paper(network)
    trained = [name for name, param in network.named_parameters() if param.requires_grad]
    assert len(trained) == 2 * 7 * 2  # blocks, linear layers of a block, matrices of an adapter
    assert all(".layers." in name for name in trained)
    costs = layer_costs(paper, GPU, 2, 16)
    assert costs[0].grad_bytes == costs[-1].grad_bytes == 0
    assert 0 < costs[1].grad_bytes < costs[1].weight_bytes
    assert costs[0].backward_s == 0
    assert costs[2].backward_s > costs[1].backward_s  # the first block computes no gradient of its input


def test_a_model_that_trains_nothing_before_its_head_is_refused() -> None:
    model = sequential(32, 32)
    model[:-1].requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter before the model's head is trained"):
        layer_costs(sequential_on_paper(model, loss_of), GPU, 2, 16)


def test_metering_leaves_the_model_as_it_was() -> None:
    paper = on_paper(lambda: tiny_model("llama", num_layers=3))
    before = [name for name, _ in paper.model.named_modules()]
    layer_costs(paper, GPU, 2, 16)
    assert [name for name, _ in paper.model.named_modules()] == before
    assert all(param.grad is None and param.is_meta for param in paper.model.parameters())
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in paper.blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_of_the_head_that_do_not_run_count_like_those_that_run(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    paper = on_paper(lambda: tiny_model("llama").to(dtype))
    num_chunks = 10
    vocabulary = paper.model.config.vocab_size
    monkeypatch.setattr(layer_costs_module, "LOGITS_BYTES", 8 * vocabulary * 2 * 50 // num_chunks)
    few = layer_costs(paper, GPU, 2, 50)
    monkeypatch.setattr(layer_costs_module, "_CHUNKS_RUN", num_chunks)
    every = layer_costs(paper, GPU, 2, 50)
    assert few[:-1] == every[:-1]
    seconds = ("forward_s", "recompute_s", "backward_s")
    assert dataclasses.replace(few[-1], **dict.fromkeys(seconds, 0.0)) == dataclasses.replace(
        every[-1], **dict.fromkeys(seconds, 0.0)
    )
    for name in seconds:
        assert getattr(few[-1], name) == pytest.approx(getattr(every[-1], name), rel=1e-9), name
