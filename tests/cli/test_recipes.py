"""Recipes parse, fit into the machine that they name, and train; the page of predictions is what its tool writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model

from roundpipe.__main__ import main
from roundpipe.cli.arguments import TrainSettings, parse
from roundpipe.estimate.figures import SHAPES

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FITS = re.compile(r"^# Fits: one GPU of (\d+) GiB, (\d+) GiB of RAM$", re.MULTILINE)
SYSTEM_GIB = 6  # of the RAM, for other programs
QUICK = ("qwen3-8b-full", "gpt-oss-20b-lora")


def settings_of(recipe: Path) -> TrainSettings:
    rewards = ["--reward", "rewards.py:accuracy"] if recipe.stem.endswith("-grpo") else []
    return parse(["--config", str(recipe), "--data", "chats.jsonl", "--out", "run", *rewards])


def is_fitting(recipe: Path, gpu_gib: int, ram_gib: float, capsys: pytest.CaptureFixture[str]) -> bool:
    settings = settings_of(recipe)
    shape = recipe.stem.rpartition("-")[0]
    work = [
        "--batch",
        str(settings.trainer["per_device_train_batch_size"] * settings.method.sequences),
        "--seq-len",
        str(settings.trainer["max_length"]),
    ]
    trained = ["--full"] if settings.lora is None else ["--lora", str(settings.lora.rank)]
    machine = ["--devices", f"1x{gpu_gib}GiB", "--ram", str(ram_gib)]
    microbatches = ["--microbatches", str(settings.roundpipe["num_microbatch"])]
    code = main(["estimate", shape, *work, *trained, *machine, *microbatches])
    assert code in (0, 1), capsys.readouterr().err
    return code == 0


def key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in RECIPES],
)
def test_recipe_fits_into_the_machine_that_it_names(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = FITS.search(recipe.read_text())
    assert found is not None
    gpu_gib, ram_gib = (int(number) for number in found.groups())
    assert is_fitting(recipe, gpu_gib, ram_gib - SYSTEM_GIB, capsys)
    assert not is_fitting(recipe, gpu_gib, ram_gib / 2 - SYSTEM_GIB, capsys)
    if gpu_gib > 12:
        assert not is_fitting(recipe, {16: 12, 24: 16}[gpu_gib], ram_gib, capsys)


@pytest.mark.parametrize("recipe", [pytest.param(path, id=path.stem) for path in RECIPES])
def test_recipe_says_what_it_is(recipe: Path) -> None:
    settings = settings_of(recipe)
    shape, _, method = recipe.stem.rpartition("-")
    assert shape in SHAPES
    series, size = shape.split("-")[0], shape.split("-")[-1]
    assert key(series) in key(settings.model)
    assert key(size) in key(settings.model) or size in ("7b", "12b")  # Mistral's names have v0.3 and Nemo
    assert (settings.lora is None) == (method == "full")
    assert settings.method.name == (method if method in ("dpo", "grpo") else "sft")
    assert settings.lora is None or "LoRA" in recipe.read_text()
    assert f"--config recipes/{recipe.name} " in recipe.read_text()


def test_recipe_trains_a_tiny_model(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n' * 20)
    recipe = ROOT / "recipes" / "qwen3-8b-lora.yaml"
    smaller = ["--model", str(model), "--seq-len", "32", "--devices", "cpu*2", "--no-view"]
    code = main(["train", "--config", str(recipe), *smaller, "--data", str(data), "--out", str(tmp_path / "run")])
    assert code == 0
    assert (tmp_path / "run" / "adapter_config.json").exists()


def test_page_has_the_rows_that_its_tool_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import what_fits

    page = what_fits.PAGE.read_text(encoding="utf-8").splitlines()
    named: list[Any] = [line.split(" | ")[0].strip("| ") for line in page if line.startswith("| ")]
    head = what_fits.page_head().splitlines()
    assert page[: len(head)] == head
    assert [name for name in named if name in SHAPES] == list(what_fits.MODELS) * len(what_fits.METHODS)
    for model, rank in (("qwen3-8b", None), ("gpt-oss-20b", what_fits.RANK)):
        assert what_fits.row(model, rank).written() in page
    sys.modules.pop("what_fits")
