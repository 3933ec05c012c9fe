"""GRPO with completions of a vLLM server: it gets each weight once per update, with the values after the newest step.

vLLM needs GPUs. A stand-in for TRL's client takes the weights by their names into a model of transformers and samples
from it, with the probabilities that TRL compares with those of the trained model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers_tiny_hf import preference_rows, save_tiny_model, tiny_tokenizer
from helpers_trainers import LORA, SeedEachStep, close, distinct_words, host_bytes, logged, options, settings
from roundpipe.errors import ConfigError
from roundpipe.integrations import RoundPipeGRPOTrainer, RoundPipeMixin

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

STEPS = 4
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_generations": 2,
    "max_completion_length": 6, "warmup_steps": 0, "use_vllm": True, "vllm_mode": "server",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets.disable_progress_bars()
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Server:
    """What TRL's client does with a server, in this process."""

    folder: ClassVar[Path]
    last: ClassVar[Server]

    def __init__(self, base_url: str, group_port: int, connection_timeout: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.updates: list[dict[str, Tensor]] = []
        self.resets = 0
        self.peak_bytes = 0
        self.device: Any = None
        Server.last = self

    def get_server_info(self) -> dict[str, Any]:
        return {"weight_transfer_config": {}, "model_config": {"logprobs_mode": "processed_logprobs"}}

    def init_communicator(self, device: Any) -> None:
        self.device = device

    def update_named_params(self, metadata: list[Any], named: Iterator[tuple[str, Tensor]]) -> None:
        before, received = host_bytes(), dict[str, Tensor]()
        measured = (0, len(metadata) // 2, len(metadata) - 1)  # a look at all objects takes seconds in a long session
        for number, ((name, dtype, shape), (given, value)) in enumerate(zip(metadata, named, strict=True)):
            assert (name, f"torch.{dtype}", shape) == (given, str(value.dtype), list(value.shape))
            assert name not in received
            if number in measured:
                added = host_bytes() - before - sum(x.nbytes for x in received.values())
                self.peak_bytes = max(self.peak_bytes, added)
            received[name] = value.clone()
        self.updates.append(received)
        places = dict(self.model.named_parameters())
        assert received.keys() == places.keys()
        for name, value in received.items():
            places[name].data.copy_(value)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(len(self.updates))
        found: dict[str, Any] = {"prompt_ids": prompts, "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            for _ in range(n):
                tokens, logprobs = list(prompt), []
                for _ in range(max_tokens):
                    scores = self.model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
                    tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
                    logprobs.append([float(scores[tokens[-1]])])
                found["completion_ids"].append(tokens[len(prompt) :])
                found["logprobs"].append(logprobs)
        return found


@pytest.fixture(autouse=True)
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "folder", folder, raising=False)
    monkeypatch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda: True)
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMClient", Server)


def given(folder: Path, out: Path, *, is_lora: bool = False, **changes: Any) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    torch.manual_seed(1)  # of the adapter
    return {
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        "reward_funcs": distinct_words,
        "args": trl.GRPOConfig(**settings(out, **{**SETTINGS, **changes})),
        "train_dataset": datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in preference_rows(12)]),
        "processing_class": tokenizer,
        **({"peft_config": peft.LoraConfig(**LORA)} if is_lora else {}),
    }


def outcome_of(trainer: Any) -> tuple[list[dict[str, float]], Server]:
    trainer.train()
    names = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length")
    steps = [{name: entry[name] for name in names if name in entry} for entry in logged(trainer)]
    # The server's probabilities are those of the trained model: it has the same weights.
    name = "sampling/sampling_logp_difference/max"
    assert max(entry[name] for entry in logged(trainer) if name in entry) < 1e-5
    close(trainer)
    return steps, Server.last


@pytest.mark.parametrize("is_lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_steps_and_weights_are_those_of_the_plain_trainer(is_lora: bool, folder: Path, tmp_path: Path) -> None:
    arguments = given(folder, tmp_path, is_lora=is_lora)
    plain_steps, plain = outcome_of(trl.GRPOTrainer(**arguments, callbacks=[SeedEachStep()]))
    arguments = given(folder, tmp_path, is_lora=is_lora)
    trainer = RoundPipeGRPOTrainer(**arguments, callbacks=[SeedEachStep()], roundpipe=options(3))
    frozen = {name: value.clone() for name, value in trainer.model.named_parameters() if not value.requires_grad}
    steps, ours = outcome_of(trainer)
    for found, expected in zip(steps, plain_steps, strict=True):
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-4)
    # Completions are made for two steps: one update for each.
    assert len(ours.updates) == len(plain.updates) == ours.resets == STEPS // 2
    for received, expected_weights in zip(ours.updates, plain.updates, strict=True):
        assert list(received) == list(expected_weights)
        assert all(float((value - expected_weights[name]).abs().max()) < 1e-5 for name, value in received.items())
    assert not all(torch.equal(value, ours.updates[1][name]) for name, value in ours.updates[0].items())
    for name, value in frozen.items():  # merging has left no trace
        assert torch.equal(value, dict(trainer.model.named_parameters())[name]), name
    weights = sum(value.nbytes for value in ours.updates[0].values())
    assert ours.peak_bytes < weights / 4
    assert ours.device == torch.device("cpu")


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["exact", "stale"])
@pytest.mark.slow
def test_server_has_the_weights_after_the_newest_step(is_async: bool, folder: Path, tmp_path: Path) -> None:
    """The masters are the newest weights, also while a step that has returned still runs."""
    masters: list[dict[str, Tensor]] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        trainer.model.synchronize()
        masters.append({name: value.detach().clone() for name, value in trainer.model.optim_named_parameters()})
        return distinct_words(completions)

    arguments = given(folder, tmp_path, steps_per_generation=2)
    trainer = RoundPipeGRPOTrainer(**{**arguments, "reward_funcs": reward}, roundpipe=options(2, is_async=is_async))
    trainer.train()
    close(trainer)
    assert len(masters) == len(Server.last.updates) == STEPS
    for number, (received, newest) in enumerate(zip(Server.last.updates, masters, strict=True)):
        assert all(torch.equal(value, newest[name]) for name, value in received.items())
        is_first = number == 0
        assert is_first or not all(torch.equal(value, masters[number - 1][name]) for name, value in newest.items())


def test_client_sends_from_the_first_device(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM receives from GPUs alone; accelerate names the host as the device, where the weights are."""
    first = property(lambda self: torch.device("meta"))
    monkeypatch.setattr(RoundPipeMixin, "_first_device", first)
    trainer = RoundPipeGRPOTrainer(**given(folder, tmp_path), roundpipe=options())
    assert Server.last.device == torch.device("meta")
    assert {value.device.type for _, value in trainer.vllm_generation._iter_named_params()} == {"meta"}
    assert trl.generation.vllm_generation.VLLMClient is Server  # of other trainers
    close(trainer)


@pytest.mark.parametrize(
    ("changes", "roundpipe", "message"),
    [
        ({"vllm_mode": "colocate"}, {}, "does not support vllm_mode='colocate'; use vllm_mode=\"server\""),
        ({}, {"frozen_weights": "int8"}, "does not go with weights in few bits, and .*weight_int8 is torch.uint8"),
    ],
)
def test_what_the_server_cannot_get_is_refused(
    changes: dict[str, Any], roundpipe: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    arguments = given(folder, tmp_path, is_lora=bool(roundpipe), **changes)
    with pytest.raises(ConfigError, match=message):
        RoundPipeGRPOTrainer(**arguments, roundpipe=options(**roundpipe))
