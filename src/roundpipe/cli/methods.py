"""The training methods of `roundpipe train`: the trainer of each, the rows that it takes, and its usual learning rates.

Imports trainers only when they are asked for. Knows no data and no models.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import os
from typing import Any


class Head(enum.Enum):
    """What a model computes beside its blocks."""

    TOKENS = "causal language model"
    SCORE = "one number per sequence"
    CLASSES = "a class per sequence"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A training method.

    trainer: the name of its class in roundpipe.integrations.
    config: module and class of the trainer's arguments; each field is an option.
    shapes: the names of the forms of rows that it takes.
    lora_rate, full_rate: learning rates of runs without --lr.
    sequences: how many sequences of a row are in a batch.
    has_reference: whether a second model, with the weights of the start, computes beside the one that is trained.
    is_rewarded: whether the model answers prompts itself, and functions of the user reward the answers.
    """

    name: str
    title: str
    trainer: str
    config: tuple[str, str]
    shapes: tuple[str, ...]
    lora_rate: float
    full_rate: float
    head: Head = Head.TOKENS
    sequences: int = 1
    has_reference: bool = False
    is_rewarded: bool = False

    @property
    def is_of_trl(self) -> bool:
        """Whether the trainer is TRL's, which tokenizes rows and adds adapters, and not that of transformers."""
        return self.config[0].startswith("trl.")

    def config_class(self) -> Any:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the documents say which methods are experimental
        module, name = self.config
        return getattr(importlib.import_module(module), name)

    def trainer_class(self) -> Any:
        from roundpipe import integrations

        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        return getattr(integrations, self.trainer)


_PAIRS = ("preference",)
_METHODS = (
    Method(
        name="sft",
        title="supervised fine-tuning",
        trainer="RoundPipeSFTTrainer",
        config=("trl.trainer.sft_config", "SFTConfig"),
        shapes=("text", "prompt-completion", "messages", "sharegpt", "alpaca", "alpaca-text", "tokens"),
        lora_rate=2e-4,
        full_rate=1e-5,
    ),
    Method(
        name="dpo",
        title="direct preference optimization",
        trainer="RoundPipeDPOTrainer",
        config=("trl.trainer.dpo_config", "DPOConfig"),
        shapes=_PAIRS,
        lora_rate=1e-5,
        full_rate=1e-6,
        sequences=2,
        has_reference=True,
    ),
    Method(
        name="kto",
        title="Kahneman-Tversky optimization",
        trainer="RoundPipeKTOTrainer",
        config=("trl.trainer.kto_config", "KTOConfig"),
        shapes=("unpaired", *_PAIRS),
        lora_rate=1e-5,
        full_rate=1e-6,
        has_reference=True,
    ),
    Method(
        name="orpo",
        title="odds ratio preference optimization",
        trainer="RoundPipeORPOTrainer",
        config=("trl.experimental.orpo", "ORPOConfig"),
        shapes=_PAIRS,
        lora_rate=1e-5,
        full_rate=1e-6,
        sequences=2,
    ),
    Method(
        name="reward",
        title="reward model",
        trainer="RoundPipeRewardTrainer",
        config=("trl.trainer.reward_config", "RewardConfig"),
        shapes=_PAIRS,
        lora_rate=1e-4,
        full_rate=1e-5,
        head=Head.SCORE,
        sequences=2,
    ),
    Method(
        name="classify",
        title="sequence classification",
        trainer="RoundPipeTrainer",
        config=("transformers.training_args", "TrainingArguments"),
        shapes=("labelled",),
        lora_rate=2e-4,
        full_rate=2e-5,
        head=Head.CLASSES,
    ),
    Method(
        name="grpo",
        title="group relative policy optimization",
        trainer="RoundPipeGRPOTrainer",
        config=("trl.trainer.grpo_config", "GRPOConfig"),
        shapes=("prompt",),
        lora_rate=1e-5,
        full_rate=1e-6,
        is_rewarded=True,
    ),
)
METHODS = {method.name: method for method in _METHODS}
