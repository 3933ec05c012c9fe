"""Checkpoints of the trainers: resumed runs equal whole runs bit for bit, and what is written, kept and refused."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
)

from helpers_tiny_hf import preference_rows, tiny_model, tiny_tokenizer
from helpers_trainers import LORA, arguments, close, logged, lora_model, new_model, options, settings, token_rows
from roundpipe import CheckpointError
from roundpipe.checkpoint import latest
from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.integrations import RoundPipeOptions, RoundPipeTrainer
from roundpipe.optim.states import StateFolder
from roundpipe.report import read_metrics

STEPS, STOP_AT = 7, 4  # saved after every third step, so one step is lost
SAVES: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "warmup_steps": 2}


class Crash(Exception):
    """Ends a run."""


class CrashAfter(TrainerCallback):
    """Raises after a step, before Trainer logs or saves it."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Crash


def dropping_model(is_lora: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A model with dropout in its attention."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model(attention_dropout=0.2).to(dtype)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**{**LORA, "lora_dropout": 0.1})) if is_lora else model


def new_trainer(
    folder: Path,
    model: Any,
    num_devices: int = 2,
    is_async: bool = False,
    of_roundpipe: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    return RoundPipeTrainer(
        model=model,
        args=arguments(folder, **{**SAVES, **changes}),
        train_dataset=token_rows(),
        roundpipe=options(num_devices, num_microbatch=None, is_async=is_async, **(of_roundpipe or {})),
    )


Results = tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[float]]


def trained(trainer: Any, resume: Any = None) -> Results:
    """Train; returns what was logged, the weights, and the losses of all steps."""
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    close(trainer)
    rows = read_metrics(Path(trainer.args.output_dir, "metrics.jsonl"))
    return logged(trainer), weights, [row["loss"] for row in rows]


def crash(trainer: Any, step: int = STOP_AT) -> None:
    trainer.add_callback(CrashAfter(step))
    with pytest.raises(Crash):
        trainer.train()
    close(trainer)


def assert_same(found: Results, whole: Results) -> None:
    assert found[0] == whole[0]
    assert found[2] == whole[2]
    assert found[1].keys() == whole[1].keys()
    for name, value in whole[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize(
    ("is_lora", "is_async"),
    [
        (True, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(False, True), (False, False), (True, True)]),
    ],
)
def test_resumed_run_is_the_whole_run_on_other_devices(is_lora: bool, is_async: bool, tmp_path: Path) -> None:
    whole = trained(new_trainer(tmp_path / "whole", dropping_model(is_lora), 2, is_async))
    crash(new_trainer(tmp_path / "torn", dropping_model(is_lora), 2, is_async))
    # By default 3 devices make 4 microbatches; the resumed run takes the 3 of the checkpoint.
    resumed = new_trainer(tmp_path / "torn", dropping_model(is_lora), 3, is_async)
    assert_same(trained(resumed, resume=True), whole)
    assert len(whole[2]) == STEPS


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_resumed_run_of_bfloat16_weights_with_float32_masters(is_async: bool, tmp_path: Path) -> None:
    whole = trained(new_trainer(tmp_path / "whole", dropping_model(False, torch.bfloat16), 2, is_async))
    crash(new_trainer(tmp_path / "torn", dropping_model(False, torch.bfloat16), 2, is_async))
    resumed = new_trainer(tmp_path / "torn", dropping_model(False, torch.bfloat16), 1, is_async)
    assert_same(trained(resumed, resume=str(tmp_path / "torn" / "checkpoint-3")), whole)


def test_state_on_disk_has_the_bits_of_state_in_memory_resumed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateFolder, "least_bytes", 1 << 10)  # the parameters of the tiny model are small
    state = {"state_folder": tmp_path / "state"}
    whole = trained(new_trainer(tmp_path / "whole", dropping_model(False), 2, True))
    torn = new_trainer(tmp_path / "torn", dropping_model(False), 2, True, of_roundpipe=state)
    crash(torn)
    assert f"{tmp_path / 'state'}/" in Path("/proc/self/maps").read_text()
    assert_same(
        trained(new_trainer(tmp_path / "torn", dropping_model(False), 3, True, of_roundpipe=state), True), whole
    )
    assert not list((tmp_path / "state").iterdir())


