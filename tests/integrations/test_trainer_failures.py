"""Trainers refuse what they cannot train, and losses or gradients that are not finite do not reach the weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from helpers_tiny_hf import chat_rows, preference_rows, tiny_model, tiny_tokenizer
from helpers_trainers import LORA, arguments, close, logged, options, settings, token_rows
from roundpipe import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError, NonFiniteError, UsageError
from roundpipe.integrations import RoundPipeMixin, RoundPipeOptions, RoundPipeTrainer

# Arguments.


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"fp16": True}, "fp16=True; use bf16=True, which needs no loss scaling"),
        ({"fp16_full_eval": True}, "fp16_full_eval=True; use a model loaded in float16"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True; use bf16=True, or a model loaded in bfloat16"),
        ({"deepspeed": "config.json"}, "deepspeed='config.json'; use RoundPipe alone"),
        ({"fsdp": "full_shard"}, "fsdp='full_shard'; use RoundPipe alone"),
    ],
)
def test_argument_that_does_not_go_with_roundpipe_is_refused(
    changes: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    args = arguments(tmp_path)
    vars(args).update(changes)  # TrainingArguments itself refuses some of these where there is no GPU
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=re.escape(f"RoundPipeTrainer does not support {advice}")):
        RoundPipeTrainer(model, args, train_dataset=token_rows(), roundpipe=options())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=token_rows()).train()  # it is still a plain model


def test_what_several_machines_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnLoss(RoundPipeTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    args = arguments(tmp_path)
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ConfigError, match=r"has its own compute_loss\(\), and on 2 machines it cannot be told"):
        OwnLoss(tiny_model(), args, train_dataset=token_rows(), roundpipe=options())
    wrapped = wrap_model_to_roundpipe(tiny_model(), devices=["cpu"])
    with pytest.raises(ConfigError, match="a model that was wrapped for one machine, but 2 processes"):
        RoundPipeTrainer(wrapped, args, train_dataset=token_rows())
    wrapped.close()
    args.accelerator_config.split_batches = True
    with pytest.raises(ConfigError, match="leave dispatch_batches and split_batches out"):
        RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=options())


def test_method_that_the_mixin_replaces_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Plain(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            raise AssertionError

        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    class Below(RoundPipeMixin, Plain):
        pass

    class Above(RoundPipeMixin, Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            raise AssertionError

    for trainer_class, warnings in ((Below, ["Plain._save_checkpoint() is not called"]), (Above, [])):
        caplog.clear()
        close(trainer_class(tiny_model(), arguments(tmp_path), train_dataset=token_rows(), roundpipe=options()))
        assert [record.getMessage().split(":")[0] for record in caplog.records] == warnings


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='nonfinite must be "stop", "skip" or "off", got \'never\''):
        RoundPipeOptions(nonfinite="never")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape("roundpipe must be RoundPipeOptions(...), got dict.")):
        RoundPipeTrainer(tiny_model(), arguments(tmp_path), roundpipe={"devices": "cpu"})


@pytest.mark.parametrize("key", ["params", "model", "optimizer_dict"])
def test_optimizer_that_needs_a_model_on_a_gpu_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpu = type("Galore", (torch.optim.SGD,), {})
    choice = staticmethod(lambda args, model=None: (of_gpu, {key: None}))
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", choice)
    trainer: Any = RoundPipeTrainer(
        tiny_model(), arguments(tmp_path, optim="sgd"), train_dataset=token_rows(), roundpipe=options()
    )
    with pytest.raises(ConfigError, match="optim='sgd' works on the parameters of a model on a GPU"):
        trainer.train()
    close(trainer)


def test_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(2, 5))], lr=0.1)
    trainer: Any = RoundPipeTrainer(
        tiny_model(), arguments(tmp_path), train_dataset=token_rows(), optimizers=(foreign, None), roundpipe=options()
    )
    with pytest.raises(UsageError, match=re.escape("a parameter of shape (2, 5) that is none of the model's")):
        trainer.train()
    close(trainer)


def test_optimizer_that_has_taken_steps_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = token_rows()[0]
    model(**{name: value[None] for name, value in rows.items()}).loss.backward()
    optimizer.step()
    trainer: Any = RoundPipeTrainer(
        model, arguments(tmp_path), train_dataset=token_rows(), optimizers=(optimizer, None), roundpipe=options()
    )
    with pytest.raises(UsageError, match="has taken steps on the model's own parameters"):
        trainer.train()
    close(trainer)


def test_closure_is_refused(tmp_path: Path) -> None:
    trainer: Any = RoundPipeTrainer(
        tiny_model(), arguments(tmp_path, max_steps=1), train_dataset=token_rows(), roundpipe=options()
    )
    trainer.train()
    with pytest.raises(UsageError, match=re.escape("takes no closure in step()")):
        trainer.optimizer.step(lambda: 1.0)
    close(trainer)


# Trainers that know nothing of RoundPipe.


def test_plain_trainers_refuse_a_wrapped_model(tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    chats, preferences = (datasets.Dataset.from_list(rows) for rows in (chat_rows(4), preference_rows(4)))
    with wrap_model_to_roundpipe(tiny_model(), devices=["cpu"]) as model:
        cases = [
            (Trainer, arguments(tmp_path), token_rows(), {}),
            (trl.SFTTrainer, trl.SFTConfig(**settings(tmp_path)), chats, {"processing_class": tiny_tokenizer()}),
            (
                trl.DPOTrainer,
                trl.DPOConfig(**settings(tmp_path)),
                preferences,
                {"processing_class": tiny_tokenizer(), "ref_model": tiny_model()},
            ),
        ]
        for trainer_class, args, rows, more in cases:
            with pytest.raises(UsageError, match="RoundPipeTrainer, RoundPipeSFTTrainer or RoundPipeDPOTrainer"):
                trainer_class(model=model, args=args, train_dataset=rows, **more)
        with pytest.raises(UsageError, match=r"RoundPipeTrainer or another class of roundpipe\.integrations"):
            model.to("cuda")  # what Trainer does first where there is a GPU


def test_wrapped_model_that_would_be_replaced_is_refused(tmp_path: Path) -> None:
    datasets, trl, peft = (pytest.importorskip(name) for name in ("datasets", "trl", "peft"))
    from roundpipe.integrations import RoundPipeSFTTrainer

    with (
        wrap_model_to_roundpipe(tiny_model(), devices=["cpu"]) as model,
        pytest.raises(UsageError, match="got a wrapped model and arguments that make another model of it"),
    ):
        RoundPipeSFTTrainer(
            model=model,
            args=trl.SFTConfig(**settings(tmp_path)),
            train_dataset=datasets.Dataset.from_list(chat_rows(4)),
            processing_class=tiny_tokenizer(),
            peft_config=peft.LoraConfig(**LORA),
        )


# Losses and gradients that are not finite.

BAD_STEP = 3
LAYER = "model.layers.1.mlp.down_proj"


class Poison(TrainerCallback):
    """Makes the forward or the backward of one layer give infinity in step 3."""

    def __init__(self, direction: str) -> None:
        self.direction = direction
        self.handles: list[Any] = []
        self.weights: dict[int, dict[str, Tensor]] = {}  # after each step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        module = model.original_model.get_submodule(LAYER)
        if state.global_step + 1 == BAD_STEP:
            if self.direction == "forward":
                hook = module.register_forward_hook(lambda module, args, output: output * float("inf"))
            else:
                hook = module.register_full_backward_hook(lambda module, grads, out: (grads[0] * float("nan"),))
            self.handles.append(hook)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.synchronize()  # the backward pass and an asynchronous step may still run
        while self.handles:
            self.handles.pop().remove()
        self.weights[state.global_step] = copies(model)


def copies(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def poisoned(tmp_path: Path) -> Any:
    made: list[Any] = []

    def make(direction: str, nonfinite: Any, *, is_async: bool = False) -> tuple[Any, Poison]:
        poison = Poison(direction)
        trainer = RoundPipeTrainer(
            tiny_model("llama"),
            arguments(tmp_path, max_steps=5, warmup_steps=0),
            train_dataset=token_rows(),
            callbacks=[poison],
            roundpipe=options(2, nonfinite=nonfinite, is_async=is_async),
        )
        made.append(trainer)
        return trainer, poison

    yield make
    for trainer in made:
        close(trainer)


@pytest.mark.parametrize("is_async", [False, True])
def test_loss_that_is_not_finite_stops_the_run(poisoned: Callable[..., Any], is_async: bool) -> None:
    trainer, poison = poisoned("forward", "stop", is_async=is_async)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    message = str(caught.value)
    assert message.startswith(f"the loss of step {BAD_STEP} is nan; {LAYER} is the first module whose output is not")
    assert 'RoundPipeOptions(nonfinite="skip")' in message
    trainer.model.synchronize()
    assert same(copies(trainer.model), poison.weights[BAD_STEP - 1])
    assert not same(poison.weights[BAD_STEP - 1], poison.weights[BAD_STEP - 2])


@pytest.mark.parametrize("is_async", [False, True])
def test_gradient_that_is_not_finite_stops_the_run(poisoned: Callable[..., Any], is_async: bool) -> None:
    """The gradients of all layers below the poisoned one are NaN; the error names the nearest ones."""
    trainer, poison = poisoned("backward", "stop", is_async=is_async)
    with pytest.raises(NonFiniteError, match="18 of 21 gradients contain infinity or NaN: those of") as caught:
        trainer.train()
    named = re.findall(r"'(.+?)'", str(caught.value))
    assert len(named) == 5
    assert all(name.startswith("model.layers.1.") for name in named)
    assert f"{LAYER}.weight" not in named
    assert f"in step {BAD_STEP}; no weight was changed" in "\n".join(caught.value.__notes__)
    trainer.model.zero_grad()
    trainer.model.synchronize()
    assert same(copies(trainer.model), poison.weights[BAD_STEP - 1])


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("is_async", [False, True])
def test_skipped_step_leaves_the_weights_and_training_goes_on(
    direction: str, is_async: bool, poisoned: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, poison = poisoned(direction, "skip", is_async=is_async)
    with caplog.at_level(logging.WARNING, "roundpipe"):
        trainer.train()
    assert re.search(rf"step {BAD_STEP} (is|was) skipped: .*model\.layers\.1", caplog.text)
    weights = poison.weights
    assert same(weights[BAD_STEP], weights[BAD_STEP - 1])
    assert not same(weights[BAD_STEP + 1], weights[BAD_STEP])
    assert all(bool(value.isfinite().all()) for value in weights[5].values())
    assert trainer.state.global_step == 5


def test_unchecked_steps_reach_the_weights(poisoned: Callable[..., Any]) -> None:
    trainer, poison = poisoned("backward", "off")
    trainer.train()
    assert not all(bool(value.isfinite().all()) for value in poison.weights[BAD_STEP].values())
    assert len(logged(trainer)) == 5


@pytest.mark.parametrize("nonfinite", ["skip", "off"])
def test_loss_that_is_not_finite_although_its_gradients_are(nonfinite: Any, tmp_path: Path) -> None:
    def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.square().mean() + float("inf")

    trainer: Any = RoundPipeTrainer(
        tiny_model(),
        arguments(tmp_path, max_steps=2),
        train_dataset=token_rows(),
        compute_loss_func=loss_func,
        roundpipe=options(2, nonfinite=nonfinite),
    )
    before = copies(trainer.model)
    trainer.train()
    assert same(copies(trainer.model), before) == (nonfinite == "skip")
    close(trainer)


def test_labels_can_be_the_cause(tmp_path: Path) -> None:
    """The modules' outputs are finite, and the loss is not."""

    def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return labels.numel() * outputs.logits.sum() / 0.0

    trainer: Any = RoundPipeTrainer(
        tiny_model(),
        arguments(tmp_path),
        train_dataset=token_rows(),
        compute_loss_func=loss_func,
        roundpipe=options(2),
    )
    with pytest.raises(NonFiniteError, match=r"the loss of step 1 is -?inf; the outputs of all modules are finite"):
        trainer.train()
    close(trainer)


