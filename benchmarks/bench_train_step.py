"""One training step of a decoder-only transformer: RoundPipe, exact and asynchronous, beside plain PyTorch.

Every row is measured in this one run on the same batches; the last column is the ratio to plain PyTorch. With a GPU
plain PyTorch keeps everything in GPU memory, which is the upper limit; without one the figures only show what virtual
devices cost, and nothing about GPUs.

    python benchmarks/bench_train_step.py [--width 2048 --blocks 28 --vocabulary 151936 --sequence 4096 --batch 16]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.optim import Adam

LEARNING_RATE = 1e-5


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = self.norm2(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def build(options: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(options.width, options.heads) for _ in range(options.blocks)]
    embed = nn.Embedding(options.vocabulary, options.width)
    head = nn.Linear(options.width, options.vocabulary, bias=False)
    return nn.Sequential(embed, *blocks, head).to(torch.bfloat16)


def measure(step: Callable[[], object], finish: Callable[[], None], options: argparse.Namespace) -> float:
    """Seconds per step, after warming up; the drain at the end counts."""
    for _ in range(options.warm):
        step()
    finish()
    start = time.perf_counter()
    for _ in range(options.steps):
        step()
    finish()
    return (time.perf_counter() - start) / options.steps


def time_plain(options: argparse.Namespace, ids: torch.Tensor, device: str) -> float:
    model = build(options).to(device)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=LEARNING_RATE, fused=True)

    def step() -> None:
        for part in ids.to(device).tensor_split(options.microbatches):
            loss_fn(model(part), part, options.microbatches).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)

    return measure(step, torch.cuda.synchronize if device == "cuda" else lambda: None, options)


def time_roundpipe(options: argparse.Namespace, ids: torch.Tensor, devices: list[str], is_async: bool) -> float:
    config = RoundPipeRunConfig(num_microbatch=options.microbatches)
    with RoundPipe(build(options), optim_dtype=torch.float32, devices=devices, model_run_config=config) as model:
        optimizer = Adam(model.optim_parameters(), lr=LEARNING_RATE)

        def step_fn() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def step() -> None:
            model.forward_backward((ids,), label=ids, loss_fn=lambda o, y: loss_fn(o, y, options.microbatches))
            model.step(step_fn, is_async=is_async)

        return measure(step, model.synchronize, options)


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor, microbatches: int) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), labels.flatten()) / microbatches


def parse_options(on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"width": 2048, "blocks": 28, "vocabulary": 151936, "sequence": 4096, "batch": 16, "heads": 16}
    if not on_gpu:
        sizes = {"width": 64, "blocks": 2, "vocabulary": 256, "sequence": 32, "batch": 8, "heads": 4}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    on_gpu = torch.cuda.is_available()
    options = parse_options(on_gpu)
    ids = torch.randint(0, options.vocabulary, (options.batch, options.sequence))
    tokens = ids.numel()
    one, several = (["cuda:0"], ["cuda:0"] * 2) if on_gpu else (["cpu"], ["cpu"] * 4)
    rows = {"plain PyTorch": time_plain(options, ids, "cuda" if on_gpu else "cpu")}
    gc.collect()
    for devices in (one, several):
        for is_async in (False, True):
            name = f"RoundPipe, {len(devices)} worker(s), {'asynchronous' if is_async else 'exact'}"
            rows[name] = time_roundpipe(options, ids, devices, is_async)
            gc.collect()
    where = torch.cuda.get_device_name(0) if on_gpu else "CPU only: says nothing about GPUs"
    print(f"{sum(p.numel() for p in build(options).parameters()) / 1e6:.1f} M parameters, bf16, {where}")
    for name, seconds in rows.items():
        print(f"{name:<40}{tokens / seconds:>12.0f} tokens/s{rows['plain PyTorch'] / seconds:>8.2f} of plain")


if __name__ == "__main__":
    main()
