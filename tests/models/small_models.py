"""Small Hugging Face models with weights that matter, wrapped and plain: what the tests of ways to train them share.

Used by the tests of this folder. tiny_cases has one model of every class as its library makes it; here are a few types,
with options of the tests' choice, and with weights large enough that every part of a model changes its outputs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import call_reference, merge, microbatches, split
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

VOCAB = 97
IGNORED = -100
ROUNDING = 2e-6  # of gradients in float32, against others summed in another order
Batch = dict[str, Any]

_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_WITHOUT_GROUPS = {name: value for name, value in _DECODER.items() if name not in ("num_key_value_heads", "head_dim")}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

# By model type: the class of the model, that of its config, and what differs from the config's defaults.
_TYPES: dict[str, tuple[str, str, Batch]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _DECODER),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "sliding_window": 6}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _DECODER),
    "cohere": ("CohereForCausalLM", "CohereConfig", _DECODER),
    "phi": ("PhiForCausalLM", "PhiConfig", _DECODER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_DECODER, "num_local_experts": 6}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_DECODER, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_DECODER,
            **_LATENT,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_DECODER, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_WITHOUT_GROUPS, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", _WITHOUT_GROUPS),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", _WITHOUT_GROUPS),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        {"encoder": _DECODER, "decoder": _DECODER, "dropout_rate": 0.0, "vocab_size": VOCAB},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_TOKENS,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 8,
            "patch_size": 4,
            "num_labels": 5,
        },
    ),
}
_NO_DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "opt": ("dropout",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
}


def small(model_type: str, seed: int = 1, **config: Any) -> nn.Module:
    """A model in train mode, without dropout unless `config` asks for it."""
    import transformers

    class_name, config_name, given = _TYPES[model_type]
    options = {**given, **dict.fromkeys(_NO_DROPOUT.get(model_type, ()), 0.0), **config}
    torch.manual_seed(seed)
    # A config may keep and change what it is given.
    model: nn.Module = getattr(transformers, class_name)(getattr(transformers, config_name)(**copy.deepcopy(options)))
    return livened(model.train(), seed)


def lora(model: nn.Module, *target_modules: str) -> nn.Module:
    """The model with LoRA adapters that change its outputs."""
    peft = pytest.importorskip("peft")
    targets = list(target_modules or ("q_proj", "down_proj"))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
    return livened(peft.get_peft_model(model, config))


def livened(model: nn.Module, seed: int = 1) -> nn.Module:
    """Scale trainable matrices to keep the size of activations and add noise to vectors: every weight matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            noise = torch.randn(param.shape, generator=generator).to(param.dtype)
            if param.dim() < 2 or name.endswith("A_log"):
                param.add_(noise, alpha=0.1)
            else:
                param.copy_(noise * param.shape[-1] ** -0.5)
    return model


def tokens(num_rows: int, num_tokens: int, seed: int = 5) -> Tensor:
    """Return tokens that have no special meaning in the config."""
    return torch.randint(3, VOCAB, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def labelled(model_type: str, num_rows: int = 4, num_tokens: int = 7, seed: int = 5) -> Batch:
    """A batch with labels, as models of this type take it."""
    if model_type == "vit":
        images = torch.randn(num_rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        return {"pixel_values": images, "labels": torch.arange(num_rows) % 5}
    ids = tokens(num_rows, num_tokens, seed)
    if model_type in ("t5", "t5gemma"):
        return {"input_ids": ids, "labels": tokens(num_rows, num_tokens - 1, seed + 1)}
    is_masked = model_type in ("bert", "modernbert")
    return {"input_ids": ids, "labels": tokens(num_rows, num_tokens, seed + 1) if is_masked else ids.clone()}


def ragged(model_type: str, num_rows: int = 6, num_tokens: int = 9, seed: int = 5) -> Batch:
    """Ignore labels, a different number in each row and all but one in the last: microbatches have unequal counts."""
    batch = labelled(model_type, num_rows, num_tokens, seed)
    for row in range(num_rows):
        batch["labels"][row, : min(row + 1, num_tokens - 2)] = IGNORED
    batch["labels"][-1, :-1] = IGNORED
    return batch


def wrapped(model: nn.Module, num_devices: int = 2, **options: Any) -> RoundPipe:
    """Wrap a model that must be split into layers; the caller closes it."""
    found = wrap_model_to_roundpipe(model, True, devices=["cpu"] * num_devices, **options)
    assert isinstance(found, RoundPipe)
    return found


def own_loss(output: Any, label: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def plain_loss(model: nn.Module, batch: Batch, num_microbatch: int = 2, counts: Sequence[int] | None = None) -> Tensor:
    """Add the model's losses of each microbatch, weighted by the number of labels that count.

    `counts`: of each microbatch; by default its rows, which is right where all rows have as many labels. Gradients are
    where autograd leaves them.
    """
    given = counts or [len(rows) for rows in torch.arange(len(batch["labels"])).tensor_split(num_microbatch)]
    shares = iter([count / sum(given) for count in given])
    loss: Tensor = call_reference(
        model, kwargs=batch, loss_fn=lambda output, _: output.loss * next(shares), num_microbatch=num_microbatch
    ).loss
    return loss


def added_loss(model: nn.Module, batch: Batch, num_microbatch: int = 2) -> Tensor:
    """The sum of the model's own losses, microbatch by microbatch."""
    loss: Tensor = call_reference(model, kwargs=batch, loss_fn=own_loss, num_microbatch=num_microbatch).loss
    return loss


def plain_outputs(model: nn.Module, batch: Batch, num_microbatch: int = 2) -> Any:
    """What the model returns for each microbatch, put together, losses weighed by rows; no cache."""
    with torch.no_grad():
        parts = [model(**piece, use_cache=False) for piece in split(batch, num_microbatch)]
    merged = merge(parts)
    rows = [len(piece) for piece in torch.arange(len(batch["labels"])).tensor_split(num_microbatch)]
    losses = [part.loss * (count / sum(rows)) for part, count in zip(parts, rows, strict=True)]
    merged["loss"] = sum(losses[1:], losses[0])
    return merged


def assert_close_grads(ours: nn.Module, reference: nn.Module, relative: float = 1e-6) -> None:
    """To rounding: measured by the parameter's own gradient, or a hundredth of the largest of all if that is more.

    A few gradients are zero but for rounding, such as those of a bias that softmax cannot see: sums of large terms that
    cancel, known to the last bit of those terms and no better.
    """
    expected = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
    assert expected, "nothing is compared"
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, param in ours.named_parameters():
        assert (param.grad is None) is (name not in expected), name
        if param.grad is not None:
            scale = max(float(expected[name].abs().max()), largest / 100)
            difference = float((param.grad - expected[name]).abs().max())
            last_bit = torch.finfo(torch.float32).eps * largest
            assert difference <= relative * scale + last_bit, f"gradient of {name} differs by {difference / scale:.3g}"


def train_call(model: RoundPipe, batch: Batch, num_microbatch: int = 2, **options: Any) -> Any:
    """One forward_backward with the model's own loss; its gradients are in `.grad` then."""
    config = RoundPipeRunConfig(**options).over(microbatches(num_microbatch))
    loss = model.forward_backward(input_kwargs=batch, run_config=config)
    model.synchronize()
    return loss
