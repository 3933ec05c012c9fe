"""Trainers whose layers are compiled: like the plain trainer to rounding, the same bits on all devices, resumed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from helpers_slow import slow_except
from helpers_tiny_hf import tiny_model
from helpers_trainers import (
    arguments,
    assert_like_plain,
    assert_same_bits,
    close,
    lora_model,
    options,
    outcome_of,
    token_rows,
)
from roundpipe import wrap_model_to_roundpipe
from roundpipe.compiled import compilations
from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.integrations import RoundPipeOptions, RoundPipeTrainer

EAGER = {"backend": "eager"}


@pytest.mark.parametrize(
    ("make", "how", "backend"),
    slow_except(
        [(tiny_model, "arguments", "eager")],
        [
            (tiny_model, "arguments", "eager"),
            (lora_model, "options", "eager"),
            (tiny_model, "options", "aot_eager"),
            (lora_model, "arguments", "aot_eager"),
        ],
    ),
)
def test_compiled_layers_train_like_the_plain_trainer(make: Any, how: str, backend: str, tmp_path: Path) -> None:
    plain = outcome_of(Trainer(make(), arguments(tmp_path), train_dataset=token_rows()))
    found = []
    before = compilations().graphs
    for num_devices in (1, 3):
        changes = {"torch_compile_backend": backend} if how == "arguments" else {}
        given = {"compile": {"backend": backend}} if how == "options" else {}
        args, roundpipe = arguments(tmp_path, **changes), options(num_devices, **given)
        found.append(outcome_of(RoundPipeTrainer(make(), args, train_dataset=token_rows(), roundpipe=roundpipe)))
    assert compilations().graphs > before
    assert_like_plain(found[0], plain)
    assert_same_bits(found[1], found[0])


def test_a_resumed_compiled_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    def trainer(folder: str, **changes: Any) -> Any:
        args = arguments(tmp_path / folder, save_strategy="steps", save_steps=2, **changes)
        return RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=options(2, compile=EAGER))

    unbroken = trainer("a")
    unbroken.train()
    resumed = trainer("b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    expected, found = unbroken.model.state_dict(), resumed.model.state_dict()
    assert all((found[name] == expected[name]).all() for name in expected)
    for each in (unbroken, resumed):
        close(each)


def test_compile_true_takes_backend_and_mode_of_the_arguments(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile_backend="eager", torch_compile_mode="default")
    found = [RoundPipeOptions(compile=value).completed(args).compile for value in (None, True, {"dynamic": True})]
    assert found == [*[{"backend": "eager", "mode": "default"}] * 2, {"dynamic": True}]
    assert RoundPipeOptions(compile=True).completed(arguments(tmp_path)).compile is True


def test_the_options_go_before_the_arguments(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile=True, max_steps=1)
    trainer = RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=options(compile=False))
    before = compilations().graphs
    trainer.train()
    assert compilations().graphs == before
    close(trainer)


def test_modes_with_cuda_graphs_are_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile_mode="reduce-overhead")
    with pytest.raises(ConfigError, match="CUDA graphs keep the addresses of weights"):
        RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=options())
    with pytest.raises(ArgumentTypeError, match="compile must be True, False or a dict"):
        RoundPipeOptions(compile="yes")  # type: ignore[arg-type]


def test_a_model_that_is_wrapped_already_runs_as_it_was_wrapped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = wrap_model_to_roundpipe(tiny_model(), devices=["cpu"])
    with caplog.at_level(logging.WARNING):
        args = arguments(tmp_path, torch_compile=True)
        close(RoundPipeTrainer(model, args, train_dataset=token_rows(), roundpipe=options()))
    assert "the model runs as it was wrapped: for compiled layers" in caplog.text


def test_graphs_and_seconds_are_counted(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1)
    trainer = RoundPipeTrainer(tiny_model(), args, train_dataset=token_rows(), roundpipe=options(compile=EAGER))
    before = compilations()
    trainer.train()
    stats = trainer.model.stats()
    assert stats.compiled_graphs > before.graphs
    assert stats.compile_s > before.seconds
    close(trainer)