def test_a_state_folder_that_is_no_name_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="state_folder must be the name of a folder, or None, got int"):
        RoundPipeOptions(state_folder=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="state_folder must be the name of a folder, got ''"):
        RoundPipeOptions(state_folder="")


@pytest.mark.slow
def test_means_of_several_steps_are_logged_as_in_the_whole_run(tmp_path: Path) -> None:
    """The checkpoint lies between two logged steps."""
    whole = trained(new_trainer(tmp_path / "whole", new_model(False), logging_steps=2))
    crash(new_trainer(tmp_path / "torn", new_model(False), logging_steps=2))
    assert_same(trained(new_trainer(tmp_path / "torn", new_model(False), logging_steps=2), resume=True), whole)
    assert [entry["step"] for entry in whole[0]] == [2, 4, 6]


def test_a_complete_run_is_not_trained_further(tmp_path: Path) -> None:
    """In the middle of an epoch, plain Trainer trains one more step."""
    trainer = new_trainer(tmp_path, new_model(False))
    expected = trained(trainer)
    again = new_trainer(tmp_path, new_model(False))
    found = trained(again, str(tmp_path / f"checkpoint-{STEPS}"))
    assert again.state.global_step == STEPS
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


def test_number_of_microbatches_that_the_user_has_set_stays(tmp_path: Path) -> None:
    crash(new_trainer(tmp_path, new_model(False)))
    trainer = RoundPipeTrainer(
        model=new_model(False),
        args=arguments(tmp_path, **SAVES),
        train_dataset=token_rows(),
        roundpipe=options(2, num_microbatch=2),
    )
    trained(trainer, resume=True)
    assert trainer.model.model_run_config.num_microbatch == 2


def trl_trainer(kind: str, folder: Path, num_devices: int) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, GRPOConfig, GRPOTrainer, SFTConfig

    from roundpipe.integrations import RoundPipeDPOTrainer, RoundPipeMixin, RoundPipeSFTTrainer

    given = settings(folder, **{**SAVES, "max_steps": 4, "save_steps": 2})
    common = {"processing_class": tiny_tokenizer(), "roundpipe": options(num_devices, num_microbatch=None)}
    if kind == "grpo that adapts its entropy":
        ours = type("RoundPipeGRPOTrainer", (RoundPipeMixin, GRPOTrainer), {})
        adapts = {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.1}
        args = GRPOConfig(**given, **adapts, num_generations=2, max_completion_length=5)
        data = Dataset.from_list([{"prompt": row["prompt"]} for row in preference_rows(18)])
        return ours(tiny_model(), reward_funcs=[number_of_words], args=args, train_dataset=data, **common)
    given["max_length"] = 24
    if kind == "sft":
        from helpers_tiny_hf import chat_rows

        data = Dataset.from_list(chat_rows(18))
        return RoundPipeSFTTrainer(dropping_model(False), SFTConfig(**given), train_dataset=data, **common)
    data = Dataset.from_list(preference_rows(18))
    if kind == "dpo with a reference model":
        return RoundPipeDPOTrainer(
            tiny_model(), ref_model=tiny_model(seed=3), args=DPOConfig(**given), train_dataset=data, **common
        )
    adapter = LoraConfig(**LORA)
    return RoundPipeDPOTrainer(tiny_model(), args=DPOConfig(**given), train_dataset=data, peft_config=adapter, **common)


def number_of_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


