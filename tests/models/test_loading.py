"""roundpipe.load: the tensors of from_pretrained(), packed as wrapping packs them, and never two copies in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import labelled, livened, small, train_call, wrapped
from torch import nn

import roundpipe
from helpers_packed import packed_places, unpacked
from helpers_parity import assert_same
from helpers_slow import slow_except
from helpers_tiny_hf import save_tiny_model
from roundpipe.errors import ArgumentTypeError, ConfigError, HostMemoryError
from roundpipe.store import host_memory

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

KINDS = ("llama", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "gpt2", "gemma2", "mamba", "bert", "t5", "deepseek_v3")


def tensors_of(model: nn.Module) -> dict[str, Any]:
    return {**model.state_dict(), **dict(model.named_buffers())}


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("model_type", slow_except(("qwen3", "mixtral", "gpt2"), KINDS))
def test_a_loaded_model_is_that_of_from_pretrained(model_type: str, tmp_path: Path) -> None:
    base: Any = small(model_type)
    folder = saved(base, tmp_path)
    expected, found = type(base).from_pretrained(folder), roundpipe.load(folder)
    assert type(found) is type(base)
    assert not found.training
    assert_same(tensors_of(found), tensors_of(expected))
    assert not any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))
    names = [name for name, _ in expected.named_parameters()]  # tied parameters are one
    assert [name for name, _ in found.named_parameters()] == names
    assert all(param.requires_grad for param in found.parameters())
    assert found.config.to_dict() == expected.config.to_dict()


def test_a_config_without_a_dtype_means_that_of_the_weights(tmp_path: Path) -> None:
    base: Any = small("qwen3")
    folder = saved(base.to(torch.bfloat16), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    expected = type(base).from_pretrained(folder)
    assert expected.dtype is torch.bfloat16
    assert_same(tensors_of(roundpipe.load(folder)), tensors_of(expected))
    assert_same(tensors_of(roundpipe.load(folder, dtype="auto")), tensors_of(expected))
    assert roundpipe.load(folder, dtype="float16").dtype is torch.float16
    with pytest.raises(ConfigError, match=r"one of float32, .* got 'int8'"):
        roundpipe.load(folder, dtype="int8")


@pytest.mark.parametrize(
    ("model_type", "form"),
    slow_except(
        [("mixtral", "nf4"), ("deepseek_v3", "nf4")], [(kind, form) for kind in KINDS for form in ("nf4", "fp8")]
    ),
)
def test_packed_weights_are_those_of_wrapping_the_whole_model(model_type: str, form: str, tmp_path: Path) -> None:
    base: Any = small(model_type)
    folder = saved(base, tmp_path, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole = type(base).from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
    wrapped(whole, frozen_weights=form).close()
    found = roundpipe.load(folder, frozen_weights=form, dtype=torch.bfloat16)
    assert packed_places(found) == packed_places(whole)
    assert_same(tensors_of(found), tensors_of(whole))
    assert not any(param.requires_grad for param in found.parameters())


@pytest.mark.parametrize("by_rank", [True, False], ids=["rank", "config"])
def test_adapters_on_a_loaded_base_train_as_on_the_plain_one(by_rank: bool, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = roundpipe.load(folder, frozen_weights="nf4", lora=4 if by_rank else config)
    livened(model.train())
    base = roundpipe.load(folder)
    plain = peft.get_peft_model(base, config).train()
    plain.load_state_dict(model.state_dict(), strict=False)
    plain = unpacked(plain, model)
    batch = {name: value % 60 for name, value in labelled("llama").items()}
    with wrapped(model) as ours, wrapped(plain) as theirs:
        assert_same(train_call(ours, batch), train_call(theirs, batch))
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained
    for name in trained:
        assert_same(model.get_parameter(name).grad, plain.get_parameter(name).grad, name)


def test_folders_that_cannot_be_loaded_are_refused_with_a_reason(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    for path, message in ((tmp_path / "nowhere", "there is no folder"), (tmp_path, "it has no config.json")):
        with pytest.raises(ConfigError, match=message):
            roundpipe.load(path)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"intermediate_size": 48}, r"mlp\.\S+ with shape \(32, 16\), its config.json says \(48, 16\)"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"no weights for \d+ parameters of its config.json, such as"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantised as hqq.*frozen_weights, one of 'nf4', 'int8'"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError, match=message):
            roundpipe.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the config"):
        roundpipe.load(folder)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="got 'int4'"):
        roundpipe.load(folder, frozen_weights="int4")
    with pytest.raises(ArgumentTypeError, match=r"lora must be the rank .* got str"):
        roundpipe.load(folder, lora="8")
    with pytest.raises(ConfigError, match="lora must be at least 1"):
        roundpipe.load(folder, lora=0)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    folder = save_tiny_model(tmp_path)
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 10_000)
    monkeypatch.setattr("roundpipe.loading.loader._read", lambda *args: pytest.fail("a tensor is read"))
    with pytest.raises(HostMemoryError, match=r"loading this model does not fit(.|\n)*frozen_weights"):
        roundpipe.load(folder)


MEASURE = """
import ctypes, gc, json, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages: they keep what is freed beside memory in use
import torch, transformers, roundpipe
from roundpipe import wrap_model_to_roundpipe
transformers.utils.logging.disable_progress_bar()

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

def measured(folder, wraps, **options):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that malloc keeps of earlier work would hide what is allocated now
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = memory("VmRSS")
    model = roundpipe.load(folder, **options)
    if wraps:
        wrap_model_to_roundpipe(model, True, devices=["cpu"]).close()
    peak = memory("VmHWM") - before
    size = sum(p.nbytes for p in model.parameters())
    return {"peak": peak, "model": size, "largest": max(p.nbytes for p in model.parameters())}

tiny, folder = sys.argv[1:]
for wraps in (False, True):
    measured(tiny, wraps, frozen_weights="int8")  # imports what is imported late
print(json.dumps({
    "packed": measured(folder, False, frozen_weights="int8"),
    "whole": measured(folder, False),
    "wrapped": measured(folder, True),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loaded_and_wrapped_model_is_never_in_memory_twice(tmp_path: Path) -> None:
    """Loading takes the model, packed or not, and its largest tensor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1536, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 2048}
    config = LlamaConfig(**sizes, num_attention_heads=12, tie_word_embeddings=True, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    saved(model, tmp_path / "model")
    in_file = sum(param.nbytes for param in model.parameters())
    del model
    tiny = save_tiny_model(tmp_path / "tiny", "llama")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny), str(tmp_path / "model")],
        env={"PYTHONPATH": str(Path(roundpipe.__file__).parents[1]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["packed"]["model"] < 0.6 * in_file
    for name in ("packed", "whole"):
        measured = found[name]
        promised = 1.05 * measured["model"] + measured["largest"]
        assert 0.9 * measured["model"] < measured["peak"] <= promised, (name, measured)
    # Wrapping runs the model to split it, and moves its weights layer by layer.
    assert found["wrapped"]["peak"] < 2 * found["wrapped"]["model"], found["wrapped"]
