"""Claim: RoundPipe trains a transformers model as fast as plain PyTorch on the GPU, and far larger than GPU memory.

    python benchmarks/bench_transformers.py [--parts speed,long,lora] [--micro 4] [--warm 3] [--steps 3]

speed: a Qwen3 of 1.7B shape, 16 sequences of 4096 tokens a step; ratios to the same model on the GPU with its own
gradient checkpointing. long: the longest sequence of that model within 24 GB of GPU memory. lora: rank 16 on a 32B
shape within 24 GB of GPU memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import torch
from bench_memory_cap import gpu_memory_of
from measuring import (
    Measured,
    Pace,
    SpeedTable,
    begin,
    free_gpu,
    gigabytes,
    gpu_peak_bytes,
    has_gpu,
    measured,
    options_parser,
    pace_of,
    reset_gpu_peak,
)
from torch import nn
from workload import LEARNING_RATE, MODES, compute_device

from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import Adam

CAP_BYTES = 24_000_000_000
SHAPES: dict[str, dict[str, int]] = {
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
}


def build(shape_name: str, device: str = "cpu") -> Any:
    """A Qwen3 in bfloat16 with random weights, which are drawn on the GPU if there is one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    is_tiny = shape_name == "tiny"
    config = Qwen3Config(
        **SHAPES[shape_name],
        head_dim=16 if is_tiny else 128,
        num_key_value_heads=2 if is_tiny else 8,
        vocab_size=256 if is_tiny else 128256 if shape_name == "8b" else 151936,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    torch.manual_seed(0)
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                value = torch.empty(param.shape, dtype=param.dtype, device=compute_device())
                value = value.fill_(1.0) if param.dim() == 1 else value.normal_(std=0.02)
                module._parameters[name] = nn.Parameter(value.to(device))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.train()


def batch(num_sequences: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (num_sequences, length), generator=torch.Generator().manual_seed(0))


# Plain.


class PlainTraining:
    """Training in GPU memory: bfloat16 weights, float32 masters, torch's fused Adam."""

    def __init__(self, shape_name: str) -> None:
        self.model = build(shape_name, compute_device())
        self._weights = list(self.model.parameters())
        self._masters = [weight.detach().float().requires_grad_() for weight in self._weights]
        self._optimizer = torch.optim.Adam(self._masters, lr=LEARNING_RATE, fused=True)

    def step(self, ids: torch.Tensor, num_microbatch: int) -> float:
        total = 0.0
        for part in ids.to(compute_device()).chunk(num_microbatch):
            loss = self.model(input_ids=part, labels=part).loss / num_microbatch
            loss.backward()
            total += float(loss.detach())
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
        return total


# RoundPipe.


class PipedTraining:
    """Training of the wrapped model; `options` are those of wrap_model_to_roundpipe."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = wrap_model_to_roundpipe(model, optim_dtype=torch.float32, devices=[compute_device()], **options)
        self._optimizer = Adam(list(self.model.optim_parameters()), lr=LEARNING_RATE)

    def step(self, ids: torch.Tensor, num_microbatch: int, *, is_async: bool) -> float:
        loss = self.model.forward_backward(
            input_kwargs={"input_ids": ids, "labels": ids},
            run_config=RoundPipeRunConfig(num_microbatch=num_microbatch),
        )
        self.model.step(self._update, is_async=is_async)
        return float(loss)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


@contextlib.contextmanager
def piped_training(model: nn.Module, **options: Any) -> Iterator[PipedTraining]:
    training = PipedTraining(model, **options)
    try:
        yield training
    finally:
        training.model.close()


# The parts.


def speed(num_microbatch: int, pace: Pace) -> None:
    shape_name, num_sequences, length = ("1.7b", 16, 4096) if has_gpu() else ("tiny", 8, 32)
    ids = batch(num_sequences, length, 151936 if has_gpu() else 256)
    begin(
        f"a transformers Qwen3 of {shape_name} shape, {num_sequences} x {length}, {num_microbatch} microbatches",
        "how fast a GPU is",
    )
    table = SpeedTable("recomputed")
    reference = _plain_rows(table, shape_name, ids, num_microbatch, pace)
    _piped_rows(table, shape_name, ids, num_microbatch, pace, reference)
    if has_gpu() and importlib.util.find_spec("liger_kernel") is not None:
        _piped_rows(table, shape_name, ids, num_microbatch, pace, reference, liger_kernels=True)
        _plain_kernel_row(
            table, shape_name, ids, num_microbatch, pace, reference
        )  # last, because it patches the library permanently


def _piped_rows(
    table: SpeedTable,
    shape_name: str,
    ids: torch.Tensor,
    num_microbatch: int,
    pace: Pace,
    reference: Measured | None,
    **options: Any,
) -> None:
    free_gpu()
    with piped_training(build(shape_name), **options) as training:
        for mode, is_async in MODES.items():
            step = functools.partial(training.step, ids, num_microbatch, is_async=is_async)
            name = f"RoundPipe, {mode}{', fused kernels' if options else ''}"
            table.add(name, measured(step, ids.numel(), pace, training.model.synchronize), reference)


def _plain_kernel_row(
    table: SpeedTable, shape_name: str, ids: torch.Tensor, num_microbatch: int, pace: Pace, reference: Measured | None
) -> None:
    free_gpu()
    training = PlainTraining(shape_name)
    importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=training.model)
    training.model.gradient_checkpointing_enable()
    row = measured(functools.partial(training.step, ids, num_microbatch), ids.numel(), pace)
    table.add("plain, blocks recomputed, fused kernels and loss", row, reference)


def _plain_rows(
    table: SpeedTable, shape_name: str, ids: torch.Tensor, num_microbatch: int, pace: Pace
) -> Measured | None:
    training = PlainTraining(shape_name)
    step = functools.partial(training.step, ids, num_microbatch)
    training.model.gradient_checkpointing_enable()
    recomputed = measured(step, ids.numel(), pace)
    table.add("plain, blocks recomputed", recomputed, recomputed)
    training.model.gradient_checkpointing_disable()
    table.add("plain", measured(step, ids.numel(), pace), recomputed)
    return recomputed


def long_sequences(lengths: list[int]) -> None:
    """Steps of one sequence each, with growing length, within the memory cap."""
    print(f"longest sequence of the 1.7b shape inside {gigabytes(CAP_BYTES)}", flush=True)
    with gpu_memory_of(CAP_BYTES), piped_training(build("1.7b" if has_gpu() else "tiny")) as training:
        for length in lengths if has_gpu() else [64, 128]:
            reset_gpu_peak()
            ids = batch(1, length, 151936 if has_gpu() else 256)
            try:
                row = measured(functools.partial(training.step, ids, 1, is_async=False), length, Pace(1, 1))
            except Exception as error:
                print(f"{length:>9,} tokens: {error!r:.200}", flush=True)
                return
            text = "out of memory" if row is None else f"{row.tokens_per_s:,.0f} tokens/s"
            print(f"{length:>9,} tokens: {text}, GPU peak {gigabytes(gpu_peak_bytes())}", flush=True)
            if row is None:
                return


def lora(pace: Pace) -> None:
    from peft import LoraConfig, get_peft_model

    shape_name, length = ("32b", 4096) if has_gpu() else ("tiny", 32)
    print(
        f"LoRA of rank 16 on the {shape_name} shape inside {gigabytes(CAP_BYTES)}, 4 x {length} tokens a step",
        flush=True,
    )
    start = time.perf_counter()
    model = get_peft_model(build(shape_name), LoraConfig(r=16, target_modules="all-linear"))
    print(f"built in {time.perf_counter() - start:.0f} s", flush=True)
    start = time.perf_counter()
    ids = batch(4, length, 151936 if has_gpu() else 256)
    table = SpeedTable("itself")
    with gpu_memory_of(CAP_BYTES), piped_training(model) as training:
        print(f"wrapped in {time.perf_counter() - start:.0f} s", flush=True)
        step = functools.partial(training.step, ids, 4, is_async=True)
        row = measured(step, ids.numel(), pace, training.model.synchronize)
        table.add("RoundPipe, asynchronous", row, row)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--parts", default="speed,long,lora")
    parser.add_argument("--micro", type=int, default=4, help="number of microbatches")
    parser.add_argument("--lengths", default="32768,81920,131072,163840")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if "speed" in parts:
        speed(options.micro, pace_of(options))
    if "long" in parts:
        long_sequences([int(length) for length in options.lengths.split(",")])
    if "lora" in parts:
        lora(pace_of(options))


if __name__ == "__main__":
    main()
