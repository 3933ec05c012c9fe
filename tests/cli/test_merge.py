"""`roundpipe merge`: the bits of peft's merge_and_unload for every kind of LoRA adapter, files, and what is refused."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import new_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import roundpipe.loading.weight_folder as folder_module
from helpers_tiny_hf import tiny_model
from roundpipe.__main__ import main


def new_moe() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def new_gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2))


def save_base(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    new_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """An adapter with random weights for the model in `base`; its other trained modules are changed, too."""
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | settings
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    model.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()


def require_same_model(merged: Path, expected: Any) -> None:
    """Loading the folder gives the parameters of a model, bit for bit, and its outputs."""
    model, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    values, wanted = model.state_dict(), expected.state_dict()
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.dtype == values[name].dtype, name
        assert torch.equal(value, values[name]), name
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, expected(tokens).logits)


ALL_LINEAR: dict[str, Any] = {"target_modules": "all-linear"}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (lambda: tiny_model("llama"), ALL_LINEAR),
    "bfloat16": (lambda: tiny_model("llama").to(torch.bfloat16), ALL_LINEAR),
    "patterns": (
        lambda: tiny_model("llama"),
        {
            "target_modules": ["q_proj", "down_proj"],
            "use_rslora": True,
            "rank_pattern": {"layers.1.*q_proj": 2},
            "alpha_pattern": {"down_proj": 3},
        },
    ),
    "dora": (lambda: tiny_model("qwen3").to(torch.bfloat16), {**ALL_LINEAR, "use_dora": True}),
    "lora_bias": (
        lambda: tiny_model("llama", attention_bias=True),
        {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    ),
    "tied_embedding": (lambda: tiny_model("qwen3"), {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied_head": (lambda: tiny_model("qwen3"), {"target_modules": ["lm_head", "q_proj"]}),
    "saved_head": (lambda: tiny_model("llama"), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved_tied_head": (lambda: tiny_model("qwen3"), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved_tied_embedding": (
        lambda: tiny_model("qwen3"),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "saved_both": (
        lambda: tiny_model("qwen3"),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "trained_tokens": (
        lambda: tiny_model("qwen3"),
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 5]}},
    ),
    "trained_norms": (
        lambda: tiny_model("llama"),
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]},
    ),
    "experts": (
        lambda: new_moe().to(torch.bfloat16),
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "conv1d": (new_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_merged_folder_has_the_bits_of_peft(case: str, tmp_path: Path) -> None:
    new_model, settings = CASES[case]
    base = save_base(tmp_path / "base", new_model(), max_shard_size="20KB")
    adapter = save_adapter(base, tmp_path / "adapter", **settings)
    assert main(["merge", str(adapter), "--base", str(base), "--out", str(tmp_path / "merged")]) == 0
    expected = merged_by_peft(base, adapter)
    changed = [
        name
        for name, value in AutoModelForCausalLM.from_pretrained(base).state_dict().items()
        if not torch.equal(value, expected.state_dict()[name])
    ]
    assert changed  # the adapter does something
    require_same_model(tmp_path / "merged", expected)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an adapter for it."""
    folder = tmp_path_factory.mktemp("merge")
    save_base(folder / "base", tiny_model("llama"))
    save_adapter(folder / "base", folder / "adapter", target_modules=["q_proj"])
    return folder


def merge(folder: Path, out: Path, *more: str, adapter: str = "adapter") -> int:
    return main(["merge", str(folder / adapter), "--out", str(out), *more])


def test_configuration_and_tokenizer_are_copied_and_the_adapters_tokenizer_counts(pair: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(pair / "adapter", tmp_path / "adapter")
    new_tokenizer("{{ messages[0].content }}").save_pretrained(adapter)
    (adapter / "report.html").write_text("of the run")
    assert merge(tmp_path, tmp_path / "merged") == 0  # the adapter names its model
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not {"report.html", "adapter_config.json", "README.md"} & names
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    require_same_model(tmp_path / "merged", merged_by_peft(pair / "base", adapter))


def test_the_shards_of_the_base_stay_shards(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tiny_model("llama"), max_shard_size="10KB")
    save_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    assert merge(tmp_path, tmp_path / "merged") == 0
    files = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(files) > 2
    for name in files:
        before, after = load_file(base / name), load_file(tmp_path / "merged" / name)
        assert before.keys() == after.keys()
    indices = [json.loads((folder / folder_module.INDEX_FILE).read_text()) for folder in (base, tmp_path / "merged")]
    assert indices[0]["weight_map"] == indices[1]["weight_map"]
    assert indices[0]["metadata"]["total_size"] == indices[1]["metadata"]["total_size"]


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_the_model_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """One file of 100 MB; the largest merged module has 2 MB."""
    model = tiny_model("llama", num_layers=12, hidden_size=512, intermediate_size=1024, head_dim=256)
    base = save_base(tmp_path / "base", model)
    size = (base / "model.safetensors").stat().st_size
    assert size > 90e6
    save_adapter(base, tmp_path / "adapter", target_modules="all-linear", r=1)
    del model
    merge(tmp_path, tmp_path / "first")  # imports and caches of the allocator
    before, most, ended = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, anonymous_bytes() - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert merge(tmp_path, tmp_path / "merged") == 0
    finally:
        ended.set()
        thread.join()
    assert most < size / 4


# Refusals.


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, out: Path, *more: str, adapter: str = "adapter") -> str:
    before = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    capsys.readouterr()
    assert merge(folder, out, *more, adapter=adapter) == 2
    message = capsys.readouterr().err
    assert message.startswith("roundpipe: ")
    assert (sorted(out.parent.iterdir()) if out.parent.is_dir() else []) == before
    return message


