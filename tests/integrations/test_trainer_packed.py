"""Trainers and `roundpipe train` over packed frozen weights: the losses of the same values unpacked, and resuming."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import roundpipe
from helpers_packed import packed_places, unpacked
from helpers_quantised import quantised_copy
from helpers_tiny_hf import chat_rows, save_tiny_model, tiny_model, tiny_tokenizer
from helpers_trainers import LORA, arguments, close, lora_model, options, outcome_of, settings, token_rows
from roundpipe import wrap_model_to_roundpipe
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest
from roundpipe.errors import CheckpointError, ConfigError
from roundpipe.integrations import RoundPipeOptions, RoundPipeTrainer

NF4 = {"bnb_4bit_quant_type": "nf4"}


def packed_and_plain(form: str) -> tuple[Any, Any]:
    """A model with an adapter, and the same with the values that packing makes of its base."""
    model = lora_model()
    packed = copy.deepcopy(model)
    wrap_model_to_roundpipe(packed, True, devices=["cpu"], frozen_weights=form).close()
    return model, unpacked(model, packed)


def trainer(model: Any, folder: Path, num_devices: int = 2, form: str | None = None, **changes: Any) -> Any:
    return RoundPipeTrainer(
        model,
        arguments(folder, **{"max_steps": 6, **changes}),
        train_dataset=token_rows(),
        roundpipe=options(num_devices, frozen_weights=form),
    )


def test_a_trainer_packs_what_does_not_train_and_resumes(tmp_path: Path) -> None:
    model, plain = packed_and_plain("int8")
    saving = {"save_strategy": "steps", "save_steps": 3}
    expected = outcome_of(trainer(plain, tmp_path / "plain"))
    whole = trainer(copy.deepcopy(model), tmp_path / "whole", form="int8", **saving)
    assert packed_places(whole.model.original_model)
    found = outcome_of(whole)
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    adapters = [name for name in expected.weights if "lora_" in name]
    assert adapters
    for name in adapters:
        assert torch.equal(found.weights[name], expected.weights[name]), name
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved), "packed weights are not written"
    resumed = trainer(copy.deepcopy(model), tmp_path / "whole", 1, form="int8", **saving)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    resumed.model.synchronize()
    now = dict(resumed.model.original_model.named_parameters())
    for name in adapters:
        assert torch.equal(now[name], expected.weights[name]), name
    close(resumed)


def test_a_trainer_takes_a_model_that_its_library_cannot_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes with weights in fp8, and its Trainer refuses to train adapters beside them."""
    peft = pytest.importorskip("peft")
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8").FineGrainedFP8HfQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda self, *args, **kwargs: None)  # there is no GPU
    save_tiny_model(tmp_path / "plain", "llama")
    quantised_copy(tmp_path / "plain", tmp_path / "quantised", tmp_path / "rounded", "fp8")
    quantised, plain = (
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / name), peft.LoraConfig(**LORA))
        for name in ("quantised", "rounded")
    )
    plain.load_state_dict(
        {name: each for name, each in quantised.state_dict().items() if "lora_" in name}, strict=False
    )
    ours, expected = (outcome_of(trainer(each, tmp_path / "out", max_steps=3)) for each in (quantised, plain))
    assert (ours.losses, ours.grad_norms) == (expected.losses, expected.grad_norms)
    with pytest.raises(ValueError, match="Please attach trainable adapters"):
        trainer(AutoModelForCausalLM.from_pretrained(tmp_path / "quantised"), tmp_path / "full")


def test_options_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match="frozen_weights must be one of"):
        RoundPipeOptions(frozen_weights="nf5")  # type: ignore[arg-type]


