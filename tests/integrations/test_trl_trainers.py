"""RoundPipeMixin before any trainer that TRL exports takes the steps of the plain class, or is refused by name.

Each trainer takes two steps on a tiny model. The random generators are seeded before each step, because RoundPipe draws
one number per call and trainers that generate would then sample other completions.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification

from helpers_tiny_hf import (
    CHAT_TEMPLATE,
    SPECIAL,
    WORDS,
    chat_rows,
    preference_rows,
    save_tiny_model,
    tiny_model,
    tiny_tokenizer,
)
from helpers_trainers import LORA, SeedEachStep, logged, options, settings
from roundpipe.errors import ConfigError
from roundpipe.integrations import RoundPipeMixin

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

NUM_ROWS = 8
PREFERENCES = preference_rows(NUM_ROWS)
PROMPTS = [{"prompt": row["prompt"]} for row in PREFERENCES]
WITH_CONTEXT = [
    {"prompt": [{"role": "user", "content": row["prompt"]}], "privileged_context": "w1 w2"} for row in PROMPTS
]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a student and a teacher: some trainers load further copies of a model from its folder."""
    made = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(made / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


# The arguments of the trainers.


@dataclass
class Setup:
    """What a case needs to make the arguments of a trainer."""

    folder: Path
    models: dict[str, Path]

    def model(self, name: str = "student") -> Any:
        return AutoModelForCausalLM.from_pretrained(self.models[name], dtype=torch.float32)

    def given(self, config_class: Any, rows: list[Any], **changes: Any) -> dict[str, Any]:
        """The arguments that all trainers have."""
        usual = settings(self.folder, max_steps=2, gradient_accumulation_steps=1, warmup_steps=0)
        return {
            "model": self.model(),
            "args": config_class(**{**usual, **changes}),
            "train_dataset": datasets.Dataset.from_list(rows),
            "processing_class": left_padding(),
        }


def left_padding() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer


def byte_tokenizer() -> Any:
    """A byte-level tokenizer, which GOLDTrainer needs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(" w0123456789")
    tokenizer.train_from_iterator(
        [" ".join(WORDS)],
        trainers.BpeTrainer(
            vocab_size=64,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted({character for piece, _ in pieces for character in piece}),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def reward(completions: list[Any], **_: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(map(ord, text)) % 10 / 10 for text in texts]


def binary_reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(10 * value % 2) for value in reward(completions)]


def experimental(name: str) -> Any:
    return importlib.import_module(f"trl.experimental.{name}")


def for_sft(setup: Setup) -> dict[str, Any]:
    return setup.given(trl.SFTConfig, chat_rows(NUM_ROWS), max_length=32)


def for_dpo(setup: Setup) -> dict[str, Any]:
    return setup.given(trl.DPOConfig, PREFERENCES, max_length=32)


def for_bema_dpo(setup: Setup) -> dict[str, Any]:
    moving_average = experimental("bema_for_ref_model").BEMACallback(
        update_freq=1, update_ref_model=True, ref_model_update_freq=1
    )
    return {**for_dpo(setup), "callbacks": [moving_average]}


def for_kto(setup: Setup) -> dict[str, Any]:
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 2 else "rejected"], "label": bool(number % 2)}
        for number, row in enumerate(PREFERENCES)
    ]
    return setup.given(trl.KTOConfig, rows, max_length=32)


def for_reward(setup: Setup) -> dict[str, Any]:
    """With margins, which have half as many entries as the batch has rows."""
    rows = [{**row, "margin": number / 10} for number, row in enumerate(PREFERENCES)]
    return {**setup.given(trl.RewardConfig, rows, max_length=32), "model": classifier()}


def classifier() -> Any:
    torch.manual_seed(3)
    config = tiny_model().config
    config.num_labels = 1
    return Qwen3ForSequenceClassification(config)


def for_grpo(setup: Setup) -> dict[str, Any]:
    """With a reference that TRL loads from the model's folder."""
    changes = {"num_generations": 2, "max_completion_length": 5, "beta": 0.1}
    return {**setup.given(trl.GRPOConfig, PROMPTS, **changes), "reward_funcs": [reward]}


def for_gmpo(setup: Setup) -> dict[str, Any]:
    """With a reward model, which TRL calls in torch.inference_mode(), and a head in float32."""
    changes = {"num_generations": 2, "max_completion_length": 5, "cast_lm_head_to_fp32": True}
    return {
        **setup.given(experimental("gmpo").GMPOConfig, PROMPTS, **changes),
        "reward_funcs": [classifier()],
        "reward_processing_classes": [tiny_tokenizer()],
    }


def for_rloo(setup: Setup) -> dict[str, Any]:
    return {
        **setup.given(trl.RLOOConfig, PROMPTS, num_generations=2, max_completion_length=5),
        "reward_funcs": [reward],
    }


def for_distillation(setup: Setup) -> dict[str, Any]:
    given = setup.given(trl.DistillationConfig, PROMPTS, max_completion_length=5)
    return {**given, "teacher_model": setup.model("teacher")}


def for_server_distillation(setup: Setup) -> dict[str, Any]:
    config = experimental("server_distillation").ServerDistillationConfig
    return setup.given(config, PROMPTS, max_completion_length=5, teacher_model_server_url="http://teacher")


def for_a2po(setup: Setup) -> dict[str, Any]:
    changes = {"max_completion_length": 5, "num_value_samples": 2, "filter_all_incorrect": False}
    return {**setup.given(experimental("a2po").A2POConfig, PROMPTS, **changes), "reward_funcs": [binary_reward]}


def for_cpo(setup: Setup) -> dict[str, Any]:
    return setup.given(experimental("cpo").CPOConfig, PREFERENCES, max_length=32)


def for_orpo(setup: Setup) -> dict[str, Any]:
    return setup.given(experimental("orpo").ORPOConfig, PREFERENCES, max_length=32)


def for_tpo(setup: Setup) -> dict[str, Any]:
    rows = [{**row, "reference": row["chosen"] + " w3"} for row in PREFERENCES]
    return setup.given(experimental("tpo").TPOConfig, rows, max_length=32)


def for_gkd(setup: Setup) -> dict[str, Any]:
    given = setup.given(experimental("gkd").GKDConfig, chat_rows(NUM_ROWS), max_length=32, max_new_tokens=5)
    return {**given, "teacher_model": setup.model("teacher")}


def for_gold(setup: Setup) -> dict[str, Any]:
    changes = {"use_uld_loss": False, "max_length": 64, "max_completion_length": 5}
    given = setup.given(experimental("gold").GOLDConfig, chat_rows(NUM_ROWS), **changes)
    return {**given, "teacher_model": setup.model("teacher"), "processing_class": byte_tokenizer()}


def for_iw_opd(setup: Setup) -> dict[str, Any]:
    config = experimental("iw_opd").IWOPDConfig
    given = setup.given(config, chat_rows(NUM_ROWS), max_length=32, max_completion_length=5)
    return {**given, "teacher_model": setup.model("teacher")}


def for_online_dpo(setup: Setup) -> dict[str, Any]:
    config = experimental("online_dpo").OnlineDPOConfig
    return {**setup.given(config, PROMPTS, max_new_tokens=5, max_length=32), "reward_funcs": [reward]}


def for_sdft(setup: Setup) -> dict[str, Any]:
    changes = {"max_completion_length": 5, "num_generations": 2, "distillation_topk": 8}
    return setup.given(experimental("sdft").SDFTConfig, WITH_CONTEXT, **changes)


def for_sdpo(setup: Setup) -> dict[str, Any]:
    given = setup.given(experimental("sdpo").SDPOConfig, WITH_CONTEXT, max_completion_length=5, num_generations=2)
    return {**given, "reward_funcs": [binary_reward]}


CASES: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "trl.SFTTrainer": for_sft,
    "trl.DPOTrainer": for_dpo,
    "trl.KTOTrainer": for_kto,
    "trl.RewardTrainer": for_reward,
    "trl.GRPOTrainer": for_grpo,
    "trl.RLOOTrainer": for_rloo,
    "trl.DistillationTrainer": for_distillation,
    "trl.experimental.bema_for_ref_model.DPOTrainer": for_bema_dpo,
    "trl.experimental.gmpo.GMPOTrainer": for_gmpo,
    "trl.experimental.server_distillation.ServerDistillationTrainer": for_server_distillation,
    "trl.experimental.a2po.A2POTrainer": for_a2po,
    "trl.experimental.cpo.CPOTrainer": for_cpo,
    "trl.experimental.orpo.ORPOTrainer": for_orpo,
    "trl.experimental.tpo.TPOTrainer": for_tpo,
    "trl.experimental.gkd.GKDTrainer": for_gkd,
    "trl.experimental.gold.GOLDTrainer": for_gold,
    "trl.experimental.iw_opd.IWOPDTrainer": for_iw_opd,
    "trl.experimental.online_dpo.OnlineDPOTrainer": for_online_dpo,
    "trl.experimental.sdft.SDFTTrainer": for_sdft,
    "trl.experimental.sdpo.SDPOTrainer": for_sdpo,
}
# Relatives of the others, which `make test-slow` trains.
SLOW = {
    f"trl.experimental.{name}"
    for name in (
        "bema_for_ref_model.DPOTrainer",
        "gmpo.GMPOTrainer",
        "server_distillation.ServerDistillationTrainer",
        "a2po.A2POTrainer",
        "orpo.ORPOTrainer",
        "tpo.TPOTrainer",
        "iw_opd.IWOPDTrainer",
        "sdpo.SDPOTrainer",
        "gold.GOLDTrainer",
        "online_dpo.OnlineDPOTrainer",
    )
} | {"trl.RLOOTrainer"}
REFUSED = {
    "trl.experimental.async_grpo.AsyncGRPOTrainer": "GRPOTrainer",
    "trl.experimental.async_distillation.AsyncDistillationTrainer": "DistillationTrainer",
}
# Old names of the classes in `trl`: subclasses that only warn.
OLD_NAMES = {"trl.experimental.kto.KTOTrainer", "trl.experimental.distillation.DistillationTrainer"}


