"""`roundpipe train` as a whole: mistakes, dry run, training, resuming, signals. Runs in this process."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import new_tokenizer, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import roundpipe.cli.train as train_module
import roundpipe.integrations.trainer as trainer_module
from roundpipe.__main__ import main
from roundpipe.api.roundpipe import RoundPipe
from roundpipe.checkpoint import latest
from roundpipe.errors import CheckpointError, NonFiniteError
from roundpipe.optim.states import StateFolder
from roundpipe.report.metrics import MetricsWriter, read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("cli")
    save_model(folder / "model", attention_dropout=0.1)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}+1"},
                {"role": "assistant", "content": str(n + 1) * (n % 3 + 1)},
            ]
        }
        for n in range(19)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(folder: Path, out: Path, *more: str, devices: str = "cpu*2") -> list[str]:
    needed = ["--model", str(folder / "model"), "--out", str(out)]
    if "--data" not in more:
        needed += ["--data", str(folder / "chats.jsonl")]
    usual = ["--devices", devices, "--batch", "4", "--lr", "1e-2", "--seq-len", "64", "--steps", "6", "--no-view"]
    return ["train", *needed, *usual, *more]


def losses(out: Path) -> dict[int, float]:
    """The loss of each step, from the newest checkpoint."""
    newest = latest(out)
    assert newest is not None
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The message for a mistake: exit code 2, and no traceback."""
    capsys.readouterr()  # progress bars of the test's own preparations
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("roundpipe: ")
    assert "Traceback" not in message
    return message


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test: the mistake must be found before."""

    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train_module, "_load_model", load)


# Mistakes.


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--learnin-rate", "1"], ["there is no option --learnin-rate; did you mean --learning-rate?"]),
        (["--devices", "gpu"], ["cannot read 'gpu'"]),
        (["--data", "nowhere.jsonl"], ["--data: there is no file or folder nowhere.jsonl"]),
        (["--eval-data", "nowhere.jsonl"], ["--eval-data: there is no file or folder nowhere.jsonl"]),
        (["--model", "/no/where"], ["--model: there is no folder /no/where"]),
        (["--seq-len", "25"], ["chats.jsonl, line 11: the row has 27 tokens", "more than --seq-len 25", "--truncate"]),
        (["--report-to", "carrier-pigeon"], ["--report-to carrier-pigeon is unknown; give one of", "wandb"]),
        (["--eos-token", "<none>"], ["--eos-token: the tokenizer has no token '<none>'"]),
        (["--chat-template-path", "nowhere.jinja"], ["--chat-template-path must be a file"]),
        (["--attn-implementation", "telepathy"], ["--model: cannot build", "telepathy"]),
        (["--resume"], ["--resume: there is no complete checkpoint in --out", "Leave --resume out"]),
        (["--resume", "/no/where"], ["--resume: there is no folder /no/where"]),
        (["--pin-model", "off", "--logging-strategy", "sometimes"], ["sometimes"]),
        (["--lora", "2", "--lora-target-modules", "foo"], ["--lora: peft cannot make the adapter", "foo"]),
        (["--model-init-kwargs", "{bad"], ["--model-init-kwargs must be a JSON object", "got '{bad'"]),
        (["--lr-scheduler-kwargs", "[1]"], ["--lr-scheduler-kwargs must be a JSON object", "got '[1]'"]),
        (["--schedule", "warmup_stable_decay"], ["--schedule warmup_stable_decay with 6 steps", "num_decay_steps"]),
        (["--adam-beta1", "2"], ["--optim adamw_torch", "beta", "2.0"]),
        (["--optim", "lomo"], ["--optim lomo cannot be used", "lomo_optim"]),
        (["--optim", "sgd", "--moments", "8bit"], ["moments='8bit' is for", "not for optim='sgd'"]),
        (["--model", "no/where"], ["--model: cannot load the config of no/where: there is no such folder"]),
    ],
)
def test_mistakes_end_with_a_message_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], parts: list[str]
) -> None:
    message = refusal(capsys, words(folder, tmp_path / "out", *more))
    for part in parts:
        assert part in message
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_model")
def test_a_bad_row_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": 5}\n')
    message = refusal(capsys, words(folder, tmp_path / "out", "--data", str(bad)))
    assert f"{bad}, line 2: `text` must be a string, got int." in message


@pytest.mark.usefixtures("no_model")
def test_too_little_host_memory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundpipe.store.host_memory.available_host_bytes", lambda: 1000)
    message = refusal(capsys, words(folder, tmp_path / "out"))
    assert "too little host memory: this run does not fit into host memory" in message
    assert "--lora R" in message


@pytest.mark.usefixtures("no_model")
def test_too_little_disk(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    message = refusal(capsys, words(folder, tmp_path / "out"))
    assert f"too little disk space for --out {tmp_path / 'out'}" in message
    assert "--keep" in message


@pytest.mark.usefixtures("no_model")
def test_an_output_folder_that_is_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    assert "out is a file, not a folder" in refusal(capsys, words(folder, tmp_path / "out"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_output_folder_that_cannot_take_checkpoints(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """Found before the data is read, not at the first save or at the step of the colliding one."""
    (tmp_path / "latest").mkdir()
    assert "latest exists and is not a link" in refusal(capsys, words(folder, tmp_path, *more))
    (tmp_path / "latest").rmdir()
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_text("of transformers' own Trainer")
    message = refusal(capsys, words(folder, tmp_path, *more))
    assert "checkpoint-4 has other content than a checkpoint of RoundPipe, and a save would delete it" in message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


@pytest.mark.usefixtures("no_model")
def test_a_model_without_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "bare", weights=False)
    message = refusal(capsys, words(folder, tmp_path / "out", "--model", str(tmp_path / "bare")))
    assert "bare has no weights" in message
    assert "--init" in message


@pytest.mark.usefixtures("no_model")
def test_a_model_without_a_tokenizer(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "mute has no tokenizer" in refusal(capsys, words(folder, tmp_path / "out", "--model", str(model)))


@pytest.mark.usefixtures("no_model")
def test_damaged_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = shutil.copytree(folder / "model", tmp_path / "cut") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refusal(capsys, words(folder, tmp_path / "out", "--model", str(file.parent)))
    assert f"--model: {file} is damaged" in message


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("missing", "no weights for 1 parameters of its config, such as model.norm.weight;"),
        ("shape", "wrong shapes for 1 parameters of its config, such as model.norm.weight (8,) instead of (16,);"),
    ],
)
def test_a_model_that_is_not_the_one_of_its_config(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, reason: str
) -> None:
    file = shutil.copytree(folder / "model", tmp_path / "other") / "model.safetensors"
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    save_file(weights | ({"model.norm.weight": norm[:8].clone()} if fault == "shape" else {}), file, {"format": "pt"})
    assert reason in refusal(capsys, words(folder, tmp_path / "out", "--model", str(file.parent)))


@pytest.mark.usefixtures("no_model")
def test_resume_of_a_folder_that_is_no_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, words(folder, tmp_path / "out", "--resume", str(folder / "model")))
    assert "model is not a complete checkpoint" in message


@pytest.mark.usefixtures("no_model")
def test_an_output_folder_of_a_running_process_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the process ends, by whatever means."""
    lock = (
        "import fcntl, os, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print(os.getpid(), file=file, flush=True); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", lock, str(tmp_path / ".train.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        message = refusal(capsys, words(folder, tmp_path))
        assert f"--out {tmp_path} is in use by another run (process {other.pid})" in message
        assert main(words(folder, tmp_path, "--dry-run")) == 0
        other.kill()
    with pytest.raises(AssertionError, match="the model was loaded"):
        main(words(folder, tmp_path))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "out", ["model", "model/../model", "link", "missing/../model", "checkpoints of the model", "linked weights"]
)
def test_an_output_folder_with_the_files_of_the_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    place = tmp_path / out
    if out == "checkpoints of the model":
        model = model.rename(tmp_path / "checkpoint-8")
        place = tmp_path
    elif out == "linked weights":
        place.mkdir()
        (place / "model.safetensors").symlink_to(model / "model.safetensors")
    message = refusal(capsys, words(folder, place, "--model", str(model)))
    assert f"--out {place} has the files of --model {model}" in message
    assert "give another --out" in message


def test_an_output_folder_inside_of_the_models_folder_is_allowed(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "model")
    before = (model / "model.safetensors").read_bytes()
    assert main(words(folder, model / "run", "--model", str(model), "--steps", "1")) == 0
    assert (model / "model.safetensors").read_bytes() == before


@pytest.mark.usefixtures("no_model")
def test_an_output_folder_with_the_files_of_the_data_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("chats.jsonl", "metrics.jsonl"):
        shutil.copy(folder / "chats.jsonl", tmp_path / name)
    for option, data in (("--data", tmp_path), ("--eval-data", tmp_path / "metrics.jsonl")):
        message = refusal(capsys, words(folder, tmp_path, option, str(data)))
        assert f"--out {tmp_path} is the place of {option} {data}" in message
    assert main(words(folder, tmp_path, "--data", str(tmp_path / "chats.jsonl"), "--dry-run")) == 0


@pytest.mark.usefixtures("no_model")
def test_a_link_to_nothing_is_no_output_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    assert "is a link to" in refusal(capsys, words(folder, tmp_path / "out"))


@pytest.mark.usefixtures("no_model")
def test_a_report_whose_package_is_missing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.integrations.integration_utils.get_available_reporting_integrations", lambda: ["tensorboard"]
    )
    message = refusal(capsys, words(folder, tmp_path / "out", "--report-to", "wandb"))
    assert "--report-to wandb: its package is not installed here" in message
    assert "tensorboard" in message