def test_a_checkpoint_of_a_model_that_is_packed_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    def wrapped(form: str | None) -> Any:
        model = tiny_model().requires_grad_(False)
        model.model.norm.weight.requires_grad_(True)
        return wrap_model_to_roundpipe(model, True, devices=["cpu"], frozen_weights=form)

    with wrapped("int8") as model:
        roundpipe.checkpoint.save(tmp_path / "saved", model).wait()
        state = {name: value.clone() for name, value in model.state_dict().items()}
    with wrapped("int8") as model:
        with torch.no_grad():
            model.original_model.get_parameter("model.layers.0.mlp.up_proj.weight_int8").zero_()
        roundpipe.checkpoint.load(tmp_path / "saved", model)
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name
    for form, name in (("nf4", "weight_nf4"), (None, r"proj\.weight")):
        with wrapped(form) as model, pytest.raises(CheckpointError, match=name):
            roundpipe.checkpoint.load(tmp_path / "saved", model)


def run(folder: Path, out: Path, *words: str) -> list[float]:
    """The losses of a run of the command."""
    needed = ["--model", str(folder), "--data", str(folder.parent / "rows.jsonl"), "--out", str(out), "--lora", "2"]
    usual = ["--devices", "cpu*2", "--batch", "4", "--lr", "1e-2", "--seq-len", "64", "--no-view"]
    assert main(["train", *needed, *usual, *words]) == 0
    newest = latest(out)
    assert newest is not None
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_the_command_trains_an_adapter_beside_a_packed_base(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", "llama")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(16)))
    packed = roundpipe.load(base, frozen_weights="nf4")
    unpacked(roundpipe.load(base), packed).save_pretrained(tmp_path / "rounded")  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path / "rounded")
    expected = run(tmp_path / "rounded", tmp_path / "a", "--steps", "4")
    assert run(base, tmp_path / "b", "--steps", "4", "--load-in-4bit") == expected
    assert run(base, tmp_path / "c", "--steps", "4") != expected
    assert run(base, tmp_path / "d", "--steps", "2", "--frozen-weights", "nf4") == expected[:2]
    whole, part = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("a", "b"))
    assert whole.keys() == part.keys()
    for name, value in whole.items():
        assert torch.equal(part[name], value), name