@pytest.mark.parametrize(
    "kind",
    [
        "dpo with an adapter",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("sft", "dpo with a reference model", "grpo that adapts its entropy")
        ),
    ],
)
def test_trainers_of_trl_resume_exactly(kind: str, tmp_path: Path) -> None:
    def without_total(results: Results) -> Results:
        left_out = ("num_tokens", "step_time")  # TRL counts tokens from the start of the process
        return [{k: v for k, v in entry.items() if k not in left_out} for entry in results[0]], *results[1:]

    whole = trained(trl_trainer(kind, tmp_path / "whole", 1))
    crash(trl_trainer(kind, tmp_path / "torn", 1), step=3)
    resumed = trained(trl_trainer(kind, tmp_path / "torn", 2), resume=True)
    assert_same(without_total(resumed), without_total(whole))


# What is written.


def test_folder_loads_with_from_pretrained_and_has_no_pickle(tmp_path: Path) -> None:
    trainer = RoundPipeTrainer(
        model=new_model(False),
        args=arguments(tmp_path, **SAVES),
        train_dataset=token_rows(),
        processing_class=tiny_tokenizer(),
        roundpipe=options(2),
    )
    trainer.train()
    trainer.save_model()
    newest = latest(tmp_path)
    assert newest == tmp_path / f"checkpoint-{STEPS}"
    expected = trainer.model.state_dict()
    for folder in (newest, tmp_path):
        assert AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"] == tiny_tokenizer()("w1 w2")["input_ids"]
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    close(trainer)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in written} <= {".json", ".jsonl", ".safetensors", ".html", ".png", ".jinja"}
    assert json.loads((newest / "training_args.json").read_text())["learning_rate"] == 1e-2


def test_adapter_loads_with_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = new_trainer(tmp_path, lora_model())
    trainer.train()
    loaded = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "checkpoint-6"))
    tuned = PeftModel.from_pretrained(tiny_model(), str(tmp_path / f"checkpoint-{STEPS}"))
    expected = trainer.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in tuned.state_dict().items())
    assert any(not torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    close(trainer)


def evaluated(folder: Path, losses: list[float], trainer_class: Any, **changes: Any) -> Any:
    """A trainer that evaluates and saves after each step; its evaluations return given losses."""

    class Evaluated(trainer_class):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            metrics = {"eval_loss": losses[self.state.global_step - 1]}
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    given = {"max_steps": len(losses), "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **changes}
    more = {"roundpipe": options(2)} if trainer_class is RoundPipeTrainer else {}
    return Evaluated(
        model=new_model(False),
        args=arguments(folder, **{**SAVES, "load_best_model_at_end": True, **given}),
        train_dataset=token_rows(),
        eval_dataset=token_rows(4),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        **more,
    )


@pytest.mark.parametrize("limit", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3, None))])
def test_best_model_is_kept_and_loaded_as_by_plain_trainer(limit: int | None, tmp_path: Path) -> None:
    """Evaluations get better twice, then worse, so that early stopping ends the run."""
    losses = [3.0, 2.0, 2.5, 2.6, 1.0]
    trainers = [
        evaluated(tmp_path / c.__name__, losses, c, save_total_limit=limit) for c in (Trainer, RoundPipeTrainer)
    ]
    for trainer in trainers:
        trainer.train()
    plain, ours = trainers
    assert ours.state.global_step == plain.state.global_step == 4
    assert Path(ours.state.best_model_checkpoint).name == Path(plain.state.best_model_checkpoint).name == "checkpoint-2"
    kept = [sorted(p.name for p in Path(t.args.output_dir).glob("checkpoint-*")) for t in trainers]
    assert kept[0] == kept[1]
    best = AutoModelForCausalLM.from_pretrained(ours.state.best_model_checkpoint).state_dict()
    assert all(torch.equal(value, best[name]) for name, value in ours.model.state_dict().items())
    close(ours)