def test_failure_of_the_last_asynchronous_step_is_raised_by_train(poisoned: Callable[..., Any]) -> None:
    trainer, poison = poisoned("backward", "stop", is_async=True)
    trainer.args.max_steps = BAD_STEP
    poison.on_step_end = lambda *args, **kwargs: None  # it waits for the step
    with pytest.raises(NonFiniteError, match="non-finite"):
        trainer.train()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trainers_of_trl_name_the_layer(kind: str, tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from roundpipe.integrations import RoundPipeDPOTrainer, RoundPipeSFTTrainer

    model = tiny_model("llama")
    with torch.no_grad():
        model.get_submodule(LAYER).weight[0, 0] = float("inf")
    common = {"model": model, "processing_class": tiny_tokenizer(), "roundpipe": options(2)}
    if kind == "sft":
        trainer: Any = RoundPipeSFTTrainer(
            args=trl.SFTConfig(**settings(tmp_path)), train_dataset=datasets.Dataset.from_list(chat_rows(8)), **common
        )
    else:
        trainer = RoundPipeDPOTrainer(
            args=trl.DPOConfig(**settings(tmp_path)),
            train_dataset=datasets.Dataset.from_list(preference_rows(8)),
            ref_model=tiny_model("llama", seed=5),
            **common,
        )
    with pytest.raises(NonFiniteError, match=re.escape(f"the loss of step 1 is nan; {LAYER} is the first module")):
        trainer.train()
    close(trainer)
