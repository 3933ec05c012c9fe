"""Figures that estimates work with: what GPUs can do, and the shapes of well-known models.

Plain data. Rates are those that training reaches, below the vendor's peak; where a machine was measured, the figure is
the measured one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from roundpipe.errors import ConfigError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class DeviceFigures:
    """What one GPU does. Rates are per second.

    half_flops: of bfloat16 and float16 matrix products, with float32 accumulation; single_flops: of float32 ones.
    attention_efficiency: the rate of attention kernels relative to matrix products.
    memory_bytes_per_s: bytes that elementwise kernels read and write.
    link_bytes_per_s: bytes of pinned host memory copied in one direction.
    launch_s: the time that the host needs for one operation of torch, autograd's part included.
    """

    name: str
    memory_bytes: int
    half_flops: float
    single_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    attention_efficiency: float = 0.55
    launch_s: float = 8e-6

    def flops(self, dtype: torch.dtype) -> float:
        return self.half_flops if dtype.itemsize == 2 else self.single_flops


def _figures(
    name: str, gib: int, half_tflops: float, single_tflops: float, memory_gb_s: float, link_gb_s: float
) -> DeviceFigures:
    return DeviceFigures(name, gib * GIB, half_tflops * 1e12, single_tflops * 1e12, memory_gb_s * 1e9, link_gb_s * 1e9)


# 0.85 of the rates in the vendors' data sheets: dense products with float32 accumulation, memory, link of 16 lanes.
# H200: 0.85 of the product and memory rates that were measured on one (792 TFLOP/s, 4.3 TB/s), and its measured link.
GPUS: Mapping[str, DeviceFigures] = {
    figures.name: figures
    for figures in (
        _figures("RTX3060", 12, 22, 11, 305, 22),
        _figures("RTX4060TI", 16, 38, 19, 245, 11),
        _figures("RTX3090", 24, 60, 30, 795, 22),
        _figures("RTX4090", 24, 140, 70, 855, 22),
        _figures("RTX5090", 32, 178, 89, 1520, 46),
        _figures("V100", 32, 95, 13, 765, 12),
        _figures("A100-40GB", 40, 265, 16, 1320, 22),
        _figures("L40S", 48, 308, 78, 735, 22),
        _figures("RTX6000ADA", 48, 154, 77, 815, 22),
        _figures("A100", 80, 265, 16, 1650, 22),
        _figures("H100", 80, 690, 50, 2850, 46),
        _figures("H200", 140, 673, 50, 3650, 52),
    )
}
_UNITS = {"g": 10**9, "gb": 10**9, "gib": GIB, "tb": 10**12, "tib": 1024 * GIB}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(gib|gb|g)", re.IGNORECASE)
_RAM = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(gib|gb|tib|tb)?", re.IGNORECASE)
_MOST_GPUS = 1024  # in one machine


def parse_gpus(text: str) -> tuple[DeviceFigures, int]:
    """Return the figures and the number of GPUs of a text such as "2xRTX4090", "1x24GB" or "H200:24GB"."""
    number, times, kind = text.strip().partition("x")
    if not times or not number.strip().isdecimal():
        number, kind = "1", text.strip()
    if not 1 <= int(number[:9]) <= _MOST_GPUS:
        raise ConfigError(f"--devices {text}: a machine must have 1 to {_MOST_GPUS} devices.")
    name, _, limit = kind.strip().partition(":")
    size = _SIZE.fullmatch(limit or name)
    if (limit and size is None) or ((limit or size is None) and _key(name) not in GPUS):
        raise ConfigError(
            f"--devices {text}: unknown. Give a number and a GPU (2xRTX4090), a number and a memory size (1x24GB), or "
            f"a GPU with another memory size (1xH200:24GB). GPUs: {', '.join(GPUS)}."
        )
    if size is None:
        return GPUS[_key(name)], int(number)
    memory_bytes = int(float(size[1]) * _UNITS[size[2].lower()])
    figures = GPUS[_key(name)] if limit else gpu_with(memory_bytes)
    return dataclasses.replace(figures, memory_bytes=memory_bytes), int(number)


def parse_ram(text: str) -> int:
    """Return the bytes of a text such as "128", "128GiB" or "128GB". Memory is sold in GiB: a bare number is in GiB."""
    size = _RAM.fullmatch(text.strip())
    num_bytes = 0 if size is None else int(float(size[1]) * _UNITS[(size[2] or "gib").lower()])
    if not num_bytes:
        raise ConfigError(f"--ram {text}: give a number of GiB, or a number with its unit: 128GiB, 128GB, 1.5TiB.")
    return num_bytes


def _key(name: str) -> str:
    key = re.sub(r"NVIDIA|GEFORCE|TESLA|\s|_", "", name.upper())
    return key if key in GPUS else next((known for known in GPUS if known in key), key)


def gpu_with(memory_bytes: float) -> DeviceFigures:
    """Return the figures of the GPU whose memory is nearest to this size; of several, the last in the table."""
    return min(reversed(list(GPUS.values())), key=lambda figures: abs(figures.memory_bytes - memory_bytes))


def gpu_named(name: str, memory_bytes: int) -> DeviceFigures:
    """Return the figures of a GPU by the name its driver reports; of the GPU nearest in memory if it is unknown."""
    known = GPUS.get(_key(name)) or gpu_with(memory_bytes)
    return dataclasses.replace(known, memory_bytes=memory_bytes)


_POSITIONS = {
    "qwen3": 40960,
    "qwen3_moe": 40960,
    "llama": 131072,
    "mistral": 32768,
    "gemma3_text": 131072,
    "gpt_oss": 131072,
}


def _dense(
    model_type: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocabulary: int,
    head_dim: int = 128,
    *,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "max_position_embeddings": _POSITIONS[model_type],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
    }


def _experts(intermediate: int, number: int, per_token: int) -> dict[str, Any]:
    return {"moe_intermediate_size": intermediate, "num_experts": number, "num_experts_per_tok": per_token}


def _gemma(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, head_dim: int) -> dict[str, Any]:
    """A Gemma 3 that sees images."""
    text = _dense("gemma3_text", hidden, layers, heads, kv_heads, intermediate, 262208, head_dim, tied=True)
    sight = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return {"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}, "vision_config": sight}


# Configurations of transformers, by name.
SHAPES: Mapping[str, dict[str, Any]] = {
    "qwen3-0.6b": _dense("qwen3", 1024, 28, 16, 8, 3072, 151936, tied=True),
    "qwen3-1.7b": _dense("qwen3", 2048, 28, 16, 8, 6144, 151936, tied=True),
    "qwen3-4b": _dense("qwen3", 2560, 36, 32, 8, 9728, 151936, tied=True),
    "qwen3-8b": _dense("qwen3", 4096, 36, 32, 8, 12288, 151936),
    "qwen3-14b": _dense("qwen3", 5120, 40, 40, 8, 17408, 151936),
    "qwen3-32b": _dense("qwen3", 5120, 64, 64, 8, 25600, 151936),
    "qwen3-30b-a3b": _dense("qwen3_moe", 2048, 48, 32, 4, 6144, 151936) | _experts(768, 128, 8),
    "qwen3-235b-a22b": _dense("qwen3_moe", 4096, 94, 64, 4, 12288, 151936) | _experts(1536, 128, 8),
    "llama-3.2-1b": _dense("llama", 2048, 16, 32, 8, 8192, 128256, 64, tied=True),
    "llama-3.2-3b": _dense("llama", 3072, 28, 24, 8, 8192, 128256, tied=True),
    "llama-3.1-8b": _dense("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-3.1-70b": _dense("llama", 8192, 80, 64, 8, 28672, 128256),
    "mistral-7b": _dense("mistral", 4096, 32, 32, 8, 14336, 32768),
    "mistral-nemo-12b": _dense("mistral", 5120, 40, 32, 8, 14336, 131072),
    "mistral-small-24b": _dense("mistral", 5120, 40, 32, 8, 32768, 131072),
    "gemma-3-1b": _dense("gemma3_text", 1152, 26, 4, 1, 6912, 262144, 256, tied=True) | {"sliding_window": 512},
    "gemma-3-4b": _gemma(2560, 34, 8, 4, 10240, 256),
    "gemma-3-12b": _gemma(3840, 48, 16, 8, 15360, 256),
    "gemma-3-27b": _gemma(5376, 62, 32, 16, 21504, 128),
    "gpt-oss-20b": _dense("gpt_oss", 2880, 24, 64, 8, 2880, 201088, 64)
    | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
}
