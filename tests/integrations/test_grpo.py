"""RoundPipeGRPOTrainer takes the steps of TRL's GRPOTrainer, resumes exactly, and keeps one copy of the weights.

The random generators are seeded before each step where runs are compared with plain ones: RoundPipe draws one number
per call with gradients, so the plain run would sample other completions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from helpers_tiny_hf import preference_rows, save_tiny_model, tiny_tokenizer
from helpers_trainers import LORA, SeedEachStep, close, distinct_words, host_bytes, logged, options, settings
from roundpipe.integrations import RoundPipeGRPOTrainer

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

ROWS = [{"prompt": row["prompt"]} for row in preference_rows(12)]
STEPS = 4
# Completions are made for two steps, so the second trains on those of older weights, with their log-probabilities.
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "warmup_steps": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets.disable_progress_bars()
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def given(folder: Path, out: Path, *, is_lora: bool = False, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(1)  # of the adapter
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    return {
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        "reward_funcs": distinct_words,
        "args": trl.GRPOConfig(**settings(out, **{**SETTINGS, **changes})),
        "train_dataset": datasets.Dataset.from_list(ROWS),
        "processing_class": tokenizer,
        **({"peft_config": peft.LoraConfig(**LORA)} if is_lora else {}),
    }


def outcome_of(trainer: Any, **train: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What each step has logged of the data and the loss, and the weights at the end."""
    trainer.train(**train)
    names = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length", "kl")
    steps = [{name: entry[name] for name in names if name in entry} for entry in logged(trainer)]
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    close(trainer)
    return steps, weights


@pytest.mark.parametrize(
    ("is_lora", "beta"),
    [(False, 0.0), pytest.param(False, 0.1, marks=pytest.mark.slow), (True, 0.1)],
    ids=["full", "full, reference", "lora, reference"],
)
def test_steps_are_those_of_the_plain_trainer(is_lora: bool, beta: float, folder: Path, tmp_path: Path) -> None:
    def made(trainer_class: Any, **more: Any) -> Any:
        return trainer_class(**given(folder, tmp_path, is_lora=is_lora, beta=beta), callbacks=[SeedEachStep()], **more)

    plain_steps, plain_weights = outcome_of(made(trl.GRPOTrainer))
    assert len(plain_steps) == STEPS
    assert all(step["grad_norm"] > 0.2 and ("kl" in step) == (beta > 0) for step in plain_steps), "each step must clip"
    one, three = (outcome_of(made(RoundPipeGRPOTrainer, roundpipe=options(number))) for number in (1, 3))
    for found, expected in zip(one[0], plain_steps, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5, rel=0)
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-4)
    assert one[1].keys() == plain_weights.keys()
    for name, value in plain_weights.items():
        assert float((one[1][name] - value).abs().max()) < 1e-5, name
    assert three[0] == one[0]
    assert all(torch.equal(three[1][name], value) for name, value in one[1].items())


class Crash(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_resumed_run_goes_on_with_the_same_completions(is_lora: bool, folder: Path, tmp_path: Path) -> None:
    """The checkpoint is written between two steps on the same completions."""
    saves = {"save_strategy": "steps", "save_steps": 3, "beta": 0.1}

    def made(name: str, num_devices: int, *callbacks: Any) -> Any:
        arguments = given(folder, tmp_path / name, is_lora=is_lora, **saves)
        return RoundPipeGRPOTrainer(**arguments, callbacks=list(callbacks), roundpipe=options(num_devices))

    whole = outcome_of(made("whole", 1))
    torn = made("torn", 1, Crash())
    with pytest.raises(KeyboardInterrupt):
        torn.train()
    close(torn)
    resumed = outcome_of(made("torn", 3), resume_from_checkpoint=True)
    assert resumed[0] == whole[0]
    assert all(torch.equal(resumed[1][name], value) for name, value in whole[1].items())


def test_log_probabilities_without_gradients_take_one_call(folder: Path, tmp_path: Path) -> None:
    arguments = given(folder, tmp_path, beta=0.1, max_steps=1)
    trainer = RoundPipeGRPOTrainer(**arguments, roundpipe=options(2, num_microbatch=2))
    rows: dict[str, list[int]] = {"policy": [], "reference": []}

    def watch(name: str, model: Any) -> None:
        call = model.forward

        def forward(**kwargs: Any) -> Any:
            if not torch.is_grad_enabled() and "labels" in kwargs:
                rows[name].append(len(kwargs["input_ids"]))
            return call(**kwargs)

        model.forward = forward

    watch("policy", trainer.model)
    watch("reference", trainer.ref_model)
    trainer.train()
    close(trainer)
    # Four batches of four rows are generated together.
    assert rows == {"policy": [16], "reference": [16]}


def test_completions_leave_no_second_copy_of_the_weights(folder: Path, tmp_path: Path) -> None:
    """Weights lie on the device only while completions are made. Devices of this test are in host memory."""
    found: list[int] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        found.append(host_bytes())
        return distinct_words(completions)

    arguments = given(folder, tmp_path, max_steps=2, steps_per_generation=2)
    trainer = RoundPipeGRPOTrainer(**{**arguments, "reward_funcs": reward}, roundpipe=options(2))
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert trainer.ref_model is None
    before = host_bytes()
    trainer.train()
    close(trainer)
    assert len(found) == 2
    assert found[0] - before < weights / 2


def test_tensors_of_trl_are_in_host_memory_whatever_the_device(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with a GPU, where accelerate names the GPU as the device."""
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    trainer = RoundPipeGRPOTrainer(**given(folder, tmp_path, max_steps=1), roundpipe=options())
    assert trainer.accelerator.device == torch.device("cpu")
    assert Accelerator().device == torch.device("meta")  # of the others
    steps, _ = outcome_of(trainer)
    assert steps[0]["grad_norm"] > 0
