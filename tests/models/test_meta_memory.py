"""The memory that a model on the meta device needs is checked before the model is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe import HostMemoryError, RoundPipe, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe.store import host_memory

OPTIONS: dict[str, Any] = {"optim_dtype": torch.float32, "devices": ["cpu"] * 3}
BYTES_PER_PARAMETER = 14  # weights, gradients and copies of 2 bytes, moments of 8


def on_meta(**sizes: int) -> LlamaForCausalLM:
    tiny = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**(tiny | {"num_attention_heads": 4, "tie_word_embeddings": False} | sizes))
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def assert_refused(model: LlamaForCausalLM, **options: Any) -> str:
    with pytest.raises(HostMemoryError) as caught:
        wrap_model_to_roundpipe(model, **(OPTIONS | options))
    assert all(p.is_meta for p in model.parameters())
    return str(caught.value)


def test_a_model_of_32_billion_parameters_is_refused_with_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 24 * 10**9)
    model = on_meta(
        vocab_size=152_064, hidden_size=8192, intermediate_size=27_648, num_hidden_layers=32, num_attention_heads=64
    )
    count = sum(p.numel() for p in model.parameters())
    assert count > 32e9
    message = assert_refused(model)
    table = dict(line.strip().rsplit("  ", 1) for line in message.splitlines()[1:-1])
    table = {name.strip(): float(size.removesuffix(" GB")) for name, size in table.items()}
    assert table["weights"] == pytest.approx(2e-9 * count, abs=1e-3)
    assert table["optimizer state (Adam)"] == pytest.approx(8e-9 * count, abs=1e-3)
    assert table["needed in all"] == pytest.approx(BYTES_PER_PARAMETER * 1e-9 * count, rel=1e-3)
    assert table["available"] == 24


def test_weights_are_counted_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    count = sum(p.numel() for p in on_meta().parameters())
    buffers = sum(b.nbytes for b in on_meta().buffers())
    needed = BYTES_PER_PARAMETER * count + 2 * buffers  # buffers are made, too, and calls read copies of them
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: needed - 1)
    assert_refused(on_meta())
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: needed + 2 * count)
    with wrap_model_to_roundpipe(on_meta(), **OPTIONS) as model:
        assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("frozen", [False, True])
def test_inference_needs_the_weights_alone(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta()
    weights = sum(p.nbytes for p in model.parameters())
    model.requires_grad_(not frozen)
    available = [weights - 1]
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: available[0])
    with torch.set_grad_enabled(frozen):  # frozen, or wrapped where there are no gradients
        assert "gradients" not in assert_refused(model).split("needed in all")[0]
        available[0] = 2 * weights
        with wrap_model_to_roundpipe(model, **OPTIONS) as wrapped:
            assert not any(p.is_meta for p in wrapped.parameters())


def test_a_loaded_model_is_refused_before_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(on_meta().config).to(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *args, **kwargs: pytest.fail("the model ran"))
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: (BYTES_PER_PARAMETER - 2) * count - 1)
    with pytest.raises(HostMemoryError, match="optimizer state"):
        wrap_model_to_roundpipe(model, **OPTIONS)


def test_a_plain_module_on_the_meta_device_must_be_loaded_first() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="to_empty"):
        RoundPipe(model, devices=["cpu"])
