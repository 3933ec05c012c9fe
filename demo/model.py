"""A small byte-level transformer language model as a plain nn.Sequential.

Does not know RoundPipe: the plain loop and both RoundPipe runs train the same module. It has no dropout, so the three
runs draw no random numbers and can be compared bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # one entry per byte
CONTEXT = 64  # length of the context in bytes


class Embed(nn.Module):
    """Bytes to vectors: the sum of embeddings of the byte, of the `num_trail` bytes before it, and of its position."""

    def __init__(self, width: int, num_trail: int = 3) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.trail = nn.ModuleList([nn.Embedding(VOCABULARY, width) for _ in range(num_trail)])
        self.position = nn.Embedding(CONTEXT, width)

    def forward(self, byte_ids: Tensor) -> Tensor:
        length = byte_ids.shape[1]
        stream = self.byte(byte_ids) + self.position(torch.arange(length, device=byte_ids.device))
        for distance, earlier_byte in enumerate(self.trail, start=1):
            stream = stream + functional.pad(earlier_byte(byte_ids), (0, 0, distance, 0))[:, :length]
        return stream


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each applied to the normalised stream and added to it."""

    def __init__(self, width: int, num_head: int) -> None:
        super().__init__()
        self.num_head = num_head
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def attend(self, stream: Tensor) -> Tensor:
        batch, length, width = stream.shape
        heads = self.query_key_value(stream).view(batch, length, 3, self.num_head, width // self.num_head)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attend(self.attention_norm(stream))
        return stream + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(stream))))


class Head(nn.Module):
    """Vectors to scores of the 256 possible next bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        return self.scores(self.norm(stream))


def build_model(seed: int, width: int = 96, num_block: int = 4, num_head: int = 4) -> nn.Sequential:
    """A model with random weights. They depend on `seed` only, not on earlier random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [Block(width, num_head) for _ in range(num_block)]
        model = nn.Sequential(Embed(width), *blocks, Head(width))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)
    return model
