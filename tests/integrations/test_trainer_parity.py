"""RoundPipe's trainers take the steps of the plain trainers: losses, gradient norms, learning rates and weights.

20 steps over two batches each, the last one of an epoch over a single short batch; rows with different numbers of
labels; clipping in every step, warm-up, decay.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, get_scheduler

from helpers_tiny_hf import chat_rows, preference_rows, tiny_model, tiny_tokenizer
from helpers_trainers import (
    LORA,
    NUM_STEPS,
    SETTINGS,
    Outcome,
    arguments,
    assert_like_plain,
    assert_same_bits,
    close,
    logged,
    lora_model,
    new_model,
    options,
    outcome_of,
    settings,
    token_rows,
)
from roundpipe import RoundPipeRunConfig, clip_grad_norm_, optim, wrap_model_to_roundpipe
from roundpipe.integrations import RoundPipeDPOTrainer, RoundPipeSFTTrainer, RoundPipeTrainer

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

KINDS = ["full", "lora"]
FULL_FIRST = ["full", pytest.param("lora", marks=pytest.mark.slow)]
LORA_FIRST = ["lora", pytest.param("full", marks=pytest.mark.slow)]
DPO_KINDS = [
    *LORA_FIRST,
    pytest.param("trained-lora", marks=pytest.mark.slow),
    pytest.param("precomputed", marks=pytest.mark.slow),
    pytest.param("precomputed-lora", marks=pytest.mark.slow),
    pytest.param("synced", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_no_bars() -> Any:
    """Fixtures of the module run before those of a test, so the plain runs need their own setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    yield
    torch.set_num_threads(before)


# The arguments of both classes of a pair.


def for_trainer(folder: Path, kind: str) -> dict[str, Any]:
    return {"model": new_model(kind == "lora"), "args": arguments(folder), "train_dataset": token_rows()}


def for_sft(folder: Path, kind: str) -> dict[str, Any]:
    return {
        "model": tiny_model(),
        "args": trl.SFTConfig(**settings(folder), assistant_only_loss=True, max_length=32),
        "train_dataset": datasets.Dataset.from_list(chat_rows(18)),
        "processing_class": tiny_tokenizer(),
        "peft_config": peft.LoraConfig(**LORA) if kind == "lora" else None,
    }


