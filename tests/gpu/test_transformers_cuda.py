"""Split transformers models on a real GPU, beside the same model on the GPU itself."""

from __future__ import annotations

import copy
import importlib.util
import logging
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipeRunConfig, optim, wrap_model_to_roundpipe

transformers = pytest.importorskip("transformers")
WORKERS = [["cuda:0"], ["cuda:0"] * 3]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def llama(dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **more)
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def mixtral() -> nn.Module:
    torch.manual_seed(5)
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1
    )
    return transformers.MixtralForCausalLM(config).train()


def batch(rows: int = 4, length: int = 24) -> dict[str, torch.Tensor]:
    ids = torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain_gradients(
    model: nn.Module, inputs: dict[str, torch.Tensor], parts: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch on the GPU, one microbatch after the other; routers' losses by rows."""
    device_model = copy.deepcopy(model).cuda()
    count = int((inputs["labels"][:, 1:] != -100).sum())
    total = torch.zeros(())
    for j in range(parts):
        part = {name: tensor.tensor_split(parts)[j].cuda() for name, tensor in inputs.items()}
        output = device_model(**part, use_cache=False, num_items_in_batch=count)
        loss = output.loss
        if output.get("aux_loss") is not None:
            share = len(part["labels"]) / len(inputs["labels"])
            loss = loss - (1 - share) * device_model.router_aux_loss_coef * output.aux_loss
        loss.backward()
        total = total + loss.detach().cpu()
    return total, {n: p.grad.cpu() for n, p in device_model.named_parameters() if p.grad is not None}


def check(model: nn.Module, workers: list[str], tolerance: float, **options: Any) -> Any:
    inputs = batch()
    expected, gradients = plain_gradients(model, inputs, 2)
    with wrap_model_to_roundpipe(model, devices=workers, **options) as wrapped:
        loss = wrapped.forward_backward(input_kwargs=inputs, run_config=RoundPipeRunConfig(num_microbatch=2))
        wrapped.synchronize()
        found = {name: param.grad for name, param in wrapped.named_parameters() if param.grad is not None}
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    assert found.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert float((found[name].float() - gradient.float()).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize("workers", WORKERS, ids=len)
def test_loss_and_gradients_are_those_of_the_model_on_the_gpu(workers: list[str]) -> None:
    check(llama(), workers, 1e-5)


def test_bfloat16() -> None:
    check(llama(torch.bfloat16), WORKERS[0], 3e-2, optim_dtype=torch.float32)


def test_experts_and_their_auxiliary_loss() -> None:
    torch.use_deterministic_algorithms(False)  # experts are summed with atomic additions
    check(mixtral(), WORKERS[1], 1e-4)


def test_head_and_loss_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr("roundpipe.split.head_loss.LOGITS_BYTES", 1000)
    check(llama(), WORKERS[0], 1e-5)


def test_tiles_of_a_long_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundpipe.split.tiling.LONG_TOKENS", 16)
    monkeypatch.setattr("roundpipe.split.tiling.TILE_TOKENS", 16)
    check(llama(), WORKERS[0], 1e-5)


@pytest.mark.parametrize("share", [0.0, 0.7], ids=["streamed", "resident"])
@pytest.mark.parametrize("workers", WORKERS, ids=len)
def test_generate_gives_the_tokens_of_the_model_on_the_gpu(
    workers: list[str], share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With weights that are uploaded for every token, and with weights that stay on the GPU."""
    monkeypatch.setattr("roundpipe.api.split_model._WEIGHTS_SHARE", share)
    model = llama().eval()
    ids = batch()["input_ids"]
    expected = copy.deepcopy(model).cuda().generate(ids.cuda(), max_new_tokens=6, do_sample=False).cpu()
    with wrap_model_to_roundpipe(model, devices=workers) as wrapped, caplog.at_level(logging.INFO, "roundpipe"):
        assert torch.equal(wrapped.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert not any("uploads layer by layer" in record.getMessage() for record in caplog.records)


def test_a_call_of_another_form_in_the_middle_of_training() -> None:
    """Layers are made anew; weights, optimizer copies and what is pinned stay."""
    inputs = batch()
    without = {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}
    with wrap_model_to_roundpipe(llama(), devices=["cuda:0"], example_inputs=without) as wrapped:
        optimizer = optim.AdamW(wrapped.optim_parameters(), lr=1e-3)

        def step_fn() -> None:
            optimizer.step()
            optimizer.zero_grad()

        losses = []
        for step in range(6):
            losses.append(wrapped.forward_backward(input_kwargs=inputs if step % 2 else without).item())
            wrapped.step(step_fn, is_async=step < 3)
    assert losses[4] < losses[0]
    assert losses[5] < losses[1]


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_fused_kernels_are_close() -> None:
    torch.use_deterministic_algorithms(False)
    check(llama(torch.bfloat16), WORKERS[0], 5e-2, optim_dtype=torch.float32, liger_kernels=True)