def exported() -> set[str]:
    """The full names of all trainer classes that TRL exports."""
    packages = [trl]
    for found in pkgutil.iter_modules(importlib.import_module("trl.experimental").__path__):
        if found.ispkg:
            packages.append(experimental(found.name))
    names = {f"{package.__name__}.{name}" for package in packages for name in dir(package) if not name.startswith("_")}
    return {name for name in names if name.endswith("Trainer")}


def class_of(name: str) -> Any:
    module, _, class_name = name.rpartition(".")
    return getattr(importlib.import_module(module), class_name)


def test_the_cases_are_all_trainers_that_trl_exports() -> None:
    assert exported() == {*CASES, *REFUSED, *OLD_NAMES}
    assert all(issubclass(class_of(name), class_of(f"trl.{name.rpartition('.')[2]}")) for name in OLD_NAMES)


# Runs.


class StubTeacher:
    """In place of a vLLM server: its log-probabilities depend on the tokens alone."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_sequence_logprobs(self, sequences: Any, prompt_lengths: Any, **_: Any) -> dict[str, Any]:
        completions = [tokens[length:] for tokens, length in zip(sequences, prompt_lengths, strict=True)]
        logprobs = [[[-1.0 - token / 64] for token in tokens] for tokens in completions]
        ids = [[[(token + 1) % 64] for token in tokens] for tokens in completions]
        return {"actual_logprobs": logprobs, "logprobs": logprobs, "logprob_token_ids": ids}


def run(trainer_class: Any, given: dict[str, Any], **more: Any) -> tuple[list[Any], set[str]]:
    """Train; returns what was logged in each step and the names of the weights that have changed."""
    random.seed(0)
    trainer = trainer_class(**{**given, "callbacks": [*given.get("callbacks", ()), SeedEachStep()], **more})
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    random.seed(0)
    torch.manual_seed(0)
    trainer.train()
    changed = {name for name, value in before.items() if not torch.equal(value, trainer.model.get_parameter(name))}
    for wrapper in getattr(trainer, "_wrapped_models", ()):
        wrapper.close()
    return [(step["loss"], step["grad_norm"]) for step in logged(trainer)], changed


def assert_takes_the_same_steps(name: str, setup: Setup, *, is_lora: bool = False) -> None:
    found = []
    for mixin, more in (((), {}), ((RoundPipeMixin,), {"roundpipe": options(2)})):
        given = CASES[name](setup)
        if is_lora:
            given["peft_config"] = peft.LoraConfig(**LORA)
        found.append(run(type("Tested", (*mixin, class_of(name)), {}), given, **more))
    (plain, plain_changed), (ours, changed) = found
    assert len(plain) == 2
    for (loss, norm), (expected_loss, expected_norm) in zip(ours, plain, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-5, rel=1e-5)
        assert norm == pytest.approx(expected_norm, abs=1e-7, rel=1e-4)
    assert any(norm > 0 for _, norm in plain)
    assert plain_changed
    assert {name for name in changed if ".teacher." not in name} == plain_changed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_trainer_takes_the_steps_of_the_plain_class(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.generation.vllm_client.VLLMClient", StubTeacher)
    assert_takes_the_same_steps(name, Setup(tmp_path, folders))


@pytest.mark.parametrize(
    "name",
    [
        "trl.GRPOTrainer",
        "trl.experimental.sdpo.SDPOTrainer",
        pytest.param("trl.KTOTrainer", marks=pytest.mark.slow),
        pytest.param("trl.experimental.sdft.SDFTTrainer", marks=pytest.mark.slow),
    ],
)
def test_model_without_its_adapter_is_the_reference(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """SDPOTrainer switches to a second adapter instead, a moving average of the first."""
    assert_takes_the_same_steps(name, Setup(tmp_path, folders), is_lora=True)


@pytest.mark.parametrize("name", REFUSED)
def test_trainers_with_weights_in_vllm_are_refused_by_name(name: str) -> None:
    refused = type("Tested", (RoundPipeMixin, class_of(name)), {})
    with pytest.raises(ConfigError, match=rf"{name.rpartition('.')[2]} sends weights.*use {REFUSED[name]} of TRL"):
        refused(model="any")


def test_distillation_says_that_it_computes_on_the_host(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Ours(RoundPipeMixin, trl.DistillationTrainer):  # type: ignore[misc]
        pass

    given = for_distillation(Setup(tmp_path, folders))
    trainer = Ours(**given, roundpipe=options())
    assert "computed on the CPU" in caplog.text
    for wrapper in trainer._wrapped_models:
        wrapper.close()
    caplog.set_level(logging.ERROR)
    with pytest.raises(ConfigError, match=r"use RoundPipeOptions\(is_async=False\)"):
        Ours(**for_distillation(Setup(tmp_path, folders)), roundpipe=options(is_async=True))


@pytest.mark.parametrize("name", ["trl.DPOTrainer", "trl.KTOTrainer"])
def test_prompt_without_a_reference_model_is_refused(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    given = CASES[name](Setup(tmp_path, folders))
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="no ref_model and a PROMPT_TUNING adapter"):
        type("Tested", (RoundPipeMixin, class_of(name)), {})(**given, peft_config=prompt, roundpipe=options())


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("trl.experimental.gold.GOLDTrainer", "use_vllm"),
        ("trl.GRPOTrainer", "use_transformers_continuous_batching"),
    ],
)
def test_other_ways_of_generating_are_refused(
    name: str, argument: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    given = CASES[name](Setup(tmp_path, folders))
    setattr(given["args"], argument, True)
    with pytest.raises(ConfigError, match=f"does not support {argument}=True"):
        type("Tested", (RoundPipeMixin, class_of(name)), {})(**given)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("trl.DPOTrainer", {"ld_alpha": 0.5}),
        ("trl.DPOTrainer", {"loss_type": ["exo_pair"], "label_smoothing": 0.1}),
        ("trl.KTOTrainer", {}),
        ("trl.RLOOTrainer", {}),
    ],
)
def test_losses_are_computed_in_host_memory_whatever_the_device(
    name: str,
    changes: dict[str, Any],
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine with a GPU, where accelerate names the GPU as the device."""
    given = CASES[name](Setup(tmp_path, folders))
    for option, value in changes.items():
        setattr(given["args"], option, value)
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    steps, changed = run(type("Tested", (RoundPipeMixin, class_of(name)), {}), given, roundpipe=options())
    assert len(steps) == 2
    assert changed
