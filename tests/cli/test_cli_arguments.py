"""Options of `roundpipe train`: the command line, the config file, defaults, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundpipe.cli import arguments
from roundpipe.cli.arguments import TrainSettings, parse
from roundpipe.cli.options import OPTIONS
from roundpipe.errors import ConfigError, DeviceError

NEEDED = ["--model", "m", "--data", "d.jsonl", "--out", "o"]


def settings(*words: str) -> TrainSettings:
    return parse([*NEEDED, "--devices", "cpu*2", *words])


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*words)
    return str(caught.value)


def with_config(tmp_path: Path, text: str, *words: str) -> TrainSettings:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return parse(["--config", str(file), *words])


def test_defaults_of_a_full_run() -> None:
    got = settings()
    assert got.lora is None
    assert got.resume is None
    assert got.dtype is None  # by device
    expected = {
        "learning_rate": 1e-5, "lr_scheduler_type": "cosine", "max_length": 1024, "max_grad_norm": 1.0, "seed": 42,
        "per_device_train_batch_size": 8, "num_train_epochs": 1.0, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False,
    }  # fmt: skip
    assert {name: got.trainer[name] for name in expected} == expected
    assert got.roundpipe == {"devices": "cpu*2", "is_async": False, "view": True}


def test_lora_has_its_own_learning_rate_and_alpha() -> None:
    got = settings("--lora", "8")
    assert got.lora is not None
    assert (got.lora.rank, got.lora.alpha, got.lora.target_modules) == (8, 16, "all-linear")
    assert got.trainer["learning_rate"] == 2e-4


def test_short_options_set_the_fields_of_sft_config() -> None:
    line = (
        "--seq-len 32 --batch 4 --lr 1e-3 --schedule linear --warmup 10 --steps 7 --save-every 3 --keep 2 --seed 1 "
        "--eval-data e.jsonl --eval-every 5 --stale --num-microbatch 4 --nonfinite skip"
    )
    got = settings(*line.split())
    expected = {
        "max_length": 32, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "linear",
        "warmup_steps": 10, "max_steps": 7, "save_steps": 3, "save_total_limit": 2, "eval_steps": 5, "seed": 1,
        "eval_strategy": "steps", "per_device_eval_batch_size": 4,
    }  # fmt: skip
    assert {name: got.trainer[name] for name in expected} == expected
    assert got.roundpipe["is_async"] is True
    assert (got.roundpipe["num_microbatch"], got.roundpipe["nonfinite"]) == (4, "skip")


def test_layers_are_compiled_on_demand() -> None:
    assert "compile" not in settings().roundpipe
    got = settings("--compile", "--torch-compile-mode", "max-autotune-no-cudagraphs")
    assert (got.roundpipe["compile"], got.trainer["torch_compile_mode"]) == (True, "max-autotune-no-cudagraphs")


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ([], None),
        (["--frozen-weights", "fp8"], "fp8"),
        (["--load-in-4bit"], "nf4"),
        (["--load-in-4bit", "true"], "nf4"),
        (["--load-in-8bit=True"], "int8"),
        (["--load-in-4bit", "false"], None),
    ],
)
def test_frozen_weights_are_packed_by_either_name(words: list[str], form: str | None) -> None:
    assert settings("--lora", "2", *words).roundpipe.get("frozen_weights") == form


def test_every_field_of_sft_config_is_an_option_in_both_spellings() -> None:
    got = settings("--weight-decay", "0.1", "--adam_beta2=0.95", "--packing", "--report-to", "tensorboard")
    assert (got.trainer["weight_decay"], got.trainer["adam_beta2"], got.trainer["packing"]) == (0.1, 0.95, True)
    assert got.trainer["report_to"] == "tensorboard"


def test_a_field_with_a_default_of_true_can_be_turned_off() -> None:
    assert settings("--no-remove-unused-columns").trainer["remove_unused_columns"] is False


def test_config_file_has_the_same_names_and_flags_win(tmp_path: Path) -> None:
    text = "model: m\ndata: d.jsonl\nout: o\ndevices: cpu\nlr: 1e-4\nseq-len: 64\nweight_decay: 0.2\ntruncate: true\n"
    got = with_config(tmp_path, text, "--lr", "3e-4")
    assert (got.trainer["learning_rate"], got.trainer["max_length"], got.trainer["weight_decay"]) == (3e-4, 64, 0.2)
    assert got.truncate is True


def test_a_flag_wins_over_the_long_name_of_the_same_field_in_the_file(tmp_path: Path) -> None:
    got = with_config(tmp_path, "model: m\ndata: d\nout: o\ndevices: cpu\nlearning_rate: 1e-4\n", "--lr", "3e-4")
    assert got.trainer["learning_rate"] == 3e-4


def test_a_flag_replaces_an_option_of_the_file_that_it_excludes(tmp_path: Path) -> None:
    text = "model: m\ndata: d\nout: o\ndevices: cpu\nlora: 8\nstale: true\nepochs: 2\n"
    got = with_config(tmp_path, text, "--full", "--exact", "--steps", "5")
    assert got.lora is None
    assert got.roundpipe["is_async"] is False
    assert got.trainer["max_steps"] == 5


def test_values_of_a_config_file_may_be_lists_mappings_false_and_null(tmp_path: Path) -> None:
    text = (
        "model: m\ndata: d\nout: o\ndevices: cpu\nlora: 2\nlora-target-modules: [q_proj, v_proj]\nlr: null\n"
        "packing: false\ninit: false\nresume: true\nlr-scheduler-kwargs: {num_cycles: 2}\n"
    )
    got = with_config(tmp_path, text)
    assert got.lora is not None
    assert got.lora.target_modules == ["q_proj", "v_proj"]
    assert got.trainer["learning_rate"] == 2e-4
    assert got.trainer["packing"] is False
    assert got.resume == ""
    assert got.trainer["lr_scheduler_kwargs"] == '{"num_cycles": 2}'


def test_resume_takes_a_folder_or_none() -> None:
    assert settings("--resume").resume == ""
    assert settings("--resume", "there").resume == "there"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--learnig-rate", "1"], ["no option --learnig-rate", "did you mean --learning-rate?"]),
        (["--sequence_lenght", "1"], ["no option --sequence_lenght"]),
        (["--batchsize=4"], ["no option --batchsize", "--batch"]),
        (["stray"], ["'stray' belongs to no option"]),
        (["--lr", "fast"], ["--lr needs a number, got 'fast'"]),
        (["--eval-split", "5%"], ["--eval-split needs a number, such as 0.05, got '5%'"]),
        (["--lora"], ["--lora needs a value: --lora R (train a LoRA adapter of rank R)"]),
        (["--logging-steps"], ["--logging-steps needs a value"]),
        (["recipe.yaml"], ["write --config recipe.yaml if it is the file of options"]),
        (
            ["--adapter", "qlora"],
            ["--adapter is the folder of an adapter to train further; for a new one give --lora R"],
        ),
        (
            ["--pref-beta", "0.1"],
            ["there is no option --pref-beta: it is called beta here; give --method dpo, kto or orpo"],
        ),
        (["--lr", "0"], ["--lr must be greater than 0, got 0"]),
        (["--lr", "inf"], ["--lr must be a finite number, got inf"]),
        (["--epochs", "inf"], ["--epochs must be a finite number, got inf"]),
        (["--warmup", "nan"], ["--warmup must be a finite number, got nan"]),
        (["--weight-decay", "nan"], ["--weight-decay must be a finite number, got nan"]),
        (["--weight-decay", "x"], ["--weight-decay needs a number, got 'x'"]),
        (["--seq-len", "1"], ["--seq-len must be at least 2, got 1"]),
        (["--seq-len", "9", "--max-length", "8"], ["--seq-len and --max-length are the same setting"]),
        (["--fp16"], ["--fp16 cannot be used here", "--dtype bfloat16"]),
        (["--torch-compile-mode", "max-autotune"], ["CUDA graphs keep the addresses of weights"]),
        (["--liger-kernel"], ["there is no option --liger-kernel: give --use-liger-kernel"]),
        (["--dtype", "float16"], ["--dtype float16 cannot be used here", "use bfloat16 or float32"]),
        (["--optim-dtype", "float16"], ["--optim-dtype float16 cannot be used here"]),
        (
            ["--optim", "adamw_torch_4bit"],
            ["--optim adamw_torch_4bit cannot be used here", "host memory", "--moments 8bit"],
        ),
        (["--optim", "paged_ademamix_32bit"], ["--optim paged_ademamix_32bit cannot be used here"]),
        (["--moments", "4bit"], ["--moments", "invalid choice: '4bit'"]),
        (["--on-devices", "--state-folder", "state"], ["--state-folder and --on-devices exclude each other"]),
        (["--master-bits", "16"], ["--master-bits", "invalid choice: 16"]),
        (["--master-bits", "24", "--optim-dtype", "bfloat16"], ["--master-bits 24 needs --optim-dtype float32"]),
        (["--moments", "8bit", "--optim-dtype", "bfloat16"], ["moments in low bits (8bit) need --optim-dtype float32"]),
        (
            ["--merge"],
            ["there is no option --merge: the run saves the adapter alone. Merge it after the run: roundpipe merge"],
        ),
        (["--load-in-4bit"], ["--frozen-weights nf4 packs weights that do not train", "add --lora R or --adapter DIR"]),
        (["--lora", "2", "--load-in-4bit", "--load-in-8bit"], ["--load-in-4bit and --load-in-8bit exclude each other"]),
        (["--lora", "2", "--load-in-4bit", "maybe"], ["--load-in-4bit", "maybe"]),
        (["--lora", "2", "--frozen-weights", "nf3"], ["--frozen-weights", "'nf4', 'int8', 'fp8'", "nf3"]),
        (["--quantization-bit", "4"], ["there is no option --quantization-bit: give --frozen-weights nf4, int8"]),
        (
            ["--lora", "2", "--frozen-weights", "nf4", "--model-init-kwargs", "{}"],
            ["--model-init-kwargs are for from_pretrained()"],
        ),
        (
            ["--val-size", "0.1"],
            ["there is no option --val-size: give --eval-split SHARE"],
        ),
        (["--early-stopping-patience", "3"], ["there is no option --early-stopping-patience: give --early-stopping N"]),
        (["--cutoff_len=512"], ["there is no option --cutoff_len: give --seq-len TOKENS."]),
        (["--data", ""], ["--data has an empty name"]),
        (["--model", "a\0b"], ["--model: 'a\\x00b' has a zero byte"]),
        (["--batch", "9" * 400], ["--batch must be less than 2147483648, got 999999"]),
        (
            ["--label-smoothing-factor", "0.1"],
            ["--label-smoothing-factor cannot be used here", "two different forward"],
        ),
        (["--debug", "underflow_overflow"], ["--debug cannot be used here", "--nonfinite"]),
        (["--eval-data", "x" * 300], ["--eval-data: the name 'xxx", "is too long for the file system"]),
        (["--resume", "x" * 300], ["--resume: the name 'xxx", "is too long for the file system"]),
        (["--batch", "-1"], ["--batch must be greater than 0"]),
        (["--seq-len", "0"], ["--seq-len must be greater than 0"]),
        (["--save-every", "0"], ["--save-every must be greater than 0"]),
        (["--seed", "-1"], ["--seed must be between 0"]),
        (["--warmup", "-1"], ["--warmup must not be negative"]),
        (["--lr", "1", "--learning-rate", "2"], ["--lr and --learning-rate are the same setting"]),
        (["--lora", "4", "--full"], ["--lora and --full exclude each other"]),
        (["--exact", "--stale"], ["--exact and --stale exclude each other"]),
        (["--epochs", "1", "--steps", "2"], ["--epochs and --steps exclude each other"]),
        (["--lora", "4", "--init"], ["--lora needs trained weights", "--init"]),
        (["--lora-alpha", "4"], ["--lora-alpha needs --lora R"]),
        (["--lora", "4", "--lora-dropout", "1"], ["--lora-dropout must be"]),
        (["--schedule", "cosin"], ["--schedule cosin is unknown", "cosine"]),
        (["--eval-every", "5"], ["--eval-data", "--eval-split"]),
        (["--eval-split", "0"], ["--eval-split must be greater than 0"]),
        (["--eval-split", "0.1", "--eval-data", "e"], ["--eval-data and --eval-split exclude each other"]),
        (["--data", "a=0.5"], ["--data d.jsonl has no weight, others have one; give d.jsonl=WEIGHT"]),
        (["--data", "a=-1"], ["--data a=-1: a weight must be a finite number greater than 0"]),
        (["--data", "a=nan"], ["--data a=nan: a weight must be"]),
        (["--nonfinite", "ignore"], ["--nonfinite", "stop"]),
        (["--resume-from-checkpoint", "x"], ["--resume-from-checkpoint cannot be used here", "--resume"]),
        (["--padding-free"], ["--padding-free cannot be used here"]),
        (["--packing", "--packing-strategy", "bfd"], ["--packing-strategy bfd cannot be used here"]),
        (["--packing", "--truncate"], ["--packing and --truncate exclude each other"]),
        (["--deepspeed", "x.json"], ["--deepspeed cannot be used here", "--devices"]),
        (["--config", "nowhere.yaml"], ["cannot read nowhere.yaml", "No such file"]),
        (["--wait-limit", "0"], ["--wait-limit must be greater than 0"]),
    ],
)
def test_mistakes_are_refused(words: list[str], parts: list[str]) -> None:
    message = refusal(*words)
    for part in parts:
        assert part in message


def test_answers_to_names_of_other_tools_name_options_that_exist() -> None:
    parser = arguments._Parser(add_help=False)
    arguments._add_own_options(parser)
    arguments._add_fields(parser)
    known = {text.lstrip("-").replace("_", "-") for text in parser._option_string_actions}
    assert not known & arguments._ELSEWHERE.keys()  # an option that exists needs no answer
    for name, answer in arguments._ELSEWHERE.items():
        assert set(re.findall(r"--([a-z][a-z0-9-]*)", answer)) <= known, name


def test_data_may_have_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c=1").write_text("")
    words = ["--model", "m", "--out", "o", "--devices", "cpu", "--data"]
    got = parse([*words, "a.jsonl=0.7", "owner/name:train=3e-1"])
    assert ([str(path) for path in got.data], got.weights) == (["a.jsonl", "owner/name:train"], [0.7, 0.3])
    got = parse([*words, "c=1", "d=e"])  # a file with this name, and no number
    assert ([str(path) for path in got.data], got.weights) == (["c=1", "d=e"], None)


def test_data_may_be_given_several_times_or_as_a_list(tmp_path: Path) -> None:
    def data(*words: str) -> list[str]:
        return [str(path) for path in parse(["--model", "m", "--out", "o", "--devices", "cpu", *words]).data]

    assert data("--data", "a", "--data", "b") == data("--data", "a", "b") == ["a", "b"]
    got = settings(
        "--eval-data",
        "e",
        "--eval-data",
        "f",
        "--lora",
        "2",
        "--lora-target-modules",
        "q",
        "--lora-target-modules",
        "v",
    )
    assert [str(path) for path in got.eval_data] == ["e", "f"]
    assert got.lora is not None
    assert got.lora.target_modules == ["q", "v"]
    text = "model: m\ndata: [a, b]\nout: o\ndevices: cpu\n"
    assert [str(path) for path in with_config(tmp_path, text).data] == ["a", "b"]
    assert [str(path) for path in with_config(tmp_path, text, "--data", "c").data] == ["c"]


def test_a_wrong_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="tpu"):
        parse([*NEEDED, "--devices", "tpu"])


@pytest.mark.parametrize("missing", ["--model", "--data", "--out"])
def test_needed_options(missing: str) -> None:
    words = [*NEEDED, "--devices", "cpu"]
    at = words.index(missing)
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        parse(words[:at] + words[at + 2 :])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b\n", "got a list"),
        ("lr: [1\n", "is not valid YAML"),
        ("leraning-rate: 1\n", "no option --leraning-rate; did you mean --learning-rate?"),
        ("config: other.yaml\n", "names another config file"),
        ("lr: fast\n", "--lr needs a number, got 'fast'"),
        ("batch: " + "9" * 5000 + "\n", "is not valid YAML: Exceeds the limit"),
        ("batch: 0x" + "f" * 5000 + "\n", "is not valid YAML: Exceeds the limit"),
        ("lr: 2020-13-45\n", "is not valid YAML: month must be in 1..12"),
        ("lr-scheduler-kwargs: {a: 2020-01-01}\n", "--lr-scheduler-kwargs cannot be written as JSON"),
        ("lr-scheduler-kwargs: &a {b: *a}\n", "--lr-scheduler-kwargs cannot be written as JSON"),
        ("a: " + "[" * 5000 + "\n", "is not valid YAML"),
        ("base_model: x\n", "there is no option --base-model: give --model DIR_OR_NAME"),
    ],
)
def test_mistakes_in_a_config_file_name_the_file(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_config(tmp_path, text)
    assert part in str(caught.value)
    assert "run.yaml" in str(caught.value)


def test_all_options_of_another_tool_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        with_config(tmp_path, "base_model: x\nval_set_size: 0.1\nsequence_lenght: 3\nlr: 1e-4\n")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("run.yaml: there are no such options:")
    assert [line.split(":")[0].split(";")[0] for line in lines[1:]] == [
        "  --base-model", "  --val-set-size", "  --sequence-lenght",
    ]  # fmt: skip
    assert lines[1].endswith(": give --model DIR_OR_NAME.")


def test_a_resume_without_options_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("model: m\n")
    for words in (["--resume", str(tmp_path)], ["--resume", "--out", str(tmp_path)]):
        with pytest.raises(ConfigError, match=f"roundpipe train --config {tmp_path}/train.yaml --resume"):
            arguments.parse(words)


def test_a_weight_in_another_form_is_refused_with_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    for written in ("a.jsonl:0.7", "a.jsonl=70%", "a.jsonl@0.7"):
        with pytest.raises(ConfigError, match=r"a\.jsonl=0\.7"):
            arguments.split_weight(written)
    assert arguments.split_weight("owner/name:train") == ("owner/name:train", None)
    assert arguments.split_weight("b=x") == ("b=x", None)


@pytest.mark.slow
def test_trl_is_not_imported_for_help_nor_for_mistakes_in_own_options() -> None:
    """Importing it takes seconds; nor does a run import it before its data is read."""
    for words in (
        ["--help"],
        ["--lr", "fast"],
        ["--model", "m", "--data", "nowhere", "--out", "o", "--devices", "cpu"],
    ):
        program = (
            "import sys; from roundpipe.__main__ import main; main(sys.argv[1:]); "
            "sys.exit(any(name in sys.modules for name in ('trl', 'transformers', 'datasets')))"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        command = [sys.executable, "-c", program, "train", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)


def test_help_fits_into_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_an_empty_config_file_is_one_without_options(tmp_path: Path) -> None:
    got: Any = with_config(tmp_path, "", *NEEDED, "--devices", "cpu")
    assert got.model == "m"


def test_the_page_describes_every_own_option_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `--")]
    for each in OPTIONS.values():
        if each.heading is not None:
            row = next((cells for cells in rows if re.search(rf"`{each.written()}\b(?!-)", cells[0])), None)
            assert row is not None, f"docs/train.md does not describe {each.written()}"
            if each.default and not each.default_text:
                shown = f"{each.default:g}" if isinstance(each.default, float) else str(each.default)
                assert shown in row[1], f"docs/train.md has another default of {each.written()}"
