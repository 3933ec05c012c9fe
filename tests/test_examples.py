"""Every example runs with --tiny on two virtual devices, and computes what the script computes in plain PyTorch."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers_plain_loop import put_plain_pytorch_behind

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "tiny")
# Trained in float32 with exact steps: a plain loop gives the same losses, up to the order of additions.
LIKE_PLAIN = ["dpo", "finetune_full", "finetune_lora", "image_classifier", "seq2seq", "split_merge", "unet"]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Run]:
    """A function that runs an example and returns its variables."""
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu*2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    variables: list[dict[str, Any]] = []

    def run_script(name: str, *options: str, tiny: bool = True) -> dict[str, Any]:
        path = FOLDER / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *(["--tiny"] if tiny else []), *options])
        variables.append({"__name__": "__main__"})
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), variables[-1])
        return variables[-1]

    yield run_script
    for names in variables:
        names.clear()  # ends the models: functions of a script refer to its variables, a cycle
    assert "loss_reduction" not in caplog.text, "the example leaves open how losses are combined"


def flat(options: dict[str, object]) -> list[str]:
    return [str(part) for option in options.items() for part in option]


def assert_falls(losses: list[float]) -> None:
    third = len(losses) // 3
    assert sum(losses[-third:]) < 0.85 * sum(losses[:third]), losses


@pytest.mark.parametrize("name", LIKE_PLAIN)
def test_losses_fall_and_are_those_of_the_plain_loop(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = run(name)["losses"]
    assert_falls(losses)
    put_plain_pytorch_behind(monkeypatch)
    plain = run(name)["losses"]
    assert losses == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_in_a_new_process(run: Run, tmp_path: Path) -> None:
    straight = run("finetune_full", "--out", "out")["losses"]
    shutil.rmtree(tmp_path / "out" / "step-20")  # as if the run had been killed after step 15
    again = subprocess.run(
        [sys.executable, str(FOLDER / "finetune_full.py"), "--tiny", "--out", "out"],
        env={**os.environ, "ROUNDPIPE_DEVICES": "cpu*2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert again.returncode == 0, again.stderr
    assert "15 steps are done, 5 are left" in again.stdout
    printed = re.findall(r"step +(\d+)  loss (\S+)", again.stdout)
    assert printed == [(str(step), f"{loss:.4f}") for step, loss in enumerate(straight[15:], start=16)]


@pytest.mark.parametrize("name", ["finetune_full", pytest.param("finetune_lora", marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_bits(name: str, run: Run, tmp_path: Path) -> None:
    straight = run(name, "--out", "out")["losses"]
    shutil.rmtree(tmp_path / "out" / f"step-{len(straight)}")
    assert run(name, "--out", "out")["losses"] == straight[15:]
    assert run(name, "--out", "out")["losses"] == []  # the last step is saved, so nothing is left


@pytest.mark.slow
def test_own_model_and_text_are_trained_like_the_tiny_ones(run: Run) -> None:
    options = {"--model": "out/tiny", "--data": "out/tiny/text.txt", "--out": "own", "--seq-len": 16, "--batch": 8}
    options |= {"--steps": 20, "--save-every": 5, "--lr": 3e-3}
    expected = run("finetune_full", "--out", "out")["losses"]
    assert run("finetune_full", *flat(options), tiny=False)["losses"] == expected


@pytest.mark.parametrize(
    ("name", "data"),
    [("dpo", "preferences.jsonl"), ("finetune_lora", "chats.jsonl"), ("seq2seq", ""), ("evaluate", "text.txt")],
)
@pytest.mark.slow
def test_own_model_and_rows_are_taken(name: str, data: str, run: Run) -> None:
    tiny = importlib.import_module("tiny")
    paths = tiny.causal_lm(Path("own"), data) if data else tiny.seq2seq(Path("own"))
    own = run(name, *flat({"--model": paths["model"], "--data": paths["data"], "--batch": 25}), tiny=False)
    losses = own["losses"] if "losses" in own else [own["loss"]]
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("name", "keys", "options"),
    [
        ("image_classifier", ("images", "labels"), {"--width": 4, "--depth": 1, "--epochs": 1}),
        ("unet", ("images", "masks"), {"--width": 4, "--epochs": 1}),
        ("grad_scaler", ("points", "labels"), {"--width": 8, "--depth": 1, "--steps": 2}),
        ("split_merge", "bags", {"--width": 4}),
    ],
)
@pytest.mark.slow
def test_own_data_are_taken(name: str, keys: tuple[str, ...] | str, options: dict[str, object], run: Run) -> None:
    names = run(name)
    data = names[keys] if isinstance(keys, str) else {key: names[key] for key in keys}
    torch.save(data, "data.pt")
    losses = run(name, *flat({"--data": "data.pt", **options}), tiny=False)["losses"]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "finetune_bf16"])
def test_missing_options_are_named(name: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(name, tiny=False)
    assert "or --tiny" in capsys.readouterr().err


def test_the_folder_of_the_full_fine_tune_loads_with_plain_transformers(run: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = run("finetune_full", "--out", "out")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "latest")
    trained = names["model"].state_dict()
    assert all(torch.equal(weight, trained[key]) for key, weight in network.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "latest").eos_token == "<eos>"


def test_the_folder_of_the_lora_fine_tune_loads_with_plain_peft(run: Run, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    names = run("finetune_lora", "--out", "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "tiny")
    loaded = PeftModel.from_pretrained(base, tmp_path / "out" / "latest").state_dict()
    trained = {key: weight for key, weight in names["model"].state_dict().items() if "lora" in key}
    assert trained
    assert all(torch.equal(loaded[key], weight) for key, weight in trained.items())


def test_prompts_have_no_labels(run: Run) -> None:
    names = run("finetune_lora")
    ids, labels = names["rows"][0]
    assert names["tokenizer"].decode(ids) == "<user> 0 1 2 3 <eos> <assistant> 4 5 6 <eos>"
    assert names["tokenizer"].decode(labels[labels != -100]) == "4 5 6 <eos>"


@pytest.mark.slow
def test_dpo_begins_with_equal_models(run: Run) -> None:
    names = run("dpo")
    assert names["losses"][0] == pytest.approx(math.log(2), abs=1e-6)  # wrong scores of the reference change this
    ids, labels = names["rows"][1]
    assert names["tokenizer"].decode(ids) == "0 1 2 3 59 59 59 <eos>"
    assert names["tokenizer"].decode(labels[labels != -100]) == "59 59 59 <eos>"
    frozen = names["reference"].state_dict()
    start = names["AutoModelForCausalLM"].from_pretrained(names["args"].model).state_dict()
    assert all(torch.equal(frozen[key], weight) for key, weight in start.items())
    assert not torch.equal(names["policy"].state_dict()["lm_head.weight"], start["lm_head.weight"])


def test_the_classifier_updates_running_statistics_once_per_microbatch(run: Run, tmp_path: Path) -> None:
    names = run("image_classifier")
    weights = torch.load(tmp_path / "classifier.pt")
    assert weights["1.norm.num_batches_tracked"] == 4 * len(names["losses"])
    assert names["accuracy"] > 0.9
    plain = names["network"]  # after the end of the run it is a plain module again
    plain.load_state_dict(weights)
    held_out = slice(names["num_train"], None)
    guesses = plain.eval()(names["images"][held_out]).argmax(dim=1)
    assert torch.equal(guesses, names["guesses"])


def test_the_saved_unet_is_a_plain_one(run: Run, tmp_path: Path) -> None:
    names = run("unet")
    plain = names["UNet"](names["args"].width)
    plain.load_state_dict(torch.load(tmp_path / "unet.pt"))
    guesses = plain(names["images"]) > 0
    masks = names["masks"] > 0
    assert (guesses & masks).sum() / (guesses | masks).sum() > 0.7  # the squares are found


def test_custom_merge_gives_one_score_per_bag(run: Run) -> None:
    names = run("split_merge")
    outputs, sizes = names["outputs"], names["packed"][1]
    assert len(outputs["scores"]) == len(sizes)
    assert outputs["largest_bag"] == sizes.max()


def test_loss_scale_grows_and_is_halved_after_an_overflow(run: Run) -> None:
    names = run("grad_scaler")
    assert_falls(names["losses"])
    factors = [after / before for before, after in zip(names["scales"], names["scales"][1:], strict=False)]
    assert set(factors) == {0.5, 1.0, 2.0}
    assert next(names["network"].parameters()).dtype == torch.float16
    num_skipped = factors.count(0.5)
    num_updates = {int(state["step"]) for state in names["optimizer"].state.values()}
    assert num_updates == {len(names["losses"]) - num_skipped}


def test_resumed_bfloat16_training_has_equal_losses(run: Run) -> None:
    names = run("finetune_bf16")
    assert_falls(names["losses"])
    assert names["resumed"] == names["losses"][15:]


def test_evaluation_gives_the_loss_of_the_plain_model(run: Run) -> None:
    names = run("evaluate")
    plain = names["AutoModelForCausalLM"].from_pretrained(names["args"].model)
    with torch.no_grad():
        logits = plain(names["rows"]).logits[:, :-1]
    assert names["loss"] == pytest.approx(cross_entropy(logits.flatten(0, 1), names["rows"][:, 1:].flatten()).item())


def test_chat_replies_like_the_plain_model(run: Run) -> None:
    names = run("chat")
    plain = names["AutoModelForCausalLM"].from_pretrained(names["args"].model)
    tokens = plain.generate(**names["inputs"], max_new_tokens=8)[0]
    expected = names["tokenizer"].decode(tokens).split("<assistant> ")[1].removesuffix(" <eos>")
    assert expected
    assert names["messages"] == [{"role": "user", "content": "1 2 3 4"}, {"role": "assistant", "content": expected}]


def notebook_cells(kind: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / "first_steps.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(notebook_cells("code"), start=1):
        exec(compile("".join(cell["source"]), f"first_steps.ipynb, code cell {number}", "exec"), names)
        outputs.append(capsys.readouterr().out)
    assert_falls(names["losses"] + names["resumed"])
    assert names["resumed"] == names["straight"]
    assert names["reply"][0].tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # it has learned to count
    assert names["stats"].step == 30
    assert names["stats"].tokens == 12 * 16
    chart = next(output for output in outputs if "the call took" in output)
    assert any(span.label.startswith("FB") for span in names["timeline"].spans)
    assert all(f"{device} |" in chart for device in names["timeline"].devices())
    names.clear()


def test_notebook_is_stored_without_outputs() -> None:
    cells = notebook_cells("code")
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_links_of_the_notebook_and_the_readme_lead_somewhere() -> None:
    texts = ["".join(cell["source"]) for cell in notebook_cells("markdown")]
    for text in [*texts, (FOLDER / "README.md").read_text(encoding="utf-8")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (FOLDER / target).exists(), target


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 80


def test_the_readme_lists_every_example() -> None:
    listed = re.findall(r"^\| \[(\w+)\.(?:py|ipynb)\]\(\1\.(?:py|ipynb)\) \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted([*SCRIPTS, *(path.stem for path in FOLDER.glob("*.ipynb"))])


def test_every_example_is_tested() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert not [name for name in SCRIPTS if f'"{name}"' not in text]
