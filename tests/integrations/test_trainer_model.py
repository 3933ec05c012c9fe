"""A wrapped model as transformers, accelerate and peft see it, and models that are wrapped part by part."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from helpers_tiny_hf import VOCAB_SIZE, TokenRows, preference_rows, tiny_model, tiny_tokenizer
from helpers_trainers import arguments, close, logged, lora_model, options, settings, token_rows
from roundpipe import AutoRoundPipe, RoundPipe, wrap_model_to_roundpipe
from roundpipe.errors import ClosedError, OwnershipError
from roundpipe.integrations import RoundPipeDPOTrainer, RoundPipeMixin, RoundPipeTrainer


def test_accelerate_sees_one_model(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, bf16=True)
    ours: Any = RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=options(2))
    ours.train()
    model = ours.model
    assert ours.accelerator.unwrap_model(model) is model
    assert ours.accelerator.unwrap_model(ours.model_wrapped) is model
    assert model.to("cpu") is model
    assert not hasattr(model, "module"), "transformers takes a model with `module` for a container and unwraps it"
    batch = dict(next(iter(ours.get_train_dataloader())))
    with torch.no_grad():
        in_bf16 = model(**batch).loss
        assert ours.accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        in_float32 = model(**batch).loss
    plain = tiny_model()
    plain.load_state_dict(model.state_dict())
    assert float(in_float32) == pytest.approx(float(plain(**batch).loss.detach()), abs=1e-5)
    assert float(in_bf16) != float(in_float32)
    close(ours)


def test_forward_that_is_set_stays_on_the_wrapper() -> None:
    with wrap_model_to_roundpipe(tiny_model(), devices=["cpu"]) as model:
        own = model.original_model.forward
        ids = torch.arange(8).reshape(2, 4)
        usual = model.forward
        model.forward = lambda *args, **kwargs: ("changed", usual(*args, **kwargs))
        with torch.no_grad():
            word, outputs = model(input_ids=ids)
        assert (word, outputs.logits.shape) == ("changed", (2, 4, VOCAB_SIZE))
        assert model.original_model.forward == own
        assert "forward" not in vars(model.original_model)
        del model.forward
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, outputs.logits)


class Doubled(nn.Linear):
    def forward(self, points: torch.Tensor, *, times: int = 2) -> torch.Tensor:  # type: ignore[override]
        return times * super().forward(points)


@pytest.mark.parametrize(
    ("make", "is_split", "kind"),
    [
        (tiny_model, True, RoundPipe),
        (lora_model, True, RoundPipe),
        (lambda: Doubled(3, 3), True, RoundPipe),
        (lambda: tiny_model("llama"), False, AutoRoundPipe),
        (lambda: lora_model("llama"), False, AutoRoundPipe),
    ],
)
def test_signature_of_forward_is_the_models(make: Callable[[], Any], is_split: bool, kind: type) -> None:
    network = make()
    expected = inspect.signature(network.forward)
    with wrap_model_to_roundpipe(
        network, use_sequential_preset=None if is_split else False, devices=["cpu"], upper_threshold=2000
    ) as model:
        assert type(model) is kind
        assert inspect.signature(model.forward) == expected


@pytest.mark.parametrize("is_lora", [False, True])
def test_model_that_is_not_split_is_trained_part_by_part(
    is_lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsplit(self: Any, model: nn.Module, **kwargs: Any) -> Any:
        return wrap_model_to_roundpipe(
            model, use_sequential_preset=False, lower_threshold=1000, upper_threshold=2000, devices=["cpu"] * 2
        )

    monkeypatch.setattr(RoundPipeMixin, "wrapped", unsplit)
    found: list[list[dict[str, Any]]] = []
    for trainer_class in (Trainer, RoundPipeTrainer):
        model = lora_model("llama") if is_lora else tiny_model("llama")
        args = arguments(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2)
        trainer: Any = trainer_class(model, args, train_dataset=token_rows(), eval_dataset=TokenRows(6, seed=1))
        trainer.train()
        found.append([*logged(trainer), *(entry for entry in trainer.state.log_history if "eval_loss" in entry)])
    assert type(trainer.model) is AutoRoundPipe
    close(trainer)
    for mine, its in zip(found[1], found[0], strict=True):
        for name in {"loss", "eval_loss", "grad_norm", "learning_rate"} & its.keys():
            assert mine[name] == pytest.approx(its[name], abs=1e-5, rel=1e-4 if name == "grad_norm" else 0), name


def test_layer_norms_that_are_parts_do_not_decay(tmp_path: Path) -> None:
    """Trainer recognises them by their class, which a part must show; GPT-2 calls the last one ln_f."""
    sizes = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 16,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    network = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False))
    trainer: Any = RoundPipeTrainer(network, arguments(tmp_path), train_dataset=token_rows(), roundpipe=options())
    expected = Trainer.get_decay_parameter_names(trainer, network)
    close(trainer)
    with wrap_model_to_roundpipe(
        network, use_sequential_preset=False, lower_threshold=1, upper_threshold=1, devices=["cpu"]
    ) as model:
        assert isinstance(model.get_submodule("transformer.ln_f"), RoundPipe)
        found = trainer.get_decay_parameter_names(model)
    assert found == expected
    assert not {"transformer.h.0.ln_1.weight", "transformer.ln_f.weight"} & set(found)
    assert "transformer.h.0.attn.c_attn.weight" in found


def test_second_trainer_takes_the_model_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As if a cell of a notebook is run twice: the weights go on, the optimizer begins anew."""
    found = []
    for trainer_class, more in ((Trainer, {}), (RoundPipeTrainer, {"roundpipe": options(2)})):
        model, trainers = tiny_model(), []
        for _ in range(2):
            trainer: Any = trainer_class(model, arguments(tmp_path, max_steps=2), train_dataset=token_rows(), **more)
            trainer.train()
            trainers.append(trainer)
        found.append([step["loss"] for trainer in trainers for step in logged(trainer)])
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert "Qwen3ForCausalLM is closed: another trainer has taken its model over" in caplog.text
    with pytest.raises(ClosedError, match="was closed"):
        trainers[0].evaluate(TokenRows(4))
    close(trainers[1])


