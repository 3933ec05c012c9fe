"""`roundpipe train --adapter`: training goes on from its exact weights; adapters that do not fit are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import MARKED_TEMPLATE, new_tokenizer, save_model
from transformers import AutoModelForCausalLM
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import roundpipe.cli.train as train_module
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest

OTHER_TEMPLATE = MARKED_TEMPLATE.replace("{{ m.role }}:", "{{ m.role }}>")
ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1) * (n % 3 + 1)} for n in range(19)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and an adapter of a kind that no option of the command makes."""
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    settings: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["norm"], "use_rslora": True}
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings))
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder / "adapter")
    return folder


def words(folder: Path, out: Path, *more: str, adapter: Path | None = None) -> list[str]:
    """A command that names no model: the adapter does."""
    needed = ["--adapter", str(adapter or folder / "adapter"), "--data", str(folder / "rows.jsonl"), "--out", str(out)]
    usual = ["--devices", "cpu*2", "--batch", "4", "--lr", "1e-2", "--schedule", "constant", "--no-view"]
    return ["train", *needed, *usual, *more]


def losses(out: Path) -> list[float]:
    newest = latest(out)
    assert newest is not None
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    return capsys.readouterr().err


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def test_training_goes_on_from_the_adapter_as_plain_trl_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, torch.Tensor] = {}
    load_all = train_module._load_all

    def load(*args: Any) -> Any:
        model = load_all(*args)
        begun.update(trained(model))
        return model

    monkeypatch.setattr(train_module, "_load_all", load)
    assert main(words(folder, tmp_path / "out", "--steps", "4")) == 0
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    plain = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    wanted = trained(plain)
    assert begun.keys() == wanted.keys()
    assert len(wanted) == 2 * 2 * 2 + 5  # and all norms
    for name, value in wanted.items():
        assert torch.equal(begun[name], value), name
    config = SFTConfig(
        output_dir=str(tmp_path / "plain"), use_cpu=True, bf16=False, report_to="none", max_steps=4, learning_rate=1e-2,
        lr_scheduler_type="constant", per_device_train_batch_size=4, logging_steps=1, seed=42, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(plain, config, train_dataset=Dataset.from_list(ROWS), processing_class=new_tokenizer())
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-5)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    settings = LoraConfig.from_pretrained(str(tmp_path / "out"))
    assert saved.keys() == load_file(folder / "adapter" / "adapter_model.safetensors").keys()
    assert (settings.r, settings.lora_alpha, settings.use_rslora) == (4, 6, True)
    assert settings.base_model_name_or_path == str(folder / "model")


def test_a_run_from_an_adapter_is_resumed_exactly(folder: Path, tmp_path: Path) -> None:
    assert main(words(folder, tmp_path / "whole", "--steps", "4")) == 0
    out = tmp_path / "cut"
    assert main(words(folder, out, "--steps", "2")) == 0
    assert main(["train", "--config", str(out / "train.yaml"), "--steps", "4", "--resume"]) == 0
    assert losses(out) == losses(tmp_path / "whole")


def test_the_tokenizer_of_the_adapter_counts(folder: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    new_tokenizer(OTHER_TEMPLATE).save_pretrained(adapter)
    assert main(words(folder, tmp_path / "out", "--steps", "1", adapter=adapter)) == 0
    assert "{{ m.role }}>" in (tmp_path / "out" / "chat_template.jinja").read_text()


def test_adapters_that_do_not_fit_are_refused_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train_module, "_load_model", load)
    out = tmp_path / "out"
    assert "there is no folder /no/where" in refusal(capsys, words(folder, out, adapter=Path("/no/where")))
    message = refusal(capsys, words(folder, out, adapter=folder / "model"))
    assert "model is not an adapter of peft: it has no adapter_config.json" in message
    assert "--lora and --adapter exclude each other" in refusal(capsys, words(folder, out, "--lora", "2"))
    message = refusal(capsys, words(folder, out, "--full"))
    assert "--adapter and --full exclude each other; to train all weights, merge the adapter first:" in message
    assert "--adapter needs trained weights" in refusal(capsys, words(folder, out, "--init"))
    message = refusal(capsys, words(folder, folder / "adapter"))
    assert f"has the files of --adapter {folder / 'adapter'}, which the run would overwrite" in message
    wide = save_model(tmp_path / "wide", hidden_size=32)
    message = refusal(capsys, words(folder, out, "--model", str(wide)))
    assert "does not fit to the model" in message
    assert "size mismatch for base_model.model.model.layers.0.self_attn.q_proj" in message
    assert "give the model that it was trained on: --model DIR" in message
    short = save_model(tmp_path / "short", num_hidden_layers=1)
    message = refusal(capsys, words(folder, out, "--model", str(short)))
    assert "has tensors that the model has no place for" in message
    adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert f"{adapter} cannot be loaded" in refusal(capsys, words(folder, out, adapter=adapter))
    file.unlink()
    assert "has no weights: there is no adapter_model.safetensors" in refusal(
        capsys, words(folder, out, adapter=adapter)
    )
    assert not out.exists()


@pytest.mark.parametrize("is_new", [True, False], ids=["new adapter", "given adapter"])
def test_a_dry_run_counts_adapters_in_the_dtype_in_which_they_train(
    is_new: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(train_module, "report_dry_run", lambda settings, prepared, needs, at: found.append(needs))
    given = words(folder, tmp_path / "out", "--dtype", "bfloat16", "--dry-run")
    if is_new:
        given[1:3] = ["--model", str(folder / "model"), "--lora", "2"]
    assert main(given) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    if is_new:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    else:
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert torch.float32 in {parameter.dtype for parameter in trained}
    assert found[0].trainable == sum(parameter.numel() for parameter in trained)
    assert found[0].host["gradients"] == sum(parameter.nbytes for parameter in trained)
    assert found[0].disks[0].rows()["final model"] == sum(parameter.nbytes for parameter in trained)