@pytest.mark.usefixtures("no_model")
def test_a_tokenizer_of_another_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "small", vocab_size=20)
    message = refusal(capsys, words(folder, tmp_path / "out", "--model", str(tmp_path / "small")))
    assert "line 1: token" in message
    assert "vocabulary of 20" in message


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "roundpipe train" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err
    assert main(["train", "--help"]) == 0
    assert "--num-microbatch" in capsys.readouterr().out


def test_a_missing_package_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(words: list[str]) -> None:
        raise ModuleNotFoundError("No module named 'trl'", name="trl")

    monkeypatch.setattr("roundpipe.__main__.parse", parse)
    assert "pip install 'roundpipe[train]'" in refusal(capsys, words(folder, tmp_path / "out"))


# Dry run.


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_checks_everything_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--dry-run", "--lora", "2", "--eval-data", str(folder / "chats.jsonl")]
    assert main(words(folder, tmp_path / "out", *more)) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("rows 19", "steps 6", "microbatches 3", "devices cpu, cpu", "steps are exact", "truncated 0"):
        assert line in lines
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    linears = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in n]
    adapter = sum(2 * (m.in_features + m.out_features) for m in linears)
    whole = sum(p.numel() for p in model.parameters()) + adapter
    assert f"parameters {whole:,}, of which {adapter:,} are trained" in lines
    assert lines[-1] == "dry run: all checks passed; nothing was trained"
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_counts_truncated_rows(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(folder, tmp_path / "out", "--dry-run", "--truncate", "--seq-len", "26")) == 0
    lengths = []
    tokenizer = new_tokenizer()
    for line in (folder / "chats.jsonl").read_text().splitlines():
        lengths.append(len(tokenizer.apply_chat_template(json.loads(line)["messages"])["input_ids"]))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"truncated {sum(length > 26 for length in lengths)}" in lines
    assert f"tokens {sum(min(length, 26) for length in lengths):,}" in lines
    assert "longest 26" in lines


