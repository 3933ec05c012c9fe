"""Samples of a trainer: they change no bit of the training, are what generate() gives, and are kept and shown."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from helpers_tiny_hf import WORDS, tiny_model, tiny_tokenizer
from helpers_trainers import LORA, arguments, close, lora_model, options, token_rows
from roundpipe import ConfigError
from roundpipe.integrations import RoundPipeOptions, RoundPipeTrainer
from roundpipe.integrations.samples import SamplesCallback
from roundpipe.report import read_metrics
from roundpipe.report.samples import SAMPLES_FILE

STEPS = 6
PROMPTS = [" ".join(WORDS[:3]), [{"role": "user", "content": WORDS[1]}], WORDS[4]]


class Moments(TrainerCallback):
    """Keeps the state of the random generator and all modes at the beginning of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, list[bool]]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        modes = [module.training for module in kwargs["model"].modules()]
        self.seen.append((torch.get_rng_state().numpy().tobytes(), modes))


def dropping_model(is_lora: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(attention_dropout=0.2)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**{**LORA, "lora_dropout": 0.1})) if is_lora else model


def new_trainer(
    folder: Path,
    *,
    samples: Any = PROMPTS,
    num_devices: int = 1,
    is_async: bool = False,
    is_lora: bool = False,
    **changes: Any,
) -> Any:
    saves = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1}
    trainer = RoundPipeTrainer(
        model=dropping_model(is_lora),
        args=arguments(folder, **{**saves, **changes}),
        train_dataset=token_rows(),
        eval_dataset=token_rows(4),
        processing_class=tiny_tokenizer(),
        roundpipe=options(num_devices, is_async=is_async, samples=samples, sample_tokens=5),
    )
    trainer.moments = Moments()
    trainer.add_callback(trainer.moments)
    return trainer


def outcome(trainer: Any, **train: Any) -> tuple[Any, ...]:
    """Losses, norms, weights, moments and what the training saw before each step."""
    trainer.train(**train)
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    state = trainer.optimizer.optimizer.state_dict()["state"]
    values = [value.clone() for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    close(trainer)
    rows = [row for row in read_metrics(Path(trainer.args.output_dir, "metrics.jsonl")) if row["type"] == "train"]
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows], weights, values, trainer.moments.seen


def assert_same_bits(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[:2] == expected[:2]
    for name, value in expected[2].items():
        assert torch.equal(found[2][name], value), name
    assert len(found[3]) == len(expected[3]) > 0
    assert all(torch.equal(one, other) for one, other in zip(found[3], expected[3], strict=True))


def samples_of(folder: Path) -> list[tuple[int, int, str, int, bool]]:
    rows = [json.loads(line) for line in (folder / SAMPLES_FILE).read_text().splitlines()]
    return [tuple(row[name] for name in ("step", "number", "answer", "tokens", "is_complete")) for row in rows]


@pytest.mark.parametrize(
    ("evaluates", "num_devices", "is_async"),
    [
        pytest.param(*each, marks=[] if each in {(True, 1, False), (False, 3, True)} else pytest.mark.slow)
        for each in itertools.product([True, False], [1, 3], [False, True])
    ],
)
def test_samples_change_no_bit_of_the_training(
    evaluates: bool, num_devices: int, is_async: bool, tmp_path: Path
) -> None:
    when = {"eval_strategy": "steps", "eval_steps": 3} if evaluates else {}
    given = {"num_devices": num_devices, "is_async": is_async, "is_lora": is_async, **when}
    plain = outcome(new_trainer(tmp_path / "plain", samples=(), **given))
    found = outcome(new_trainer(tmp_path / "samples", **given))
    assert_same_bits(found, plain)
    assert found[4] == plain[4]
    assert len(set(plain[0])) == STEPS
    assert not (tmp_path / "plain" / SAMPLES_FILE).exists()
    samples = samples_of(tmp_path / "samples")
    assert [each[:2] for each in samples] == [(s, n) for s in ((3, 6) if evaluates else (2, 4, 6)) for n in (1, 2, 3)]
    assert any(each[3] > 0 for each in samples)


class Crash(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_killed_and_resumed_run_has_the_samples_of_a_whole_one(tmp_path: Path) -> None:
    when = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 3}
    plain = outcome(new_trainer(tmp_path / "plain", samples=(), **when))
    whole = outcome(new_trainer(tmp_path / "whole", **when))
    torn = new_trainer(tmp_path / "torn", **when)
    torn.add_callback(Crash())
    with pytest.raises(KeyboardInterrupt):
        torn.train()
    torn.run_view.close()
    close(torn)
    assert samples_of(tmp_path / "torn")[-1][0] == 5  # answers of steps that are taken again
    resumed = outcome(new_trainer(tmp_path / "torn", num_devices=3, **when), resume_from_checkpoint=True)
    assert_same_bits(resumed, plain)
    assert_same_bits(whole, plain)
    assert samples_of(tmp_path / "torn") == samples_of(tmp_path / "whole")


def test_samples_are_the_greedy_answers_of_the_plain_model(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, max_steps=2, save_strategy="no", learning_rate=0.1)
    trainer.train()
    model, tokenizer = tiny_model(attention_dropout=0.2), tiny_tokenizer()
    model.load_state_dict(trainer.model.state_dict())
    close(trainer)
    model.eval()
    expected = []
    for prompt in PROMPTS:
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**inputs, do_sample=False, max_new_tokens=5, eos_token_id=tokenizer.eos_token_id)
        expected.append(tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert [each[2] for each in samples_of(tmp_path)] == expected
    assert {each[0] for each in samples_of(tmp_path)} == {2}  # at the end


def test_evaluations_outside_of_a_run_and_complete_runs_add_no_samples(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, max_steps=2)
    trainer.train()
    before = samples_of(tmp_path)
    trainer.evaluate()
    close(trainer)
    again = new_trainer(tmp_path, max_steps=2)
    again.evaluate()
    again.train(resume_from_checkpoint=True)
    close(again)
    assert samples_of(tmp_path) == before
    assert [each[0] for each in before] == [2, 2, 2]


def test_samples_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = new_trainer(tmp_path, max_steps=2, save_strategy="no")
    trainer.run_view._show = True
    trainer.train()
    close(trainer)
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("step 2  3 samples in "))
    assert [line.partition(" -> ")[0] for line in lines[at + 1 : at + 4]] == [
        f"  {WORDS[0]} {WORDS[1]} {WORDS[2]}",
        f"  {WORDS[1]}",
        f"  {WORDS[4]}",
    ]


