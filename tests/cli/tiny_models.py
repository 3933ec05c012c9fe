"""A tiny model and a tokenizer in which every character is one token, saved to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

PAD, EOS, BEGIN, END = "<pad>", "<eos>", "<|im_start|>", "<|im_end|>"
# Without {% generation %} markers, and unknown to TRL.
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def new_tokenizer(chat_template: str | None = MARKED_TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([PAD, EOS, BEGIN, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, additional_special_tokens=[BEGIN, END]
    )
    fast.chat_template = chat_template
    return fast


def save_model(
    folder: Path, *, weights: bool = True, chat_template: str | None = MARKED_TEMPLATE, **changes: Any
) -> Path:
    """Save a tiny model, or its config alone, and its tokenizer."""
    sizes = {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(pad_token_id=0, eos_token_id=1, **sizes | changes)
    if weights:
        set_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    new_tokenizer(chat_template).save_pretrained(folder)
    return folder
