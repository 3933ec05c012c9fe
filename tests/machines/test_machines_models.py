"""Several machines: memory and bytes on the wire, transformers, LoRA, parts, several models, and the start."""

from __future__ import annotations

import pytest
import torch
from machine_models import (
    memory_and_bytes,
    read_what_is_divided,
    say_alone,
    start_with_other_weights,
    train_parts,
    train_transformer,
    train_two_models,
)

from helpers_machines import MachinePool, values

pytestmark = pytest.mark.timeout(120)


def test_memory_and_bytes_per_parameter(pool: MachinePool) -> None:
    size = 4
    for result in values(pool.run(size, memory_and_bytes)):
        assert result["memory"] <= 1.05 * (2 + 2 + 10 / size)
        assert result["sent"] == pytest.approx(4 * (size - 1) / size, rel=0.03)


@pytest.mark.parametrize(
    ("lora", "loop"),
    [
        (False, "exact"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((True, "stale"), (True, "exact"), (True, "plain"), (False, "stale"), (False, "plain"))
        ),
    ],
)
def test_a_model_of_transformers(pool: MachinePool, lora: bool, loop: str) -> None:
    pytest.importorskip("peft" if lora else "transformers")
    (alone,) = values(pool.run(1, train_transformer, False, lora, loop, torch.float64))
    for size in (2, 3) if loop == "exact" else (3,):
        results = values(pool.run(size, train_transformer, True, lora, loop, torch.float64))
        for result in results:
            # transformers computes the loss in float32.
            assert result["losses"] == pytest.approx(alone["losses"], rel=1e-6)
            for name, weight in alone["weights"].items():
                assert torch.equal(result["weights"][name], results[0]["weights"][name])
                torch.testing.assert_close(result["weights"][name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_model_of_parts(pool: MachinePool, is_async: bool) -> None:
    (alone,) = values(pool.run(1, train_parts, False, is_async))
    for result in values(pool.run(3, train_parts, True, is_async)):
        for name, weight in alone.items():
            torch.testing.assert_close(result[name], weight, rtol=0, atol=1e-12)


def test_two_models_at_the_same_time(pool: MachinePool) -> None:
    (alone,) = values(pool.run(1, train_two_models, False))
    results = values(pool.run(3, train_two_models, True))
    for result in results:
        assert result["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        for weight, other, reference in zip(result["weights"], results[0]["weights"], alone["weights"], strict=True):
            assert torch.equal(weight, other)
            torch.testing.assert_close(weight, reference, rtol=0, atol=3e-7)


@pytest.mark.parametrize("differ", [False, True])
def test_weights_are_equal_at_the_start(pool: MachinePool, differ: bool) -> None:
    results = values(pool.run(3, start_with_other_weights, differ))
    for state, _ in results:
        for name, value in results[0][0].items():
            if "running" not in name:  # each machine goes on with the rows that it has
                assert torch.equal(state[name], value), name
    assert any("differed between the machines" in record for record in results[0][1]) is differ


def test_divided_values_cannot_be_read(pool: MachinePool) -> None:
    for errors in values(pool.run(2, read_what_is_divided)):
        assert len(errors) == 4, errors
        assert "shares the memory" in errors[0]
        assert "1/2 of the optimizer's copy" in errors[1]
        assert "state_dict()" in errors[2]
        assert "optim_parameters()" in errors[3]


def test_no_process_group_means_alone_and_the_log_says_so_once(pool: MachinePool) -> None:
    for records in values(pool.run(2, say_alone)):
        assert len(records) == 1
        assert "process_group is None" in records[0]
