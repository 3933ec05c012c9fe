"""A stand-in for the package liger-kernel: it patches Llama models in the same places, with kernels for GPUs alone.

Its kernels compute with torch, on the threads of devices. In the main thread, which is where the host computes, they
raise what Triton raises.
"""

from __future__ import annotations

import sys
import types

import pytest

SOURCE = """
import threading

import torch
from torch import nn

CALLS = []


def kernel(name):
    if threading.current_thread() is threading.main_thread():
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    CALLS.append(name)


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    kernel("rope")
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(q), turned(k)


class LigerRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        kernel("norm")
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden_states * scale)


class LigerSwiGLUMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        kernel("mlp")
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def lce_forward(self, *args, **kwargs):
    kernel("loss")
    raise AssertionError("the loss of liger-kernel was used")


def apply_liger_kernel_to_llama(rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True,
                                cross_entropy=False, model=None):
    from transformers.models.llama import modeling_llama

    def bind(module, forward):
        module.__dict__["forward"] = forward.__get__(module, module.__class__)

    if rope:
        modeling_llama.apply_rotary_pos_emb = liger_rotary_pos_emb
    if rms_norm:
        modeling_llama.LlamaRMSNorm = LigerRMSNorm
    if swiglu:
        modeling_llama.LlamaMLP = LigerSwiGLUMLP
    if fused_linear_cross_entropy and model is None:
        modeling_llama.LlamaForCausalLM.forward = lce_forward
    if model is not None:
        if fused_linear_cross_entropy:
            bind(model, lce_forward)
        for layer in model.model.layers:
            if swiglu:
                bind(layer.mlp, LigerSwiGLUMLP.forward)
            if rms_norm:
                bind(layer.input_layernorm, LigerRMSNorm.forward)
                bind(layer.post_attention_layernorm, LigerRMSNorm.forward)
        if rms_norm:
            bind(model.model.norm, LigerRMSNorm.forward)


def _apply_liger_kernel_to_instance(model, **options):
    apply_liger_kernel_to_llama(model=model, **options)
"""


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module `liger_kernel.transformers`. What it has patched is as before afterwards."""
    from transformers.models.llama import modeling_llama

    package, found = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    exec(SOURCE, found.__dict__)
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", found)
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", modeling_llama.LlamaForCausalLM.forward)
    return found
