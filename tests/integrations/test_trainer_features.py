"""What transformers' Trainer offers works in RoundPipeTrainer: evaluation, losses, optimizers, data, callbacks."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Adafactor,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)
from transformers.optimization import AdafactorSchedule
from transformers.trainer_utils import EvalPrediction

from helpers_liger import liger
from helpers_tiny_hf import VOCAB_SIZE, TokenRows, tiny_model
from helpers_trainers import arguments, close, logged, new_model, options, settings, token_rows
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.errors import ConfigError
from roundpipe.integrations import RoundPipeMixin, RoundPipeOptions, RoundPipeTrainer
from roundpipe.optim import AdamW, Lion, device_share, rules
from roundpipe.optim.stepper import Stepper
from roundpipe.store import training_memory
from roundpipe.store.update import StepMode

NUM_STEPS = 4
assert liger  # a fixture
CLASSES: tuple[Any, Any] = (Trainer, RoundPipeTrainer)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """Makes a plain trainer and RoundPipe's with the same arguments; `changes` are those of TrainingArguments."""
    made = []

    def make(classes: Any = CLASSES, *, model: Any = tiny_model, changes: Any = {}, **given: Any) -> list[Any]:
        for trainer_class in classes:
            given.setdefault("train_dataset", token_rows())
            more = {"roundpipe": options(2)} if issubclass(trainer_class, RoundPipeMixin) else {}
            args = arguments(tmp_path, **{"max_steps": NUM_STEPS, **changes})
            own = {name: value() if name in ("optimizers", "callbacks") else value for name, value in given.items()}
            network = {} if model is None else {"model": model()}
            made.append(trainer_class(**network, args=args, **own, **more))
        return made

    yield make
    for trainer in made:
        close(trainer)


def train_both(trainers: list[Any], *, tolerance: float = 1e-5) -> None:
    """Train; losses, norms and rates must be equal."""
    for trainer in trainers:
        torch.manual_seed(0)  # some samplers draw from the common generator
        trainer.train()
    assert_same_steps(*trainers, tolerance)


def assert_same_steps(plain: Any, ours: Any, tolerance: float = 1e-5) -> None:
    expected, found = logged(plain), logged(ours)
    assert len(found) == len(expected) > 0
    for mine, its in zip(found, expected, strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], abs=tolerance, rel=0)
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], abs=0, rel=10 * tolerance)
        assert mine["learning_rate"] == its["learning_rate"]


# Exact steps.


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StepMode]]:
    """The modes of all steps."""
    seen: list[StepMode] = []
    real = Stepper.issue

    def issue(self: Stepper, step_fn: Any, mode: StepMode, *args: Any, **kwargs: Any) -> Any:
        seen.append(mode)
        return real(self, step_fn, mode, *args, **kwargs)

    monkeypatch.setattr(Stepper, "issue", issue)
    yield seen
    seen.clear()