def test_a_dry_run_counts_packed_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    base = save_tiny_model(tmp_path / "base", "llama", **sizes)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(8)))
    shown = []
    for words in ([], ["--frozen-weights", "nf4"]):
        out = str(tmp_path / "out")
        given = ["--model", str(base), "--data", str(tmp_path / "rows.jsonl"), "--out", out, "--lora", "2", "--dry-run"]
        assert main(["train", *given, "--batch", "4", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        weights = next(float(line.split()[1]) for line in lines if line.split()[:1] == ["weights"] and "GB" in line)
        shown.append((weights, next(line for line in lines if "parameters" in line)))
    (plain_gb, plain_count), (packed_gb, packed_count) = shown
    assert plain_count == packed_count
    assert 0.12 * plain_gb < packed_gb < 0.3 * plain_gb  # float32 against 4.25 bits, and adapters


def test_the_command_leaves_packed_weights_on_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written by the first run, mapped by the resumed one; the losses are those of a base in memory."""
    base = save_tiny_model(tmp_path / "base", "llama")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(16)))
    packed = ("--save-every", "2", "--load-in-4bit")
    expected = run(base, tmp_path / "a", "--steps", "4", *packed)
    mapped = (*packed, "--steps", "4", "--weights-folder", str(tmp_path / "weights"))
    found = run(base, tmp_path / "b", *mapped)
    (folder,) = (tmp_path / "weights").iterdir()
    written_ns = (folder / "weights.bin").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "b" / "checkpoint-4")
    (tmp_path / "b" / "latest").unlink()
    assert run(base, tmp_path / "b", *mapped, "--resume") == found == expected
    assert (folder / "weights.bin").stat().st_mtime_ns == written_ns
    assert list((tmp_path / "weights").iterdir()) == [folder]
    capsys.readouterr()
    needed = ["--model", str(base), "--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "c")]
    needed += ["--lora", "2", "--weights-folder", str(tmp_path / "weights")]
    for words, message in (
        ([], "--weights-folder is for packed weights; add --frozen-weights"),
        (["--load-in-4bit", "--pin-model", "alloc"], "--pin-model alloc brings weights into memory"),
        (["--load-in-4bit", "--method", "classify"], "--method classify makes a new head"),
    ):
        assert main(["train", *needed, *words]) == 2
        assert message in capsys.readouterr().err


def test_a_dry_run_counts_mapped_weights_on_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_tiny_model(tmp_path / "base", "llama")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(4)))
    rows: list[dict[str, int]] = []
    monkeypatch.setattr("roundpipe.cli.preparation.memory_table", lambda each: rows.append(dict(each)) or "")
    words = ["--model", str(base), "--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    words += ["--lora", "2", "--devices", "cpu", "--seq-len", "64", "--frozen-weights", "nf4", "--dry-run"]
    place = tmp_path / "new"
    assert main(["train", *words]) == 0
    assert main(["train", *words, "--weights-folder", str(place)]) == 0
    assert f"nf4, mapped from {place}" in capsys.readouterr().out
    assert not place.exists()
    (memory, _, _), (mapped, _, disk) = rows[:3], rows[3:]
    frozen = sum(param.nbytes for param in roundpipe.load(base, frozen_weights="nf4").parameters())
    assert disk["packed weights"] == frozen == memory["weights"] - mapped["weights"]


def test_a_config_of_bitsandbytes_packs_the_base(tmp_path: Path) -> None:
    """QLoRA as scripts of TRL ask for it."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    from datasets import Dataset
    from transformers import BitsAndBytesConfig

    from roundpipe.integrations import RoundPipeSFTTrainer

    base = str(save_tiny_model(tmp_path / "base", "llama"))
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    given: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
        ({}, {}, "nf4"),
        ({}, {"quantization_config": config}, None),
        ({"model_init_kwargs": {"dtype": "float32", "quantization_config": config}}, {}, None),
    ]
    found = []
    for number, (of_args, of_trainer, form) in enumerate(given):
        args = trl.SFTConfig(**settings(tmp_path / str(number), max_steps=2, max_length=32, **of_args))
        with_adapter = RoundPipeSFTTrainer(
            base,
            args=args,
            train_dataset=Dataset.from_list(chat_rows(16)),
            processing_class=tiny_tokenizer(),
            peft_config=peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
            roundpipe=options(2, frozen_weights=form),
            **of_trainer,
        )
        assert {each.form.name for each in packed_places(with_adapter.model.original_model).values()} == {"nf4"}
        found.append(outcome_of(with_adapter).losses)
        assert (args.model_init_kwargs or {}).keys() == of_args.get("model_init_kwargs", {}).keys(), "the user's"
    assert found[0] == found[1] == found[2]


def test_a_config_of_bitsandbytes_as_an_option_of_loading(tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig, GPTQConfig

    base = save_tiny_model(tmp_path / "base", "llama")
    for given, form in ((BitsAndBytesConfig(load_in_8bit=True), "int8"), ({"load_in_4bit": True, **NF4}, "nf4")):
        model = roundpipe.load(base, quantization_config=given)
        assert {each.form.name for each in packed_places(model).values()} == {form}
    for wrong, frozen_weights, message in (
        (BitsAndBytesConfig(load_in_4bit=True), None, "bnb_4bit_quant_type='fp4'.*frozen_weights, one of 'nf4'"),
        (
            BitsAndBytesConfig(load_in_8bit=True),
            "nf4",
            "frozen_weights is 'nf4', but quantization_config asks for 'int8'",
        ),
        (GPTQConfig(bits=4), None, "is a GPTQConfig; load.. knows BitsAndBytesConfig"),
        (
            BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "k_proj"]),
            None,
            r"llm_int8_skip_modules=\['k_proj'\]",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            roundpipe.load(base, quantization_config=wrong, frozen_weights=frozen_weights)