def test_a_failure_ends_the_samples_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise RuntimeError("no kernel for this")

    plain = outcome(new_trainer(tmp_path / "plain", samples=()))
    monkeypatch.setattr(SamplesCallback, "_answers", fail)
    found = outcome(new_trainer(tmp_path / "failing"))
    assert_same_bits(found, plain)
    assert found[4] == plain[4]
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == [
        "the samples of step 2 failed: RuntimeError: no kernel for this. Training goes on without samples."
    ]


def test_a_stop_cuts_no_answer(tmp_path: Path) -> None:
    """A signal while an answer is generated ends it, and it is not kept."""
    trainer = new_trainer(tmp_path, max_steps=2, save_steps=1)
    answers = SamplesCallback._answers

    def stopping(self: Any, model: Any, *args: Any) -> Any:
        model.request_stop()
        found = answers(self, model, *args)
        assert all(row["tokens"] == 1 for row in found)
        return found

    callback = next(each for each in trainer.callback_handler.callbacks if isinstance(each, SamplesCallback))
    callback._answers = stopping.__get__(callback)
    trainer.train()
    close(trainer)
    assert samples_of(tmp_path) == []


def test_a_model_that_cannot_answer_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    plain = tiny_model()
    plain.config.num_labels = 2
    model = AutoModelForSequenceClassification.from_config(plain.config)
    with pytest.raises(ConfigError, match=r"samples need a causal .* got Qwen3ForSequenceClass"):
        RoundPipeTrainer(
            model, arguments(tmp_path), processing_class=tiny_tokenizer(), roundpipe=options(samples=["a"])
        )


@pytest.mark.parametrize(
    ("samples", "tokenizer", "part"),
    [
        (["a"], False, "samples need a tokenizer; give the trainer processing_class=tokenizer"),
        ([[{"role": "user", "content": "a"}]], "plain", "has messages, but the tokenizer has no chat template"),
        ([" ".join([WORDS[0]] * 1000)], True, "has 1000 tokens; it needs at least 1 and fewer than"),
        ([""], True, "has 0 tokens"),
    ],
)
def test_mistakes(samples: Any, tokenizer: Any, part: str, tmp_path: Path) -> None:
    given = tiny_tokenizer() if tokenizer else None
    if tokenizer == "plain":
        given.chat_template = None
    with pytest.raises(ConfigError, match=part):
        RoundPipeTrainer(lora_model(), arguments(tmp_path), processing_class=given, roundpipe=options(samples=samples))


@pytest.mark.parametrize("given", [{"samples": "one prompt"}, {"sample_tokens": 0}])
def test_wrong_options(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sample"):
        RoundPipeOptions(**given)