# Training.


class At(TrainerCallback):
    """Calls a function at the end of a step, before the trainer decides what to do next."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self._step, self._action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._action()


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], object]], None]:
    """Takes a function that gets every trainer before it trains."""
    real = train_module._new_trainer

    def register(change: Callable[[Any], object]) -> None:
        def new_trainer(*args: Any) -> Any:
            trainer = real(*args)
            change(trainer)
            return trainer

        monkeypatch.setattr(train_module, "_new_trainer", new_trainer)

    return register


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The output of a whole run of 6 steps, saved at steps 2, 4 and 6."""
    assert main(words(folder, folder / "undisturbed", "--save-every", "2")) == 0
    return folder / "undisturbed"


def test_a_run_lowers_the_loss_and_its_model_loads(undisturbed: Path) -> None:
    by_step = losses(undisturbed)
    assert list(by_step) == [1, 2, 3, 4, 5, 6]
    assert by_step[6] < by_step[1]
    final = AutoModelForCausalLM.from_pretrained(undisturbed)
    newest = AutoModelForCausalLM.from_pretrained(undisturbed / "checkpoint-6")
    for (name, weight), other in zip(final.named_parameters(), newest.parameters(), strict=True):
        assert torch.equal(weight, other), name
    tokenizer = AutoTokenizer.from_pretrained(undisturbed)
    assert tokenizer("abc")["input_ids"] == new_tokenizer()("abc")["input_ids"]
    assert tokenizer.chat_template == new_tokenizer().chat_template