def test_second_trainer_takes_parts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is wrapped part by part contains the parts until it is closed."""
    in_parts = functools.partial(
        wrap_model_to_roundpipe, use_sequential_preset=False, lower_threshold=1000, upper_threshold=2000
    )
    monkeypatch.setattr("roundpipe.integrations.trainer.wrap_model_to_roundpipe", in_parts)
    model = tiny_model("llama")
    for _ in range(2):
        args = arguments(tmp_path, max_steps=1)
        trainer: Any = RoundPipeTrainer(model, args, train_dataset=token_rows(), roundpipe=options(2))
        assert type(trainer.model) is AutoRoundPipe
        trainer.train()
    close(trainer)
    assert not any(isinstance(module, RoundPipe) for module in model.modules())


def test_second_trainer_takes_a_reference_over(tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    reference = tiny_model(seed=5)
    for _ in range(2):
        trainer: Any = RoundPipeDPOTrainer(
            tiny_model(),
            reference,
            trl.DPOConfig(**settings(tmp_path, max_steps=1)),
            train_dataset=datasets.Dataset.from_list(preference_rows(4)),
            processing_class=tiny_tokenizer(),
            roundpipe=options(2),
        )
        trainer.train()
    close(trainer)


def test_model_that_the_user_has_wrapped_is_not_taken_over(tmp_path: Path) -> None:
    plain = tiny_model()
    with wrap_model_to_roundpipe(plain, devices=["cpu"]) as model:
        with pytest.raises(OwnershipError) as raised:
            RoundPipeTrainer(plain, arguments(tmp_path), train_dataset=token_rows(), roundpipe=options())
        assert "RoundPipeTrainer also takes a model that you have wrapped yourself" in raised.value.__notes__[0]
        with torch.no_grad():
            model(input_ids=torch.arange(8).reshape(2, 4))


def test_push_to_hub_of_the_model_delegates(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny_model()
    calls = []
    monkeypatch.setattr(type(network), "push_to_hub", lambda self, *args, **kwargs: calls.append((self, args, kwargs)))
    with wrap_model_to_roundpipe(network, devices=["cpu"]) as model:
        model.push_to_hub("name/of-it", private=True)
    assert calls == [(network, ("name/of-it",), {"private": True})]
