"""The folders of `roundpipe train` and `roundpipe merge` are what servers and converters of models read.

vLLM, Ollama and llama.cpp do not run here. What they read is the form in which the model was published: so files,
keys, names and dtypes are compared with those of the folder that was trained from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_models import MARKED_TEMPLATE, PLAIN_TEMPLATE, new_tokenizer, save_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from roundpipe.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore")
ROPE = {"factor": 2.0, "rope_type": "linear"}
# As Llama 2 has them: transformers reads such a file with a warning, and refuses to write it.
GENERATION = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 3], "bos_token_id": 1}
TOKENIZER_CONFIG = {
    "added_tokens_decoder": {
        str(number): {"content": token, "special": True, "lstrip": False, "normalized": False, "rstrip": False,
                      "single_word": False}
        for number, token in enumerate(["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"])
    },
    "chat_template": MARKED_TEMPLATE, "clean_up_tokenization_spaces": False, "eos_token": "<eos>",
    "model_max_length": 256, "tokenizer_class": "PreTrainedTokenizerFast",
}  # fmt: skip
OF_TOKENS = {"pad_token_id": 1, "bos_token_id": None}  # Trainer takes them from the tokenizer
SPECIAL_TOKENS = {"eos_token": {"content": "<eos>", "lstrip": False, "normalized": False, "rstrip": False}}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def published(folder: Path, **changes: Any) -> Path:
    """A model in the form of transformers 4, with a sentencepiece model beside the tokenizer."""
    save_model(folder, dtype="bfloat16", **changes)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    config = read(folder / "config.json")
    del config["rope_parameters"], config["dtype"], config["pad_token_id"]
    config |= {"rope_theta": 5e5, "rope_scaling": ROPE, "torch_dtype": "bfloat16", "transformers_version": "4.51.0"}
    files = {"config": config, "generation_config": GENERATION, "tokenizer_config": TOKENIZER_CONFIG}
    for name, values in {**files, "special_tokens_map": SPECIAL_TOKENS}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hand_over")
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 4)
    return published(folder / "base")


def train(base: Path, out: Path, *more: str) -> Path:
    needed = ["--model", str(base), "--data", str(base.parent / "chats.jsonl"), "--out", str(out), "--steps", "1"]
    assert main(["train", *needed, "--batch", "2", "--seq-len", "64", "--lr", "0.1", "--devices", "cpu*2", "--no-view",
                 *more]) == 0  # fmt: skip
    return out


def tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Name, dtype and shape of each tensor; that of the index, if there is one, is the same set."""
    found = {}
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.offset_keys():
                found[name] = (opened.get_slice(name).get_dtype(), opened.get_slice(name).get_shape())
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert read(index)["weight_map"].keys() == found.keys()
    return found


def require_files(folder: Path, base: Path, *changed: str) -> None:
    """All small files of the base are in the folder, with the same bytes except for those named."""
    for path in base.iterdir():
        if path.suffix != ".safetensors" and path.name not in changed:
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def differing(path: Path, other: Path) -> dict[str, Any]:
    """The values of a file of JSON that another one does not have."""
    values, before = read(path), read(other)
    assert before.keys() <= values.keys()
    return {key: value for key, value in values.items() if before.get(key) != value}


def test_trained_model_is_in_the_form_of_its_base(base: Path, tmp_path: Path) -> None:
    """The tokenizer has no padding token, so training takes the end of the text, and none for the beginning."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokens.txt").write_text("of the user")
    out = train(base, tmp_path / "out", "--full", "--dtype", "bfloat16")
    assert (out / "tokens.txt").exists()
    assert (out / "model.safetensors").stat().st_mode == (out / "tokens.txt").stat().st_mode
    require_files(
        out, base, "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"
    )
    assert tensors(out) == tensors(base)
    assert differing(out / "config.json", base / "config.json") == OF_TOKENS
    generation = read(out / "generation_config.json")
    assert generation == {key: value for key, value in GENERATION.items() if key != "bos_token_id"} | {
        "pad_token_id": 1
    }
    assert differing(out / "tokenizer_config.json", base / "tokenizer_config.json") == {"pad_token": "<eos>"}
    assert read(out / "special_tokens_map.json")["pad_token"] == "<eos>"
    assert not (out / "chat_template.jinja").exists()
    config = AutoConfig.from_pretrained(out)
    assert config.rope_parameters == {**ROPE, "rope_theta": 5e5}
    assert AutoTokenizer.from_pretrained(out).chat_template == MARKED_TEMPLATE
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert model.dtype is torch.bfloat16
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_changed_values_are_put_into_the_form_of_the_base(base: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(PLAIN_TEMPLATE)
    out = train(base, tmp_path / "out", "--full", "--dtype", "float32", "--chat-template-path", str(template),
                "--assistant-only-loss", "false")  # fmt: skip
    changed = differing(out / "config.json", base / "config.json")
    assert changed == {**OF_TOKENS, "torch_dtype": "float32"}
    assert read(out / "tokenizer_config.json")["chat_template"] == PLAIN_TEMPLATE
    assert AutoTokenizer.from_pretrained(out).chat_template == PLAIN_TEMPLATE
    assert {dtype for dtype, _ in tensors(out).values()} == {"F32"}


def test_added_tokens_are_not_lost_in_the_form_of_the_base(base: Path, tmp_path: Path) -> None:
    """A sentencepiece model without them must not stay beside them."""
    from roundpipe.checkpoint.original_form import save_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<think>"])
    tmp_path.joinpath("out").mkdir()
    save_tokenizer(tmp_path / "out", tokenizer)
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(tokenizer)


def test_adapter_is_what_servers_load_and_merges_into_the_form_of_its_base(base: Path, tmp_path: Path) -> None:
    out = train(base, tmp_path / "out", "--lora", "4")
    config = read(out / "adapter_config.json")
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 4, 8, "none")
    assert config["base_model_name_or_path"] == str(base)
    assert not any(config[key] for key in ("use_dora", "modules_to_save", "target_parameters"))
    modules = {name.removesuffix(".weight") for name in tensors(base) if name.endswith("_proj.weight")}
    with safe_open(out / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == {f"base_model.model.{module}.lora_{half}.weight" for module in modules for half in "AB"}
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert main(["merge", str(out), "--out", str(tmp_path / "merged")]) == 0
    merged = tmp_path / "merged"
    require_files(merged, base, "tokenizer_config.json", "special_tokens_map.json")
    assert differing(merged / "tokenizer_config.json", base / "tokenizer_config.json") == {"pad_token": "<eos>"}
    assert tensors(merged) == tensors(base)
    assert {path.name for path in merged.iterdir()} == {path.name for path in base.iterdir()}


def test_experts_have_the_names_of_the_published_model(tmp_path: Path) -> None:
    """transformers joins experts into one parameter while it runs; other tools know one tensor per expert."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    base = tmp_path / "base"
    Qwen3MoeForCausalLM(config).save_pretrained(base, max_shard_size="20KB")
    new_tokenizer().save_pretrained(base)
    (tmp_path / "chats.jsonl").write_text('{"text": "a b c"}\n' * 4)
    out = train(base, tmp_path / "out", "--full")
    found = tensors(out)
    assert found == tensors(base)
    assert any(re.search(r"experts\.3\.down_proj\.weight$", name) for name in found)
    assert "lm_head.weight" not in found  # tied: readers take the embedding