def test_state_of_callbacks_is_saved_as_by_plain_trainer(tmp_path: Path) -> None:
    states = []
    for trainer_class in (Trainer, RoundPipeTrainer):
        trainer = evaluated(tmp_path / trainer_class.__name__, [3.0, 2.0, 2.5], trainer_class)
        trainer.train()
        close(trainer)
        newest = Path(trainer.args.output_dir, "checkpoint-3", "trainer_state.json")
        states.append(json.loads(newest.read_text()))
    assert states[0]["stateful_callbacks"] == states[1]["stateful_callbacks"]
    assert states[1]["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"] == {
        "early_stopping_patience_counter": 1
    }
    assert states[0].keys() == states[1].keys()


@pytest.mark.slow
def test_only_the_model_is_saved_if_asked(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, new_model(False), save_only_model=True)
    trainer.train()
    close(trainer)
    assert not list((tmp_path / "checkpoint-3").glob("optimizer*"))
    again = new_trainer(tmp_path, new_model(False), save_only_model=True)
    with pytest.raises(CheckpointError, match="has no optimizer"):
        again.train(resume_from_checkpoint=True)
    close(again)


# What is refused.


def alter_state(folder: Path) -> None:
    path = folder / "trainer_state.json"
    path.write_text(path.read_text().replace('"global_step": 3', '"global_step": 4', 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (alter_state, "trainer_state.json of the checkpoint is damaged"),
        pytest.param(
            lambda folder: (folder / "manifest.json").unlink(), "not a complete checkpoint", marks=pytest.mark.slow
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b""),
            "model.safetensors of the checkpoint is damaged",
        ),
    ],
)
def test_damaged_checkpoint_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    crash(new_trainer(tmp_path, new_model(False)))
    damage(tmp_path / "checkpoint-3")
    trainer = new_trainer(tmp_path, new_model(False))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint=True)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    close(trainer)


def test_checkpoint_of_plain_trainer_is_refused_with_advice(tmp_path: Path) -> None:
    Trainer(model=new_model(False), args=arguments(tmp_path, **SAVES), train_dataset=token_rows()).train()
    trainer = new_trainer(tmp_path, new_model(False))
    with pytest.raises(CheckpointError) as caught:
        trainer.train(resume_from_checkpoint=True)
    assert "from_pretrained()" in caught.value.__notes__[0]
    close(trainer)


class Fails(TrainerCallback):
    """Fails the test when training begins."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("training has begun")


@pytest.mark.parametrize("name", ["latest", "checkpoint-6"])
def test_an_output_folder_that_cannot_take_checkpoints_is_refused_before_training(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "optimizer.pt").write_text("of transformers' own Trainer")
    trainer = new_trainer(tmp_path, new_model(False))
    trainer.add_callback(Fails())
    with pytest.raises(CheckpointError, match=f"{tmp_path}/{name} "):
        trainer.train()
    assert os.listdir(tmp_path / name) == ["optimizer.pt"]
    close(trainer)


def test_other_folders_do_not_hinder_a_trainer(tmp_path: Path) -> None:
    """Only names that this run can still give count, and none if it never saves."""
    (tmp_path / f"checkpoint-{STEPS + 1}").mkdir()
    (tmp_path / f"checkpoint-{STEPS + 1}" / "optimizer.pt").touch()
    trained(new_trainer(tmp_path, new_model(False)))
    assert latest(tmp_path) == tmp_path / f"checkpoint-{STEPS}"
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "optimizer.pt").touch()
    trained(new_trainer(tmp_path, new_model(False)), resume=str(tmp_path / "checkpoint-3"))
    trained(new_trainer(tmp_path, new_model(False), save_strategy="no"))


def test_failure_of_the_last_save_is_raised_by_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer(tmp_path, new_model(False))

    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == STEPS:
                trainer.model.synchronize()  # the checkpoint before is complete
                monkeypatch.setattr(os, "fsync", fsync)

    trainer.add_callback(Full())
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.train()
    monkeypatch.undo()
    assert latest(tmp_path) == tmp_path / "checkpoint-6"
    close(trainer)