def test_the_trainer_gets_the_labels_of_the_data(
    folder: Path, tmp_path: Path, during: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    batches: list[Any] = []

    def look(trainer: Any) -> None:
        batches.extend(trainer.get_train_dataloader())

    during(look)
    assert main(words(folder, tmp_path / "out", "--steps", "1")) == 0
    tokenizer = new_tokenizer()
    seen = set()
    for batch in batches:
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            trained = tokenizer.decode(ids[labels != -100])
            question, answer = tokenizer.decode(ids).replace("<pad>", "").split("<|im_start|>")[1:]
            assert trained == answer.removeprefix("assistant:")
            seen.add(question)
    assert len(seen) == 19


@pytest.mark.parametrize("has_state_on_disk", [False, True])
def test_a_run_goes_on_exactly_after_a_kill_on_other_devices(
    folder: Path,
    tmp_path: Path,
    undisturbed: Path,
    during: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_state_on_disk: bool,
) -> None:
    """With state on disk, too: the undisturbed run has its state in memory."""
    monkeypatch.setattr(StateFolder, "least_bytes", 1 << 10)  # the parameters of the tiny model are small
    state, num_files = tmp_path / "state", []
    more = ["--save-every", "2", *(["--state-folder", str(state)] if has_state_on_disk else [])]

    class Killed(BaseException):
        pass

    def die() -> None:
        num_files.append(Path("/proc/self/maps").read_text().count(f"{state}/"))
        raise Killed

    out = tmp_path / "out"
    during(lambda trainer: trainer.add_callback(At(3, die)))
    with pytest.raises(Killed):
        main(words(folder, out, *more))
    during(lambda trainer: None)
    assert (num_files[0] > 0) is has_state_on_disk
    assert latest(out) == out / "checkpoint-2"
    assert "Add --resume to go on" in refusal(capsys, words(folder, out, *more))
    assert main(words(folder, out, *more, "--resume", devices="cpu*3")) == 0
    assert f"the run goes on from {out / 'checkpoint-2'}" in capsys.readouterr().out
    assert losses(out) == losses(undisturbed)
    for name, weight in AutoModelForCausalLM.from_pretrained(undisturbed).named_parameters():
        assert torch.equal(weight, AutoModelForCausalLM.from_pretrained(out).get_parameter(name)), name


def back_to_step_3(out: Path) -> None:
    """Remove the checkpoint of step 6 and the link to it."""
    shutil.rmtree(out / "checkpoint-6")
    (out / "latest").unlink()


def test_a_run_with_moments_in_8_bits_resumes_exactly_and_into_float32_with_a_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("roundpipe.optim.rules.SMALLEST", 100)  # the parameters of the tiny model are small
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(words(folder, whole, "--save-every", "3", "--moments", "8bit")) == 0
    tensors = json.loads((whole / "checkpoint-6" / "manifest.json").read_text())["tensors"]["optimizer"]
    assert any(name.startswith("state/exp_avg_8bit/") for name in tensors)
    shutil.copytree(whole, out, symlinks=True)
    back_to_step_3(out)
    assert main(words(folder, out, "--save-every", "3", "--moments", "8bit", "--resume", devices="cpu*3")) == 0
    assert losses(out) == losses(whole)
    back_to_step_3(out)
    assert main(words(folder, out, "--save-every", "3", "--moments", "float32", "--resume")) == 0
    assert "converted from 8bit to float32 moments" in caplog.text


def test_a_run_with_masters_of_24_bits_resumes_exactly_and_into_32_bits_with_a_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = ("--save-every", "3", "--master-bits", "24")
    assert "--master-bits 24 needs --dtype bfloat16" in refusal(capsys, words(folder, whole, *options))
    of_adapter = words(folder, whole, *options, "--dtype", "bfloat16", "--lora", "2")
    assert "--master-bits 24 is for bfloat16 weights, and adapters train in float32" in refusal(capsys, of_adapter)
    options += ("--dtype", "bfloat16")
    assert main(words(folder, whole, *options)) == 0
    tensors = json.loads((whole / "checkpoint-6" / "manifest.json").read_text())["tensors"]["optimizer"]
    assert {entry["dtype"] for name, entry in tensors.items() if name.startswith("master.low/")} == {"I8"}
    shutil.copytree(whole, out, symlinks=True)
    back_to_step_3(out)
    assert main(words(folder, out, *options, "--resume", devices="cpu*3")) == 0
    assert losses(out) == losses(whole)
    back_to_step_3(out)
    assert main(words(folder, out, *options, "--resume", "--master-bits", "32")) == 0
    assert "masters were converted from 24 to 32 bits" in caplog.text


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_step_and_says_how_to_resume(
    folder: Path,
    tmp_path: Path,
    undisturbed: Path,
    during: Any,
    capsys: pytest.CaptureFixture[str],
    signum: int,
    code: int,
) -> None:
    out = tmp_path / "out"

    def strike(trainer: Any) -> None:
        real = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == 2:
                os.kill(os.getpid(), signum)
            return real(*args, **kwargs)

        trainer.training_step = training_step

    before = signal.getsignal(signum)
    during(strike)
    assert main(words(folder, out, "--save-every", "2")) == code
    assert signal.getsignal(signum) is before
    during(lambda trainer: None)
    assert latest(out) == out / "checkpoint-3"
    said = capsys.readouterr().out
    command = f"roundpipe train --config {out / 'train.yaml'} --resume"
    assert f"stopped by {signal.Signals(signum).name} after step 3" in said
    assert f"the newest checkpoint is {out / 'checkpoint-3'}; to resume: {command}" in said
    assert main(command.split()[1:]) == 0
    assert losses(out) == losses(undisturbed)


def test_a_second_interrupt_stops_at_once(
    folder: Path, tmp_path: Path, during: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def strike_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second signal did not interrupt")

    during(lambda trainer: trainer.add_callback(At(3, strike_twice)))
    assert main(words(folder, tmp_path / "out", "--save-every", "2")) == 130
    message = capsys.readouterr().err
    assert "stopped at once by Ctrl-C" in message
    assert "checkpoint-2; to resume: roundpipe train" in message
    assert "Traceback" not in message


def test_lora_trains_the_adapter_alone_and_peft_loads_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(words(folder, out, "--lora", "2", "--steps", "3")) == 0
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    untouched = {name: weight.clone() for name, weight in base.named_parameters()}
    adapted = PeftModel.from_pretrained(base, out)
    adapters = {name: weight for name, weight in adapted.named_parameters() if "lora_B" in name}
    assert len(adapters) == 2 * 7  # two blocks of seven linear layers
    assert all(bool(weight.any()) for weight in adapters.values())
    for name, weight in adapted.get_base_model().named_parameters():
        if "lora" not in name:
            assert torch.equal(weight, untouched[name.replace(".base_layer", "")]), name


def test_an_adapter_is_no_model_until_it_is_merged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the command that merges it, and the result is a model."""
    out = tmp_path / "out"
    assert main(words(folder, out, "--lora", "2", "--steps", "1")) == 0
    message = refusal(capsys, words(folder, tmp_path / "next", "--model", str(out)))
    assert f"--model: {out} is an adapter of PEFT for {folder / 'model'}, not a model." in message
    _, *command = shlex.split(message[message.index("roundpipe merge") :])
    monkeypatch.chdir(tmp_path)
    assert main(command) == 0
    assert main(words(folder, tmp_path / "next", "--model", str(tmp_path / "MERGED"), "--dry-run")) == 0


def test_init_makes_the_same_random_weights_for_the_same_seed(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "bare", weights=False)
    for out in ("one", "two", "three"):
        seed = "7" if out == "three" else "6"
        more = ["--model", str(tmp_path / "bare"), "--init", "--steps", "1", "--seed", seed]
        assert main(words(folder, tmp_path / out, *more)) == 0
    one, two, three = (losses(tmp_path / out)[1] for out in ("one", "two", "three"))
    assert one == two != three


def test_evaluation_runs_at_its_steps(folder: Path, tmp_path: Path) -> None:
    more = ["--eval-data", str(folder / "chats.jsonl"), "--eval-every", "3"]
    assert main(words(folder, tmp_path / "out", *more)) == 0
    history = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    evaluations = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    assert list(evaluations) == [3, 6]


def test_packing_splits_long_rows(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("abc " * 60)
    more = ["--data", str(text), "--text-rows", "document", "--packing", "--seq-len", "32", "--steps", "2"]
    assert main(words(folder, tmp_path / "out", *more)) == 0
    assert list(losses(tmp_path / "out")) == [1, 2]


@pytest.mark.parametrize("more", [[], ["--packing", "--seq-len", "8"]], ids=["rows", "packed"])
def test_labels_of_tokens_train_as_in_trl(folder: Path, tmp_path: Path, more: list[str]) -> None:
    """Labels other than the tokens, and without loss for some of them."""
    rng = random.Random(5)
    rows = []
    for length in (5, 9, 7, 3, 8, 6):
        labels = [rng.randrange(4, 264) if rng.random() < 0.6 else -100 for _ in range(length - 1)] + [9]
        rows.append({"input_ids": [rng.randrange(4, 264) for _ in range(length)], "labels": labels})
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_model(tmp_path / "model")  # without dropout, which plain training draws differently
    given = ["--model", str(model), "--data", str(tmp_path / "tokens.jsonl"), "--steps", "3", *more]
    assert main(words(folder, tmp_path / "out", *given)) == 0
    config = SFTConfig(
        output_dir=str(tmp_path / "plain"), use_cpu=True, bf16=False, report_to="none", max_steps=3, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=0.03, per_device_train_batch_size=4, logging_steps=1, seed=42,
        packing=bool(more), packing_strategy="wrapped", max_length=8 if more else 64, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(str(model), config, train_dataset=Dataset.from_list(rows), processing_class=new_tokenizer())
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert list(losses(tmp_path / "out").values()) == pytest.approx(expected, rel=1e-6)


def test_a_run_on_several_files_goes_on_exactly(
    folder: Path, tmp_path: Path, undisturbed: Path, during: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its losses are those of one file with all rows; a resumed run notices other rows in any of the files."""
    lines = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:7]))
    (tmp_path / "b.jsonl").write_text("".join(lines[7:]))
    data = ["--data", str(tmp_path / "a.jsonl"), "--data", str(tmp_path / "b.jsonl"), "--save-every", "2"]
    out = tmp_path / "out"
    during(lambda trainer: trainer.add_callback(At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))))
    assert main(words(folder, out, *data)) == 143
    during(lambda trainer: None)
    assert main(["train", "--config", str(out / "train.yaml"), "--resume"]) == 0
    assert losses(out) == losses(undisturbed)
    assert "other rows than before" not in caplog.text
    assert "other options than before" not in caplog.text
    (tmp_path / "b.jsonl").write_text("".join(lines[8:]))
    assert main(["train", "--config", str(out / "train.yaml"), "--resume"]) == 0
    assert "--data has other rows than before" in caplog.text