def for_dpo(folder: Path, kind: str) -> dict[str, Any]:
    """kind: "trained-lora" is a model with an adapter, of which TRL keeps a copy as the reference."""
    is_new_adapter = kind in ("lora", "precomputed-lora")
    changes: dict[str, Any] = {"precompute_ref_log_probs": kind.startswith("precomputed")}
    if kind == "synced":
        changes |= {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5}
    return {
        "model": lora_model() if kind == "trained-lora" else tiny_model(),
        "ref_model": None if kind.endswith("lora") else tiny_model(seed=5),
        "args": trl.DPOConfig(**settings(folder), max_length=32, **changes),
        "train_dataset": datasets.Dataset.from_list(preference_rows(18)),
        "processing_class": tiny_tokenizer(),
        "peft_config": peft.LoraConfig(**LORA) if is_new_adapter else None,
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Runs a plain trainer, once for each kind."""

    @functools.cache
    def run(trainer_class: Any, make: Callable[[Path, str], dict[str, Any]], kind: str) -> Outcome:
        return outcome_of(trainer_class(**make(tmp_path_factory.mktemp("plain"), kind)))

    return run


# transformers' Trainer.


@pytest.mark.parametrize("kind", FULL_FIRST)
def test_trainer_takes_the_steps_of_plain_trainer(kind: str, plain: Callable[..., Outcome], tmp_path: Path) -> None:
    one = outcome_of(RoundPipeTrainer(**for_trainer(tmp_path, kind), roundpipe=options(1)))
    assert_like_plain(one, plain(Trainer, for_trainer, kind))
    three = outcome_of(RoundPipeTrainer(**for_trainer(tmp_path, kind), roundpipe=options(3)))
    assert_same_bits(three, one)


def test_default_options_take_the_steps_of_plain_trainer(
    plain: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu*2")
    monkeypatch.chdir(tmp_path)
    assert_like_plain(
        outcome_of(RoundPipeTrainer(**for_trainer(tmp_path, "full"))), plain(Trainer, for_trainer, "full")
    )


def test_model_that_is_wrapped_already_is_used(plain: Callable[..., Outcome], tmp_path: Path) -> None:
    given = for_trainer(tmp_path, "full")
    wrapped = wrap_model_to_roundpipe(given["model"], optim_dtype=torch.float32, devices=["cpu"] * 2)
    trainer = RoundPipeTrainer(**{**given, "model": wrapped}, roundpipe=options())
    assert trainer.model is wrapped
    assert_like_plain(outcome_of(trainer), plain(Trainer, for_trainer, "full"))


# Trainers of TRL.


@pytest.mark.parametrize("kind", LORA_FIRST)
def test_sft_trainer_takes_the_steps_of_plain_sft_trainer(
    kind: str, plain: Callable[..., Outcome], tmp_path: Path
) -> None:
    one = outcome_of(RoundPipeSFTTrainer(**for_sft(tmp_path, kind), roundpipe=options(1)))
    assert_like_plain(one, plain(trl.SFTTrainer, for_sft, kind))
    three = outcome_of(RoundPipeSFTTrainer(**for_sft(tmp_path, kind), roundpipe=options(3)))
    assert_same_bits(three, one)


def test_sft_metrics_are_those_of_plain_sft_trainer(tmp_path: Path) -> None:
    """Entropy, token accuracy and the number of tokens come from TRL's code, over outputs of forward_backward()."""
    found = []
    for trainer_class, more in ((trl.SFTTrainer, {}), (RoundPipeSFTTrainer, {"roundpipe": options(2)})):
        given = for_sft(tmp_path, "full")
        given["args"].max_steps = 3
        trainer = trainer_class(**given, **more)
        trainer.train()
        found.append(logged(trainer))
        close(trainer)
    for plain_entry, entry in zip(*found, strict=True):
        assert entry.keys() == plain_entry.keys()
        assert entry["num_tokens"] == plain_entry["num_tokens"]
        for name in ("entropy", "mean_token_accuracy"):
            assert entry[name] == pytest.approx(plain_entry[name], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_checkpointing_and_offloading_of_activations_are_ignored(
    kind: str, plain: Callable[..., Outcome], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SFTConfig turns gradient checkpointing on; TRL then makes the outputs of embeddings require grad."""
    given = for_sft(tmp_path, kind)
    given["args"] = dataclasses.replace(given["args"], gradient_checkpointing=True, activation_offloading=True)
    with caplog.at_level(logging.INFO, "roundpipe"):
        trainer = RoundPipeSFTTrainer(**given, roundpipe=options(2))
        assert not trainer.model.get_input_embeddings()._forward_hooks
        found = outcome_of(trainer)
    assert_like_plain(found, plain(trl.SFTTrainer, for_sft, kind))
    assert "gradient checkpointing stays off" in caplog.text
    assert "activation_offloading stays off" in caplog.text


def test_sft_evaluation_is_that_of_plain_sft_trainer(tmp_path: Path) -> None:
    found = []
    for trainer_class, more in ((trl.SFTTrainer, {}), (RoundPipeSFTTrainer, {"roundpipe": options(2)})):
        eval_dataset = datasets.Dataset.from_list(chat_rows(7, seed=3))
        trainer = trainer_class(**for_sft(tmp_path, "full"), eval_dataset=eval_dataset, **more)
        found.append(trainer.evaluate())
        close(trainer)
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found[1][name] == pytest.approx(found[0][name], abs=1e-5)


def mean_over_tokens(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({"packing": True, "packing_strategy": "wrapped"}, None),
        ({"loss_type": "dft"}, None),
        ({"label_smoothing_factor": 0.1}, None),
        ({}, mean_over_tokens),
    ],
)
@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning", "ignore:.*own outputs.*:FutureWarning")
@pytest.mark.slow
def test_other_ways_of_sft(changes: dict[str, Any], loss: Any, tmp_path: Path) -> None:
    """Packed sequences; losses that are not the model's own mean over tokens, whose gradients autograd computes.

    With label smoothing and a compute_loss_func, TRL runs the model in two forms before it goes backward.
    """
    found = []
    for trainer_class, more in ((trl.SFTTrainer, {}), (RoundPipeSFTTrainer, {"roundpipe": options(2)})):
        given = for_sft(tmp_path, "full")
        given["args"] = dataclasses.replace(given["args"], max_steps=4, **changes)
        trainer = trainer_class(**given, compute_loss_func=loss, **more)
        trainer.train()
        found.append(logged(trainer))
        close(trainer)
    for plain_entry, entry in zip(*found, strict=True):
        assert entry["loss"] == pytest.approx(plain_entry["loss"], abs=1e-5)
        assert entry["grad_norm"] == pytest.approx(plain_entry["grad_norm"], rel=1e-4)


def test_batch_of_sft_without_labels_has_the_loss_0(tmp_path: Path) -> None:
    """As with TRL; plain Trainer's would be NaN."""
    rows = [
        {"input_ids": [7 + row, 8, 9, 10], "labels": [-100, 8 if row < 4 else -100, -100, -100]} for row in range(8)
    ]
    found = []
    for trainer_class, more in ((trl.SFTTrainer, {}), (RoundPipeSFTTrainer, {"roundpipe": options(2)})):
        given = for_sft(tmp_path, "full") | {"train_dataset": datasets.Dataset.from_list(rows)}
        changes = {"max_steps": 2, "gradient_accumulation_steps": 1, "assistant_only_loss": False}
        given["args"] = dataclasses.replace(given["args"], **changes, train_sampling_strategy="sequential")
        given["args"].dataset_kwargs = {"skip_prepare_dataset": True}
        trainer = trainer_class(**given, **more)
        trainer.train()
        found.append([(step["loss"], step["grad_norm"]) for step in logged(trainer)])
        close(trainer)
    assert found[0][1] == (0.0, 0.0)
    assert found[1][1] == (0.0, 0.0)
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_trainer_takes_the_steps_of_plain_dpo_trainer(
    kind: str, plain: Callable[..., Outcome], tmp_path: Path
) -> None:
    num_references = []

    class Counting(RoundPipeDPOTrainer):
        def compute_ref_log_probs(self, *args: Any, **kwargs: Any) -> Any:
            num_references.append(1)
            return super().compute_ref_log_probs(*args, **kwargs)

    one = outcome_of(Counting(**for_dpo(tmp_path, kind), roundpipe=options(1)))
    assert_like_plain(one, plain(trl.DPOTrainer, for_dpo, kind))
    # TRL caches these values by model and data, and the plain run has computed them, too.
    assert len(num_references) == (5 if kind.startswith("precomputed") else 0)
    if kind in KINDS:
        three = outcome_of(RoundPipeDPOTrainer(**for_dpo(tmp_path, kind), roundpipe=options(3)))
        assert_same_bits(three, one)


# Asynchronous steps.


class Recording(RoundPipeTrainer):
    """Keeps the batches of each step, with the number of labels that their losses are divided by."""

    def get_batch_samples(self, *args: Any) -> Any:
        found = super().get_batch_samples(*args)
        self.__dict__.setdefault("steps", []).append(found)
        return found


def test_asynchronous_steps_are_those_of_a_bare_loop(plain: Callable[..., Outcome], tmp_path: Path) -> None:
    trainer = Recording(**for_trainer(tmp_path, "full"), roundpipe=options(2, is_async=True))
    found = outcome_of(trainer)
    expected = bare_loop(trainer.steps[:NUM_STEPS], trainer.get_decay_parameter_names(tiny_model()))
    assert_same_bits(found, expected)
    exact = plain(Trainer, for_trainer, "full")
    assert found.losses[0] == pytest.approx(exact.losses[0], abs=1e-5)
    # The rate of the first step is 0, so the weights of the third call would be the first new ones in exact steps.
    assert found.losses[2] == pytest.approx(found_without_training(trainer.steps[2]), abs=1e-5)
    assert found.losses[2] != pytest.approx(exact.losses[2], abs=1e-3)


def bare_loop(steps: list[Any], decayed: list[str]) -> Outcome:
    """The run of a RoundPipeTrainer with asynchronous steps, written out."""
    model = wrap_model_to_roundpipe(
        tiny_model(),
        optim_dtype=torch.float32,
        devices=["cpu"] * 2,
        model_run_config=RoundPipeRunConfig(num_microbatch=3),
    )
    named = dict(model.optim_named_parameters())
    groups = [
        {"params": [copy for name, copy in named.items() if name in decayed], "weight_decay": SETTINGS["weight_decay"]},
        {"params": [copy for name, copy in named.items() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = optim.AdamW(groups, lr=SETTINGS["learning_rate"])
    # The scheduler changes another optimizer: the rate of a step must not change while the step runs.
    rates = torch.optim.SGD([torch.zeros(())], lr=SETTINGS["learning_rate"])
    scheduler = get_scheduler(SETTINGS["lr_scheduler_type"], rates, SETTINGS["warmup_steps"], NUM_STEPS)
    norms: list[float] = []

    def step_fn(lr: float) -> None:
        norms.append(float(clip_grad_norm_(model, SETTINGS["max_grad_norm"])))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

    outcome = Outcome([], [], [], {})
    for batches, num_items in steps:
        losses = [
            model.forward_backward(input_kwargs={**batch, "num_items_in_batch": num_items}).detach()
            for batch in batches
        ]
        outcome.losses.append(float(sum(losses)))
        outcome.learning_rates.append(scheduler.get_last_lr()[0])
        model.step(step_fn, True, scheduler.get_last_lr()[0])
        rates.step()
        scheduler.step()
    model.synchronize()
    outcome.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    # The norm of a step is logged two steps later: only then it is certain that the step has run.
    outcome.grad_norms = [None, None, *norms[:-2]]
    model.close()
    return outcome


def found_without_training(step: Any) -> float:
    batches, num_items = step
    model = tiny_model()
    with torch.no_grad():
        return float(sum(model(**batch, num_items_in_batch=num_items).loss for batch in batches))
