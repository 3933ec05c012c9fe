"""What the option --tiny uses in place of your model and data: random models of a few thousand weights, toy rows."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", *(str(number) for number in range(60))]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def causal_lm(folder: Path, data: str) -> dict[str, str]:
    """Write a model, its tokenizer and data of all formats; return the paths of the model and of the file `data`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    _save(LlamaForCausalLM(LlamaConfig(**sizes, **ids, initializer_range=0.2)), folder)
    (folder / "text.txt").write_text(" ".join(str(number % 60) for number in range(2000)))
    counting = [(_count(start, 4), _count(start + 4, 3 + start % 3)) for start in range(50)]
    _write_rows(
        folder / "chats.jsonl",
        [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in counting
        ],
    )
    _write_rows(
        folder / "preferences.jsonl",
        [{"prompt": q, "chosen": a, "rejected": "59 59 59"} for q, a in counting],
    )
    return {"model": str(folder), "data": str(folder / data)}


def seq2seq(folder: Path) -> dict[str, str]:
    """Write a T5, its tokenizer and pairs of texts; return the paths of the model and of the data."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = T5Config(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **sizes)
    _save(T5ForConditionalGeneration(config), folder)
    rows = [{"source": _count(start, 3), "target": _count(start + 3, 2 + start % 2)} for start in range(50)]
    _write_rows(folder / "pairs.jsonl", rows)
    return {"model": str(folder), "data": str(folder / "pairs.jsonl")}


def _save(model: LlamaForCausalLM | T5ForConditionalGeneration, folder: Path) -> None:
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _count(start: int, length: int) -> str:
    return " ".join(str(number % 60) for number in range(start, start + length))


def _write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