def test_a_token_of_the_hub_is_in_no_file_of_the_run(folder: Path, tmp_path: Path) -> None:
    assert main(words(folder, tmp_path / "out", "--steps", "1", "--hub-token", "hf_secret")) == 0
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert [file for file in files if b"hf_secret" in file.read_bytes()] == []


def test_microbatches_double_until_a_step_fits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gives the losses of a run with this number of microbatches from the start; a resumed run uses it at once."""
    real, tried = RoundPipe.forward_backward, []

    def forward_backward(self: RoundPipe, *args: Any, **kwargs: Any) -> Any:
        tried.append(self.model_run_config.num_microbatch)
        if tried[-1] is not None and tried[-1] < 4:
            torch.rand(1)  # the failed call has drawn a seed
            raise torch.OutOfMemoryError("device memory is full")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(RoundPipe, "forward_backward", forward_backward)
    out = tmp_path / "out"
    assert main(words(folder, out, devices="cpu")) == 0  # two microbatches at first
    assert tried == [2, 4, 4, 4, 4, 4, 4]
    assert "trying 4 microbatches, not 2" in caplog.text
    assert main(words(folder, tmp_path / "direct", "--num-microbatch", "4", devices="cpu")) == 0
    assert losses(out) == losses(tmp_path / "direct")
    tried.clear()
    assert main(words(folder, out, "--resume", "--steps", "8", devices="cpu")) == 0
    assert tried == [4, 4]


def test_a_step_that_cannot_fit_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forward_backward(self: RoundPipe, *args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("device memory is full")

    monkeypatch.setattr(RoundPipe, "forward_backward", forward_backward)
    message = refusal(capsys, words(folder, tmp_path / "out"))
    assert "a step with 4 microbatches of 1 sequences does not fit into device memory" in message
    message = refusal(capsys, words(folder, tmp_path / "out", "--num-microbatch", "2"))
    assert "a step with 2 microbatches of 2 sequences" in message


def test_a_loss_that_is_not_finite_stops_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(folder / "model", tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(broken)
    assert main(words(folder, tmp_path / "out", "--model", str(broken))) == 1
    message = capsys.readouterr().err
    assert "step 1" in message
    assert "To leave such steps out, use --nonfinite skip." in message
    assert f"{tmp_path / 'out'} has no checkpoint to resume from; the same command starts the run" in message
    assert "Traceback" not in message


def test_a_gradient_that_is_not_finite_is_named_with_its_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def clip(*args: Any, **kwargs: Any) -> None:
        raise NonFiniteError("the gradient of a.weight is not finite")

    monkeypatch.setattr(trainer_module, "clip_grad_norm_", clip)
    assert main(words(folder, tmp_path / "out")) == 1
    message = capsys.readouterr().err
    assert "the gradient of a.weight is not finite" in message
    assert "in step 1; no weight was changed. To leave such steps out, use --nonfinite skip." in message


def test_other_errors_keep_their_traceback(folder: Path, tmp_path: Path, during: Any) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    during(lambda trainer: trainer.add_callback(At(1, fail)))
    with pytest.raises(RuntimeError, match="a bug"):
        main(words(folder, tmp_path / "out"))


def test_a_resumed_run_with_other_options_is_warned_of(
    folder: Path, tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out", symlinks=True)
    assert main(words(folder, out, "--save-every", "2", "--resume", "--steps", "7", "--lr", "1e-3")) == 0
    assert "other options than before (lr: 0.01 -> 0.001; steps: 6 -> 7)" in caplog.text
    assert "--lr has no effect" in caplog.text
    assert "--data has other rows" not in caplog.text


def test_a_resumed_run_with_other_data_is_warned_of(
    folder: Path, tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out", symlinks=True)
    changed = tmp_path / "chats.jsonl"
    changed.write_text((folder / "chats.jsonl").read_text().replace("18+1", "18+2"))
    assert main(words(folder, out, "--data", str(changed), "--save-every", "2", "--resume")) == 0
    assert "--data has other rows than before" in caplog.text


def test_a_resumed_run_of_an_earlier_version_cannot_tell_whether_its_data_is_the_same(
    folder: Path, tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksum had no prefix and did not show where rows begin. After the resumed run it does."""
    out = shutil.copytree(undisturbed, tmp_path / "out", symlinks=True)
    (out / ".data.sha256").write_text("d" * 64 + "\n")
    more = ["--save-every", "2", "--resume", "--steps", "7"]
    assert main(words(folder, out, *more)) == 0
    assert "cannot tell whether --data is the same as before" in caplog.text
    caplog.clear()
    assert main(words(folder, out, *more)) == 0
    assert "--data" not in caplog.text


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "train.yaml", ".data.sha256"])
def test_a_resumed_run_survives_damaged_files_beside_its_checkpoint(
    folder: Path, tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It says which file is damaged. The metrics keep the rows that can be read."""
    for number, damage in enumerate((b"\xff\x00", b'[1, {"settings": 3}]\n')):
        out = shutil.copytree(undisturbed, tmp_path / f"out{number}", symlinks=True)
        content = (out / name).read_bytes()
        (out / name).write_bytes(content + damage + b"\n" if name == "metrics.jsonl" else damage)
        caplog.clear()
        assert main(words(folder, out, "--save-every", "2", "--resume", "--steps", "7")) == 0
        assert str(out / name) in caplog.text
        steps = [row["step"] for row in read_metrics(out / "metrics.jsonl") if row["type"] == "train"]
        assert steps == [1, 2, 3, 4, 5, 6, 7]
        assert (out / "run.json").exists()
        if name in ("run.json", "metrics.jsonl"):
            kept = (out / f"{name}.damaged").read_bytes()
            assert kept == (content + damage + b"\n" if name == "metrics.jsonl" else damage)


def test_a_mistake_in_a_resumed_run_leaves_the_options_of_the_run(
    folder: Path, tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "out", symlinks=True)
    before = (out / "train.yaml").read_bytes()
    assert "adapter" in refusal(capsys, words(folder, out, "--lora", "2", "--resume", "--steps", "7"))
    assert (out / "train.yaml").read_bytes() == before


def test_resuming_a_complete_run_trains_nothing(
    folder: Path, tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the middle of an epoch, of which six steps of five batches leave four."""
    out = shutil.copytree(undisturbed, tmp_path / "out", symlinks=True)
    (out / "model.safetensors").unlink()
    assert main(words(folder, out, "--save-every", "2", "--resume")) == 0
    assert "the run was complete at step 6 already; nothing was trained" in capsys.readouterr().out
    assert latest(out) == out / "checkpoint-6"
    assert losses(out) == losses(undisturbed)
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


# Failures of the output.


def test_a_checkpoint_that_cannot_be_written_fails_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer_module.save

    def save(target: Path, *args: Any, **kwargs: Any) -> Any:
        if target.name == "checkpoint-4":
            raise CheckpointError("the disk is full")
        return real(target, *args, **kwargs)

    monkeypatch.setattr(trainer_module, "save", save)
    assert main(words(folder, tmp_path / "out", "--save-every", "2")) == 1
    message = capsys.readouterr().err
    assert "roundpipe: the disk is full\nthe newest checkpoint is" in message
    assert "checkpoint-2; to resume: roundpipe train" in message


def test_metrics_that_cannot_be_written_do_not_fail_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = MetricsWriter.write

    def write(self: MetricsWriter, row: Any) -> None:
        if row["step"] in (3, 4):
            raise OSError(errno.ENOSPC, "no space")
        real(self, row)

    monkeypatch.setattr(MetricsWriter, "write", write)
    assert main(words(folder, tmp_path / "out")) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 5, 6]
    assert caplog.text.count("metrics.jsonl misses rows from step 3 on") == 1


@pytest.mark.slow
def test_a_closed_pipe_does_not_fail_the_run(folder: Path, tmp_path: Path) -> None:
    """As with `roundpipe train ... | head -n 1`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    arguments = words(folder, tmp_path / "out")
    arguments.remove("--no-view")
    command = [sys.executable, "-m", "roundpipe", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert list(losses(tmp_path / "out")) == [1, 2, 3, 4, 5, 6]


def test_a_terminal_without_the_signs_of_a_name_shows_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(words(folder, tmp_path / "mödel", "--steps", "1")) == 0
    assert b"the final model is in" in written.getvalue()
    assert b"m?del" in written.getvalue()
