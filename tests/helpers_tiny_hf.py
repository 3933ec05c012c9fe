"""Tiny transformers models, a tokenizer with a chat template, and datasets, all made in memory without the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch.utils.data import Dataset

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<end>")
WORDS = tuple(f"w{number}" for number in range(58))
VOCAB_SIZE = len(SPECIAL) + len(WORDS)  # 64
# The generation block marks the tokens of the assistant, which TRL trains on with assistant_only_loss.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<assistant> ' }}{% generation %}{{ message['content'] + ' <eos>' }}{% endgeneration %}{{ ' ' }}"
    "{% else %}{{ '<user> ' + message['content'] + ' <end> ' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def tiny_model(kind: str = "qwen3", *, num_layers: int = 2, seed: int = 0, **changes: Any) -> Any:
    """A causal language model with 64 words; `kind` is "qwen3" (tied embeddings) or "llama"."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": kind == "qwen3",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        **changes,
    }
    config = Qwen3Config(**sizes) if kind == "qwen3" else LlamaConfig(**sizes)
    return Qwen3ForCausalLM(config) if kind == "qwen3" else LlamaForCausalLM(config)


def tiny_tokenizer() -> Any:
    """A tokenizer whose words are separated by spaces, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="right"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(folder: Path, kind: str = "qwen3", **changes: Any) -> Path:
    """Write a tiny model and its tokenizer to a folder that from_pretrained() reads."""
    tiny_model(kind, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def sentence(generator: torch.Generator, num_words: int) -> str:
    """Random words; each depends on the one before, so that a model can learn."""
    word = int(torch.randint(0, len(WORDS), (), generator=generator))
    words = []
    for _ in range(num_words):
        words.append(WORDS[word])
        word = (7 * word + int(torch.randint(0, 3, (), generator=generator))) % len(WORDS)
    return " ".join(words)


def chat_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with `messages`: a question and an answer of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "messages": [
                {"role": "user", "content": sentence(generator, 3 + row % 4)},
                {"role": "assistant", "content": sentence(generator, 4 + row % 5)},
            ]
        }
        for row in range(num_rows)
    ]


def preference_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "prompt": sentence(generator, 3 + row % 3),
            "chosen": " " + sentence(generator, 4 + row % 4),
            "rejected": " " + sentence(generator, 5),
        }
        for row in range(num_rows)
    ]


class TokenRows(Dataset[dict[str, torch.Tensor]]):
    """Rows with input_ids, attention_mask and labels, padded to one length; the first labels of each row are -100."""

    def __init__(self, num_rows: int, num_tokens: int = 10, seed: int = 0) -> None:
        tokenizer = tiny_tokenizer()
        generator = torch.Generator().manual_seed(seed)
        self._rows = []
        for row in range(num_rows):
            words = sentence(generator, num_tokens - row % 4)
            tokens = tokenizer(words, padding="max_length", max_length=num_tokens, return_tensors="pt")
            ids, mask = tokens["input_ids"][0], tokens["attention_mask"][0]
            labels = ids.masked_fill(mask == 0, -100)
            labels[: 1 + row % 3] = -100
            self._rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return self._rows[row]