BY_LAYER = [StepMode.EXACT] + [StepMode.BY_LAYER] * (NUM_STEPS - 1)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_steps_return_at_once(
    is_wrapped: bool, is_async: bool, tmp_path: Path, modes: list[StepMode], caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a model that is wrapped already, whose own steps would be stale."""
    model: Any = new_model(is_lora=False)
    if is_wrapped:
        config = RoundPipeRunConfig(num_microbatch=3)
        model = wrap_model_to_roundpipe(model, optim_dtype=torch.float32, devices=["cpu"], model_run_config=config)
    trainer = RoundPipeTrainer(
        model,
        arguments(tmp_path, max_steps=NUM_STEPS),
        train_dataset=token_rows(),
        roundpipe=options(1, is_async=is_async),
    )
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        trainer.train()
    close(trainer)
    assert modes == ([StepMode.STALE] * NUM_STEPS if is_async else BY_LAYER)
    assert not [record for record in caplog.records if "waits for every step" in record.getMessage()]
    norms = [entry.get("grad_norm") for entry in logged(trainer)]
    assert is_async or all(norm is not None and norm > 0 for norm in norms)


@pytest.mark.parametrize("name", ["SFTTrainer", "of another package", "with its callback"])
def test_trainers_of_trl_that_read_weights_wait(name: str, tmp_path: Path, modes: list[StepMode]) -> None:
    callback = type("Reads", (TrainerCallback,), {"__module__": "trl.trainer.callbacks"})
    own = type("OfTrl", (RoundPipeTrainer,), {"__module__": "trl.experimental.own"})
    named = type("SFTTrainer", (RoundPipeTrainer,), {"__module__": "trl.trainer.sft_trainer"})
    trainer_class = {"SFTTrainer": named, "of another package": own, "with its callback": RoundPipeTrainer}[name]
    trainer = trainer_class(
        new_model(is_lora=False),
        arguments(tmp_path, max_steps=NUM_STEPS),
        train_dataset=token_rows(),
        roundpipe=options(1),
        callbacks=[callback()] if name == "with its callback" else [],
    )
    trainer.write_model_card = lambda: None
    trainer.train()
    close(trainer)
    assert modes == (BY_LAYER if name == "SFTTrainer" else [StepMode.EXACT] * NUM_STEPS)


def test_callbacks_see_the_weights_of_each_step(pair: Callable[..., list[Any]]) -> None:
    seen: list[list[Tensor]] = [[], []]
    at = iter(seen)

    class Looks(TrainerCallback):
        def __init__(self) -> None:
            self.seen = next(at)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            weights = model.state_dict()
            self.seen.append(torch.cat([weights[name].flatten() for name in sorted(weights)]).clone())

    train_both(pair(callbacks=lambda: [Looks()]))
    assert len(seen[0]) == len(seen[1]) == NUM_STEPS
    for plain, ours in zip(*seen, strict=True):
        assert float((plain - ours).abs().max()) < 1e-5
    assert float((seen[0][0] - seen[0][-1]).abs().max()) > 1e-4


# Evaluation.


@pytest.mark.parametrize("is_lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_evaluation_while_training_and_after_it(is_lora: bool, pair: Callable[..., list[Any]]) -> None:
    plain, ours = pair(
        model=lambda: new_model(is_lora),
        eval_dataset={"first": TokenRows(7, seed=1), "second": TokenRows(6, seed=2)},
        changes={"eval_strategy": "steps", "eval_steps": 2},
    )
    train_both([plain, ours])
    for name in ("eval_first_loss", "eval_second_loss"):
        expected = [entry[name] for entry in plain.state.log_history if name in entry]
        found = [entry[name] for entry in ours.state.log_history if name in entry]
        assert len(expected) == 2
        assert found == pytest.approx(expected, abs=1e-5, rel=0)
    later = TokenRows(5, seed=3)
    assert ours.evaluate(later)["eval_loss"] == pytest.approx(plain.evaluate(later)["eval_loss"], abs=1e-5)


def test_evaluation_uploads_weights_once_where_device_memory_is_left(
    pair: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VirtualDevice, "memory_limit_bytes", lambda self: 10**10)
    plain, ours = pair(eval_dataset=TokenRows(8, seed=1), changes={"per_device_eval_batch_size": 2})
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    # A new plan may follow measured times, and what it moves is uploaded again: only a given plan shows a fixed number.
    layers = ours.model._engine.store.layers
    plan = ModelExecutePlan([range(len(layers))])
    ours.model.set_run_config(RoundPipeRunConfig(execute_plan=plan, num_microbatch=2))
    ours.model.synchronize()
    before, size = ours.model.stats(), sum(layer.image.total_bytes for layer in layers)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    ours.model.synchronize()
    after = ours.model.stats()
    assert after.weights_up_bytes - before.weights_up_bytes == size
    assert after.weights_kept_bytes - before.weights_kept_bytes == 3 * size


def test_evaluation_without_training(pair: Callable[..., list[Any]]) -> None:
    plain, ours = pair(eval_dataset=TokenRows(7, seed=1))
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    train_both([plain, ours])


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Rows without a length."""

    def __init__(self, num_rows: int) -> None:
        self._rows = TokenRows(num_rows, seed=1)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(list(self._rows))


@pytest.mark.parametrize("rows", [Stream, TokenRows])
@pytest.mark.parametrize(
    ("num_rows", "changes"),
    [
        (9, {}),
        (8, {}),
        (3, {}),
        (9, {"dataloader_drop_last": True}),
        (9, {"accelerator_config": {"dispatch_batches": False}}),
        (9, {"accelerator_config": {"dispatch_batches": True}}),
        (9, {"eval_accumulation_steps": 1}),
    ],
)
def test_evaluation_with_a_short_last_batch(
    num_rows: int, changes: dict[str, Any], rows: Any, pair: Callable[..., list[Any]]
) -> None:
    """Trainer repeats the loss of a batch for each of its rows; accelerate must know how many the last one has."""

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        return {"num_rows": len(prediction.label_ids), "logits": float(np.abs(prediction.predictions).mean())}

    trainers = pair(
        eval_dataset=rows(num_rows), compute_metrics=metrics, changes={"per_device_eval_batch_size": 8, **changes}
    )
    for names in (["eval_loss", "eval_num_rows", "eval_logits"], ["eval_loss"]):
        plain, ours = (trainer.evaluate() for trainer in trainers)
        assert {name: ours[name] for name in names} == pytest.approx({name: plain[name] for name in names}, rel=1e-6)
        for trainer in trainers:
            trainer.compute_metrics = None  # the next evaluation computes losses alone


def test_compute_metrics_and_predict_get_logits_and_labels(pair: Callable[..., list[Any]]) -> None:
    seen: list[EvalPrediction] = []

    def keep(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    plain, ours = pair(eval_dataset=TokenRows(7, seed=1), compute_metrics=keep)
    expected, found = plain.evaluate(), ours.evaluate()
    assert found["eval_accuracy"] == expected["eval_accuracy"]
    assert seen[1].predictions.shape == seen[0].predictions.shape == (7, 10, VOCAB_SIZE)
    np.testing.assert_allclose(seen[1].predictions, seen[0].predictions, atol=1e-5)
    np.testing.assert_array_equal(seen[1].label_ids, seen[0].label_ids)

    expected, found = plain.predict(TokenRows(5, seed=2)), ours.predict(TokenRows(5, seed=2))
    np.testing.assert_allclose(found.predictions, expected.predictions, atol=1e-5)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=1e-5)


def test_evaluation_after_an_asynchronous_step_uses_the_newest_weights(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=3)
    data = {"train_dataset": token_rows(), "eval_dataset": TokenRows(7, seed=1)}
    trainer: Any = RoundPipeTrainer(tiny_model(), args, **data, roundpipe=options(2, is_async=True))
    trainer.train()
    (found,) = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    plain: Any = Trainer(tiny_model(), args, **data)
    plain.model.load_state_dict(trainer.model.state_dict())
    assert found == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    assert trainer.evaluate()["eval_loss"] == found
    close(trainer)


class Pairs(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token sequences with a target sequence, for encoder-decoder models."""

    def __init__(self, num_rows: int) -> None:
        rows = TokenRows(num_rows)
        self._rows = [
            {
                "input_ids": row["input_ids"],
                "attention_mask": row["attention_mask"],
                "labels": rows[-1 - index]["labels"][2:],
            }
            for index, row in enumerate(rows)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self._rows[row]


def tiny_t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB_SIZE, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **sizes)
    )
    model.generation_config.max_length = 8
    return model


def test_seq2seq_trainer_generates_for_evaluation(tmp_path: Path) -> None:
    class RoundPipeSeq2SeqTrainer(RoundPipeMixin, Seq2SeqTrainer):
        pass

    seen: list[EvalPrediction] = []

    def keep(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {}

    def trainers(accumulation: int) -> list[Any]:
        changes = {"max_steps": NUM_STEPS, "gradient_accumulation_steps": accumulation, "predict_with_generate": True}
        return [
            trainer_class(
                tiny_t5(),
                Seq2SeqTrainingArguments(**settings(tmp_path, **changes)),
                train_dataset=Pairs(18),
                eval_dataset=Pairs(6),
                compute_metrics=keep,
                **more,
            )
            for trainer_class, more in ((Seq2SeqTrainer, {}), (RoundPipeSeq2SeqTrainer, {"roundpipe": options(2)}))
        ]

    plain, ours = trainers(1)
    train_both([plain, ours])
    expected, found = plain.evaluate(), ours.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)
    np.testing.assert_array_equal(seen[1].predictions, seen[0].predictions)
    assert seen[0].predictions.shape == (6, 8)
    close(ours)
    # T5 takes the number of labels and ignores it, so that plain Trainer adds the means of the batches of a step.
    plain, ours = trainers(2)
    plain.train()
    ours.train()
    assert logged(ours)[0]["loss"] == pytest.approx(logged(plain)[0]["loss"] / 2, rel=0.05)
    close(ours)


# Losses.


@pytest.mark.parametrize("is_lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_label_smoothing(is_lora: bool, pair: Callable[..., list[Any]]) -> None:
    """Trainer shifts the labels of causal models, which it recognises by the name of their class."""
    trainers = pair(
        model=lambda: new_model(is_lora),
        changes={"label_smoothing_factor": 0.2, "eval_strategy": "steps", "eval_steps": 2},
        eval_dataset=TokenRows(7, seed=1),
    )
    train_both(trainers)
    plain, ours = ([entry["eval_loss"] for entry in t.state.log_history if "eval_loss" in entry] for t in trainers)
    assert ours == pytest.approx(plain, abs=1e-5)


def squared_logits(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    kept = (labels != -100).unsqueeze(-1)
    return (outputs.logits.square() * kept).sum() / num_items_in_batch / VOCAB_SIZE


def test_compute_loss_func(pair: Callable[..., list[Any]]) -> None:
    train_both(pair(compute_loss_func=squared_logits, changes={"max_grad_norm": 0.01}))


class OwnLoss:
    """Put before a trainer class: its loss has a further term."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        loss = loss + 0.01 * squared_logits(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def test_own_compute_loss(pair: Callable[..., list[Any]]) -> None:
    class Plain(OwnLoss, Trainer):
        pass

    class Ours(OwnLoss, RoundPipeTrainer):
        pass

    class Below(RoundPipeMixin, Plain):
        """The mixin in front of a trainer of the user."""

    train_both(pair((Plain, Ours)))
    train_both(pair((Plain, Below))[2:])


def test_own_training_step_below_the_mixin_is_used(pair: Callable[..., list[Any]]) -> None:
    class HalfLoss(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            return super().training_step(model, inputs, 2 * num_items_in_batch)

    class Ours(RoundPipeMixin, HalfLoss):
        pass

    plain, ours, usual = *pair((HalfLoss, Ours)), *pair((Trainer,))[2:]
    train_both([plain, ours])
    usual.train()
    assert logged(ours)[0]["loss"] == pytest.approx(logged(usual)[0]["loss"] / 2)


def test_own_count_of_items(pair: Callable[..., list[Any]]) -> None:
    def counting(base: Any) -> Any:
        class Counting(base):  # type: ignore[misc]
            def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
                return torch.tensor(sum(batch["input_ids"].numel() for batch in batch_samples))

        return Counting

    train_both(pair((counting(Trainer), counting(RoundPipeTrainer))))


def test_loss_that_takes_no_count_is_a_mean_over_batches(pair: Callable[..., list[Any]]) -> None:
    trainers = pair()
    for trainer in trainers:
        trainer.model_accepts_loss_kwargs = False
    train_both(trainers)


class Regression(nn.Module):
    """Not a model of transformers: returns a tuple whose first element is the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, points: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        values = self.body(points)
        return (values,) if labels is None else (nn.functional.mse_loss(values, labels), values)


class RegressionDict(Regression):
    def forward(self, points: Tensor, labels: Tensor | None = None) -> Any:
        outputs = super().forward(points, labels)
        return {"values": outputs[-1]} | ({} if labels is None else {"loss": outputs[0]})


class Points(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 18

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(row)
        return {"points": torch.randn(3, generator=generator), "labels": torch.randn(1, generator=generator)}


@pytest.mark.parametrize("network", [Regression, RegressionDict])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_model_of_ones_own(network: Any, accumulation: int, pair: Callable[..., list[Any]]) -> None:
    changes = {"gradient_accumulation_steps": accumulation, "eval_strategy": "steps", "eval_steps": 2}
    trainers = pair(model=network, train_dataset=Points(), eval_dataset=Points(), changes=changes)
    train_both(trainers)
    plain, ours = ([entry["eval_loss"] for entry in t.state.log_history if "eval_loss" in entry] for t in trainers)
    assert ours == pytest.approx(plain, abs=1e-5)


# Precision and arguments that are ignored.


def test_bf16_autocast(pair: Callable[..., list[Any]]) -> None:
    """Rounding to 8 bits differs with the shapes of microbatches, so losses agree to a few of these."""
    plain, ours = pair(changes={"bf16": True, "eval_strategy": "steps", "eval_steps": 2}, eval_dataset=TokenRows(7))
    plain.train()
    ours.train()
    assert [entry["loss"] for entry in logged(ours)] == pytest.approx(
        [entry["loss"] for entry in logged(plain)], rel=2e-3
    )
    assert {param.dtype for param in ours.model.parameters()} == {torch.float32}
    (in_float32,) = pair((RoundPipeTrainer,))[2:]
    in_float32.train()
    assert logged(ours)[0]["loss"] != logged(in_float32)[0]["loss"]
    assert str(inspect.signature(ours.model.forward)) == str(inspect.signature(plain.model.forward))


def test_gradient_checkpointing_is_ignored_with_a_note(
    pair: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "roundpipe")
    plain, ours = pair(changes={"gradient_checkpointing": True})
    train_both([plain, ours])
    assert "gradient checkpointing stays off: RoundPipe recomputes layers by its own plan" in caplog.text
    assert not any(getattr(module, "gradient_checkpointing", False) for module in ours.model.modules())


def test_several_gpus_make_no_data_parallel_model(pair: Callable[..., list[Any]], tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=NUM_STEPS)
    assert args.n_gpu == 0
    args._n_gpu = 3
    ours: Any = RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=options(2))
    train_both([*pair((Trainer,)), ours])
    assert type(ours.model_wrapped) is RoundPipe
    close(ours)


def test_batches_are_not_pinned(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.dataloader_pin_memory = True  # the default on a machine with a GPU
    trainer = RoundPipeTrainer(model=tiny_model(), args=args, train_dataset=token_rows(), roundpipe=options())
    assert not trainer.args.dataloader_pin_memory
    close(trainer)


def test_default_arguments_of_token_averages(pair: Callable[..., list[Any]]) -> None:
    plain, ours = pair()
    assert ours.args.average_tokens_across_devices is plain.args.average_tokens_across_devices is True
    train_both(pair(changes={"average_tokens_across_devices": False})[2:])


# Optimizers and schedules.


def test_optimizer_and_scheduler_of_ones_own(pair: Callable[..., list[Any]]) -> None:
    model = [tiny_model(), tiny_model()]
    given = iter(model)
    params = iter([list(each.parameters()) for each in model])

    def optimizers() -> Any:
        optimizer = torch.optim.SGD(next(params), lr=0.5, momentum=0.9)
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ]
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    trainers = pair(model=lambda: next(given), optimizers=optimizers)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer.step.*")
        train_both(trainers)
    assert len({entry["learning_rate"] for entry in logged(trainers[1])}) == NUM_STEPS


def test_optimizer_on_masters(pair: Callable[..., list[Any]], tmp_path: Path) -> None:
    wrapped = wrap_model_to_roundpipe(tiny_model(), optim_dtype=torch.float32, devices=["cpu"])
    optimizer = torch.optim.SGD(wrapped.optim_parameters(), lr=0.5)
    args = arguments(tmp_path, max_steps=NUM_STEPS)
    ours: Any = RoundPipeTrainer(wrapped, args, train_dataset=token_rows(), optimizers=(optimizer, None))
    model = tiny_model()
    plain: Any = Trainer(
        model, args, train_dataset=token_rows(), optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None)
    )
    train_both([plain, ours])
    close(ours)


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.02})},
        {"changes": {"optim": "sgd", "learning_rate": 0.5}},
        {"changes": {"optim": "adafactor"}},
        {"changes": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}},
    ],
)
def test_choices_of_the_optimizer(given: dict[str, Any], pair: Callable[..., list[Any]]) -> None:
    train_both(pair(**given, eval_dataset=TokenRows(6, seed=1)))


def test_rates_of_adafactors_own_schedule(pair: Callable[..., list[Any]]) -> None:
    """AdafactorSchedule logs the rates that the optimizer has computed from its state."""
    models = [tiny_model(), tiny_model()]
    given, networks = iter(models), iter(models)

    def optimizers() -> Any:
        optimizer = Adafactor(next(networks).parameters(), relative_step=True, warmup_init=True)
        return optimizer, AdafactorSchedule(optimizer)

    plain, ours = pair(model=lambda: next(given), optimizers=optimizers, changes={"save_strategy": "steps"})
    for trainer in (plain, ours):
        trainer.args.output_dir = f"{trainer.args.output_dir}/{type(trainer).__name__}"
        trainer.train()
    expected, found = ([entry["learning_rate"] for entry in logged(trainer)] for trainer in (plain, ours))
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == NUM_STEPS
    assert [entry["loss"] for entry in logged(ours)] == pytest.approx([entry["loss"] for entry in logged(plain)])


def test_schedule_of_adafactor_does_not_go_with_asynchronous_steps(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = Adafactor(model.parameters())
    trainer = RoundPipeTrainer(
        model,
        arguments(tmp_path),
        train_dataset=token_rows(),
        optimizers=(optimizer, AdafactorSchedule(optimizer)),
        roundpipe=options(is_async=True),
    )
    with pytest.raises(ConfigError, match="AdafactorSchedule reads the state of the optimizer"):
        trainer.train()
    close(trainer)


def test_group_of_a_parameter_is_found_by_the_parameter_and_by_its_master(pair: Callable[..., list[Any]]) -> None:
    plain, ours = pair()
    for trainer in (plain, ours):
        with pytest.raises(ValueError, match="optimizer is None"):
            trainer.get_optimizer_group()
        trainer.create_optimizer()
        assert len(trainer.get_optimizer_group()) == 2
    masters = dict(ours.model.optim_named_parameters())
    decayed = {id(parameter) for parameter in plain.optimizer.param_groups[0]["params"]}
    for name, parameter in plain.model.named_parameters():
        own = ours.model.get_parameter(name)
        group = ours.get_optimizer_group(own)
        assert group is ours.get_optimizer_group(masters[name])
        assert own in group["params"]
        assert group["weight_decay"] == (ours.args.weight_decay if id(parameter) in decayed else 0.0)
    for trainer in (plain, ours):  # what is set in a group counts in the next step
        trainer.get_optimizer_group(next(trainer.model.parameters()))["betas"] = (0.5, 0.9)
    train_both([plain, ours])


class Recorded(RoundPipeTrainer):
    """Keeps what its optimizer is made of."""

    made: tuple[Any, dict[str, Any]]

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
        self.made = super().get_optimizer_cls_and_kwargs(args, model)
        return self.made


@pytest.mark.parametrize(
    ("optim", "moments", "kind", "expected"),
    [
        ("adamw_8bit", None, AdamW, "8bit"),
        ("paged_adamw_8bit", "bfloat16", AdamW, "bfloat16"),
        ("adamw_torch", "8bit", AdamW, "8bit"),
        ("paged_adamw_32bit", None, AdamW, None),
        ("lion_8bit", None, Lion, "8bit"),
    ],
)
def test_moments_by_the_name_of_the_optimizer_and_by_the_options(
    tmp_path: Path, optim: str, moments: Any, kind: Any, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same training as with an optimizer of one's own choice; bitsandbytes is not needed."""
    monkeypatch.setattr(rules, "SMALLEST", 100)  # the parameters of the tiny model are small
    args = {"max_steps": NUM_STEPS, "learning_rate": 2e-3, "adam_beta2": 0.97, "weight_decay": 0.1}
    chosen = {"moments": expected} if expected else {}
    betas = {"lr": 2e-3, "betas": (0.9, 0.97)}
    trainers = [
        Recorded(
            tiny_model(),
            arguments(tmp_path, optim=optim, **args),
            train_dataset=token_rows(),
            roundpipe=dataclasses.replace(options(2), moments=moments),
        ),
        RoundPipeTrainer(
            tiny_model(),
            arguments(tmp_path, **args),
            train_dataset=token_rows(),
            roundpipe=options(2),
            optimizer_cls_and_kwargs=(kind, {**betas, **chosen}),
        ),
    ]
    for trainer in trainers:
        trainer.train()
    one, other = (trainer.model.state_dict() for trainer in trainers)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert trainers[0].made[0] is kind
    assert trainers[0].made[1].get("moments") == expected
    states = trainers[0].optimizer.optimizer.state.values()
    assert any("exp_avg_8bit" in state for state in states) == (expected == "8bit")
    for trainer in trainers:
        close(trainer)


def test_moments_are_counted_when_the_model_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits with moments in 8 bits is not refused for float32 moments."""
    needs = []
    real = training_memory.require_host_memory
    monkeypatch.setattr(training_memory, "require_host_memory", lambda rows, *args, **more: needs.append(rows))
    for moments in ("float32", "8bit"):
        chosen = dataclasses.replace(options(2), moments=moments)
        close(RoundPipeTrainer(tiny_model(), arguments(tmp_path), train_dataset=token_rows(), roundpipe=chosen))
    monkeypatch.setattr(training_memory, "require_host_memory", real)
    assert any("optimizer state (Adam)" in rows for rows in needs)
    assert any("optimizer state (Adam, 8bit)" in rows for rows in needs)


def test_devices_share_the_update_by_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_share, "PIECE", 64)
    monkeypatch.setattr(device_share, "_SMALLEST", 64)
    monkeypatch.setattr(device_share._Helper, "_is_worth", lambda self, num_left, count: True)
    found, num_elements = [], []
    for on_devices in (False, True):
        chosen = dataclasses.replace(options(2), on_devices=on_devices)
        args = arguments(tmp_path, max_steps=NUM_STEPS, max_grad_norm=0.1)
        trainer = RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=chosen)
        trainer.train()
        found.append([param.detach().clone() for param in trainer.model.optim_parameters()])
        share = trainer.optimizer.optimizer.device_share
        num_elements.append(0 if share is None else share.num_elements)
        close(trainer)
    assert all(map(torch.equal, *found))
    assert num_elements[0] == 0 < num_elements[1]
    with pytest.raises(ConfigError, match="on_devices and state_folder exclude each other"):
        RoundPipeOptions(on_devices=True, state_folder=tmp_path)
    of_torch = arguments(tmp_path, optim="rmsprop")
    trainer = RoundPipeTrainer(tiny_model(), of_torch, roundpipe=dataclasses.replace(options(2), on_devices=True))
    with pytest.raises(ConfigError, match='on_devices is for optim="adamw_torch"'):
        trainer.create_optimizer()
    close(trainer)


def test_masters_of_24_bits_by_the_options(tmp_path: Path) -> None:
    """Clipped, in several microbatches, and the same on any number of devices."""
    found = []
    for num_devices in (1, 3):
        chosen = dataclasses.replace(options(num_devices), master_bits=24)
        args = arguments(tmp_path, max_steps=NUM_STEPS, max_grad_norm=0.1)
        trainer = RoundPipeTrainer(tiny_model().bfloat16(), args, train_dataset=token_rows(), roundpipe=chosen)
        trainer.train()
        masters = [param.detach().clone() for param in trainer.model.optim_parameters()]
        assert not any((values.view(torch.int32) & 0xFF).any() for values in masters)
        assert any((values.view(torch.int32) & 0xFFFF).any() for values in masters)
        found.append(masters)
        close(trainer)
    assert all(map(torch.equal, *found))
    with pytest.raises(ConfigError, match="master_bits must be 32 or 24, got 16"):
        RoundPipeOptions(master_bits=16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optim", "moments", "told"),
    [("sgd", "8bit", "not for optim='sgd'"), ("adamw_torch", "3bit", "moments must be one of 'float32'")],
)
def test_moments_that_an_optimizer_does_not_have_are_refused(
    tmp_path: Path, optim: str, moments: Any, told: str
) -> None:
    def train() -> None:
        chosen = dataclasses.replace(options(2), moments=moments)
        args = arguments(tmp_path, optim=optim)
        trainer = RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=chosen)
        try:
            trainer.train()
        finally:
            close(trainer)

    with pytest.raises(ConfigError, match=told):
        train()


def test_own_choice_of_the_optimizer_below_the_mixin_is_used(pair: Callable[..., list[Any]]) -> None:
    class WithSgd(Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
            return torch.optim.SGD, {"lr": 0.5}

    class Ours(RoundPipeMixin, WithSgd):
        pass

    train_both(pair((WithSgd, Ours)))


def test_model_init_makes_a_new_model_for_each_training(pair: Callable[..., list[Any]]) -> None:
    plain, ours = pair(model=None, model_init=lambda: tiny_model())
    first = ours.model
    train_both([plain, ours])
    assert ours.model is not first
    once = [entry["loss"] for entry in logged(ours)]
    ours.train()
    assert [entry["loss"] for entry in logged(ours)] == once
    assert type(ours.model) is RoundPipe


def test_training_twice_goes_on(pair: Callable[..., list[Any]]) -> None:
    trainers = pair()
    train_both(trainers)
    for trainer in trainers:
        trainer.args.max_steps = 6
    train_both(trainers)


# Data.


@pytest.mark.parametrize("is_lora", [False, True])
def test_columns_that_the_model_does_not_take_are_dropped(is_lora: bool, pair: Callable[..., list[Any]]) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{name: value.tolist() for name, value in row.items()} for row in token_rows()]
    data = datasets.Dataset.from_list([row | {"source": "here", "weight": 1.0} for row in rows])
    plain, ours = pair(model=lambda: new_model(is_lora), train_dataset=data)
    names = {frozenset(batch) for trainer in (plain, ours) for batch in trainer.get_train_dataloader()}
    assert names == {frozenset({"input_ids", "attention_mask", "labels"})}
    assert ours._signature_columns[: len(plain._signature_columns) - 3] == plain._signature_columns[:-3]
    assert ours.label_names == plain.label_names == ["labels"]
    train_both([plain, ours])


class StacksItself(Trainer):
    """Gets batches that are lists of rows, as many trainers of TRL do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        batch = {name: torch.stack([row[name] for row in inputs]) for name in inputs[0]}
        return super().compute_loss(model, batch, return_outputs, num_items_in_batch)


def test_batches_may_be_lists(pair: Callable[..., list[Any]]) -> None:
    class Ours(RoundPipeMixin, StacksItself):
        pass

    train_both(pair((StacksItself, Ours), data_collator=list))


def test_label_names(pair: Callable[..., list[Any]]) -> None:
    plain, ours = pair(changes={"label_names": ["labels", "attention_mask"]}, compute_metrics=lambda prediction: {})
    found, expected = (trainer.predict(TokenRows(5)).label_ids for trainer in (ours, plain))
    assert len(found) == 2
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_grouping_by_length_and_worker_processes(pair: Callable[..., list[Any]]) -> None:
    """One epoch: its order is drawn from the common generator before the first call draws from it."""
    changes = {"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 1, "max_steps": 3}
    train_both(pair(changes=changes))


# Callbacks.


class Watch(TrainerCallback):
    """Keeps the gradients before each step, and what callbacks are given."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.models: set[type] = set()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.optim_named_parameters() if isinstance(model, RoundPipe) else model.named_parameters()
        self.gradients.append({name: param.grad.clone() for name, param in named})
        self.models.add(type(model))

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        assert all("lr" in group for group in optimizer.param_groups)


def test_callbacks_read_gradients_before_the_step(pair: Callable[..., list[Any]]) -> None:
    """They are the sums over the batches of the step. RoundPipe clips them in the step, Trainer before the callback."""
    watches: list[Watch] = []

    def callbacks() -> list[Watch]:
        watches.append(Watch())
        return watches[-1:]

    trainers = pair(callbacks=callbacks, changes={"max_grad_norm": 0.0})
    train_both(trainers)
    plain, ours = watches
    assert ours.models == {RoundPipe}
    for mine, its in zip(ours.gradients, plain.gradients, strict=True):
        assert mine.keys() == its.keys()
        for name, gradient in its.items():
            torch.testing.assert_close(mine[name], gradient, atol=1e-5, rtol=1e-4)
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in ours.gradients[-1].values()]))
    assert logged(trainers[1])[-1]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_callback_that_changes_the_rate(pair: Callable[..., list[Any]]) -> None:
    class Half(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] /= 2

    train_both(pair(callbacks=lambda: [Half()]))


def test_early_stopping(pair: Callable[..., list[Any]]) -> None:
    """Rates are so high that the loss gets worse at once."""
    changes = {
        "max_steps": 10,
        "learning_rate": 3.0,
        "warmup_steps": 0,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    plain, ours = pair(
        changes=changes, eval_dataset=TokenRows(6), callbacks=lambda: [EarlyStoppingCallback(early_stopping_patience=2)]
    )
    plain.train()
    ours.train()
    assert ours.state.global_step == plain.state.global_step < 10


# Kernels.


def test_liger_kernels_of_the_arguments_are_those_of_the_wrapper(liger: Any, tmp_path: Path) -> None:
    rows, make = token_rows(), partial(tiny_model, "llama")
    args = arguments(tmp_path, max_steps=NUM_STEPS)
    plain = Trainer(make(), args, train_dataset=rows)
    plain.train()  # before anything is patched
    args = arguments(tmp_path, max_steps=NUM_STEPS, use_liger_kernel=True, liger_kernel_config={"rope": False})
    ours = RoundPipeTrainer(make(), args, train_dataset=rows, eval_dataset=rows, roundpipe=options(2))
    ours.train()
    assert_same_steps(plain, ours)
    assert set(liger.CALLS) == {"norm", "mlp"}
    assert ours.evaluate()["eval_loss"] > 0
    assert args.use_liger_kernel, "the arguments are the user's"
    close(ours)