def changed_config(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_folders_that_do_not_fit_are_refused(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "merged"
    message = refusal(capsys, pair, out, adapter="nowhere")
    assert f"there is no folder {pair / 'nowhere'}" in message
    assert "is not an adapter of peft: it has no adapter_config.json" in refusal(capsys, pair, out, adapter="base")
    assert "is an adapter of peft, not a model" in refusal(capsys, pair, out, "--base", str(pair / "adapter"))
    assert "there is no folder /no/where" in refusal(capsys, pair, out, "--base", "/no/where")
    larger = save_base(tmp_path / "larger", tiny_model("llama", hidden_size=32))
    message = refusal(capsys, pair, out, "--base", str(larger))
    assert "does not fit to the model" in message
    assert "size mismatch for base_model.model.model.layers.0.self_attn.q_proj" in message
    longer = save_base(tmp_path / "longer", tiny_model("llama", num_layers=3))
    message = refusal(capsys, pair, out, "--base", str(longer))
    assert "lacks: 2, such as base_model.model.model.layers.2.self_attn.q_proj.lora_A.default.weight" in message
    shorter = save_base(tmp_path / "shorter", tiny_model("llama", num_layers=1))
    message = refusal(capsys, pair, out, "--base", str(shorter))
    assert "has tensors that the model has no place for: 2, such as base_model.model.model.layers.1" in message
    other = save_base(tmp_path / "other", new_gpt2())
    assert "q_proj" in refusal(capsys, pair, out, "--base", str(other))


def test_an_existing_output_folder_is_refused(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("")
    assert f"--out {out} exists; give a new folder" in refusal(capsys, pair, out)
    assert "is the folder of the model or of the adapter" in refusal(capsys, pair, pair / "base")
    (out / "file").unlink()
    assert merge(pair, out) == 0  # an empty folder takes the model


def test_adapters_that_cannot_be_merged_are_named(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "merged"
    adapter = shutil.copytree(pair / "adapter", tmp_path / "adapter")
    changed_config(adapter, init_lora_weights="pissa")
    assert "init_lora_weights='pissa', which changed the weights of the model" in refusal(capsys, tmp_path, out)
    changed_config(adapter, init_lora_weights=True, base_model_name_or_path=None)
    assert "does not name its model; give --base DIR" in refusal(capsys, tmp_path, out)
    (adapter / "adapter_config.json").write_text("{")
    assert "adapter_config.json is damaged" in refusal(capsys, tmp_path, out)


def test_bases_that_are_not_complete_are_refused(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "merged"
    base = shutil.copytree(pair / "base", tmp_path / "base")
    file, config = base / "model.safetensors", json.loads((base / "config.json").read_text())
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is damaged" in refusal(capsys, pair, out, "--base", str(base))
    file.unlink()
    assert "has no model.safetensors" in refusal(capsys, pair, out, "--base", str(base))
    shutil.copyfile(pair / "base" / "model.safetensors", file)
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    message = refusal(capsys, pair, out, "--base", str(base))
    assert "has no weights for 9 parameters of its config.json, such as model.layers.2" in message
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    message = refusal(capsys, pair, out, "--base", str(base))
    assert "says that weights are quantised as bitsandbytes, but there are no scales of this format" in message
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert "has weights that are quantised as gptq, which is not known" in refusal(
        capsys, pair, out, "--base", str(base)
    )


def test_a_failed_write_leaves_nothing(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("roundpipe.cli.merge.os.fsync", fail)
    assert merge(pair, tmp_path / "merged") == 2
    assert list(tmp_path.iterdir()) == []
