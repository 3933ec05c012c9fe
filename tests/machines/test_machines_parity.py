"""Several machines give the numbers of one machine that runs all their microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_training import Case, reference_of_ranges, train

from helpers_machines import MachinePool, values
from roundpipe.store.values import BLOCK

pytestmark = pytest.mark.timeout(120)

F64 = torch.float64
BF16 = {"dtype": torch.bfloat16, "optim_dtype": torch.float32}
# In float64 a sum in another order differs by rounding alone, so a wrong factor or a missing part shows.


def half_of(cases: Mapping[str, Case]) -> list[Any]:
    """The names of cases, of which every second one runs in `make test-slow` alone."""
    return [pytest.param(name, marks=pytest.mark.slow) if at % 2 else name for at, name in enumerate(cases)]


EXACT_CASES = {
    "float64": Case(dtype=F64),
    "dropout": Case(dtype=F64, dropout=0.3),
    "stale": Case(dtype=F64, is_async=True, dropout=0.3),
    "accumulation": Case(dtype=F64, calls_per_step=2),
    "clipping": Case(dtype=F64, clip="ours"),
    "torch's clipping": Case(dtype=F64, clip="torch's"),
    "scaler": Case(dtype=F64, scaler=True),
    "mean": Case(dtype=F64, loss_reduction="mean"),
    "tied": Case(dtype=F64, tied=True),
    "frozen": Case(dtype=F64, frozen=True),
    "unused": Case(dtype=F64, unused=True),
    "foreign optimizer": Case(dtype=F64, optimizer="torch.SGD"),
    "plain loop": Case(dtype=F64, loop="plain"),
    "plain loop, clipping": Case(dtype=F64, loop="plain", clip="ours", calls_per_step=2),
    "plain loop, torch's clipping": Case(dtype=F64, loop="plain", clip="torch's"),
}
# The divided path: float32 masters that the kernel updates.
DIVIDED_CASES = {
    "float32": Case(),
    "dropout": Case(dropout=0.3),
    "stale": Case(is_async=True, dropout=0.3),
    "by layer": Case(by_layer=True, dropout=0.3, num_steps=4),
    "accumulation": Case(calls_per_step=2),
    "by layer, clipping": Case(by_layer=True, clip="ours", num_steps=4),
    "clipping": Case(clip="ours"),
    "torch's clipping": Case(clip="torch's", is_async=True),
    "scaler": Case(scaler=True),
    "overflow": Case(scaler=True, overflow=True),
    "mean": Case(loss_reduction="mean"),
    "tied": Case(tied=True),
    "frozen": Case(frozen=True),
    "unused": Case(unused=True),
    "Adam": Case(optimizer="Adam"),
    "SGD": Case(optimizer="SGD", clip="ours"),
    "plain loop": Case(loop="plain"),
    "plain loop, clipping": Case(loop="plain", clip="ours"),
    "plain loop, torch's clipping": Case(loop="plain", clip="torch's", calls_per_step=2),
}
BF16_CASES = {
    "exact": Case(**BF16),
    "stale": Case(**BF16, is_async=True),
    "by layer": Case(**BF16, by_layer=True, num_steps=4),
    "by layer, clipping": Case(**BF16, by_layer=True, num_steps=4, clip="ours"),
    "dropout": Case(**BF16, dropout=0.3),
    "accumulation": Case(**BF16, calls_per_step=2),
    "clipping": Case(**BF16, clip="ours"),
    "Lion": Case(**BF16, optimizer="Lion", dropout=0.3),
    "Lion, stale": Case(**BF16, optimizer="Lion", is_async=True, calls_per_step=2),
    "SGD": Case(**BF16, optimizer="SGD"),
    "24 bits": Case(**BF16, master_bits=24),
    "24 bits, SGD of torch": Case(**BF16, master_bits=24, optimizer="torch.SGD", is_async=True),
}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def trained(pool: MachinePool, size: int, case: Case, copies_seed: int | None = None) -> dict[str, Any]:
    """The result of a training; checks that all machines have the same one."""
    first, *others = values(pool.run(size, train, case, True, copies_seed))
    for other in others:
        assert all(torch.equal(other["weights"][name], first["weights"][name]) for name in first["weights"])
        assert other["norms"] == first["norms"]
        assert case.loop == "plain" or other["losses"] == first["losses"]
    return first


@pytest.mark.parametrize("name", half_of(EXACT_CASES))
def test_losses_and_weights_in_float64(pool: MachinePool, name: str) -> None:
    case = EXACT_CASES[name]
    alone = values(pool.run(1, train, case, False))[0]
    for size in (2, 3, 4) if name in ("float64", "dropout") else (3,):
        together = trained(pool, size, case)
        assert largest_difference(alone["weights"], together["weights"]) < 1e-12
        if case.loop == "step":
            assert together["losses"] == pytest.approx(alone["losses"], rel=1e-13)
        assert together["norms"] == pytest.approx(alone["norms"], rel=1e-13)


@pytest.mark.parametrize("name", half_of(DIVIDED_CASES))
def test_divided_masters_in_float32(pool: MachinePool, name: str) -> None:
    case = DIVIDED_CASES[name]
    alone = values(pool.run(1, train, case, False))[0]
    for size in (2, 3, 4) if name in ("float32", "stale") else (3,):
        together = trained(pool, size, case)
        assert largest_difference(alone["weights"], together["weights"]) < 3e-7, "weights are below 1"
        if case.loop == "step":
            assert together["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert together["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        assert not case.overflow or (alone["norms"] == [16.0] and alone["losses"][1] == float("inf"))


@pytest.mark.parametrize("name", BF16_CASES)
def test_bfloat16_equals_a_reference_that_sums_in_the_order_of_ranks(pool: MachinePool, name: str) -> None:
    case = BF16_CASES[name]
    for size in (2, 3, 4) if name == "exact" else (3,):
        together = trained(pool, size, case)
        reference = values(pool.run(1, reference_of_ranges, case, size))[0]
        assert together["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        if case.clip:
            # A norm is a sum over ranges, so the factor may differ in its last bit, and a weight below 1 in its own.
            assert largest_difference(together["weights"], reference["weights"]) <= 2**-8
        else:
            assert largest_difference(together["weights"], reference["weights"]) == 0.0


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranges_of_whole_blocks(pool: MachinePool, optimizer: str, size: int) -> None:
    """Weights of three blocks and biases of less than one; with four machines the first one has nothing."""
    check_ranges(pool, Case(**BF16, optimizer=optimizer, width=68), size)


@pytest.mark.parametrize(
    ("moments", "optimizer", "size"),
    [
        ("8bit", "AdamW", 2),
        pytest.param("8bit", "AdamW", 3, marks=pytest.mark.slow),
        pytest.param("8bit", "Lion", 4, marks=pytest.mark.slow),
        ("bfloat16", "AdamW", 3),
    ],
)
def test_ranges_of_low_bit_moments(pool: MachinePool, moments: str, optimizer: str, size: int) -> None:
    """Elements are rounded by their number in the whole parameter, so ranges have the bits of one machine."""
    check_ranges(pool, Case(**BF16, optimizer=optimizer, moments=moments, width=68), size)


def check_ranges(pool: MachinePool, case: Case, size: int) -> None:
    first, *others = values(pool.run(size, train, case, block=BLOCK))
    reference = values(pool.run(1, reference_of_ranges, case, size))[0]
    for machine in (first, *others):
        assert largest_difference(machine["weights"], reference["weights"]) == 0.0


def test_ranges_of_masters_of_24_bits(pool: MachinePool) -> None:
    check_ranges(pool, Case(**BF16, moments="8bit", width=68, master_bits=24), 2)


def test_state_in_files_has_the_bits_of_state_in_memory(pool: MachinePool, tmp_path: Path) -> None:
    case = Case(**BF16, is_async=True, clip="ours", width=260)  # each machine has 135 kB of a moment
    expected = trained(pool, 2, case)
    found = trained(pool, 2, dataclasses.replace(case, state_folder=str(tmp_path)))
    assert found["num_files"] == 8, "two moments of four weights"
    assert found["losses"] == expected["losses"]
    assert largest_difference(found["weights"], expected["weights"]) == 0.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_machine_without_elements_knows_the_norm(pool: MachinePool, norm_type: float) -> None:
    case = Case(clip="ours", norm_type=norm_type, optimizer="SGD")
    alone = values(pool.run(1, train, case, False))[0]
    for machine in values(pool.run(3, train, case, block=BLOCK)):
        assert machine["norms"] == pytest.approx(alone["norms"], rel=1e-6)


@pytest.mark.parametrize("case", [Case(), Case(**BF16, is_async=True, dropout=0.3), Case(loop="plain", clip="ours")])
def test_a_group_of_one_has_the_bits_of_no_group(pool: MachinePool, case: Case) -> None:
    (alone,), (group,) = (values(pool.run(1, train, case, has_group)) for has_group in (False, True))
    assert group["losses"] == alone["losses"]
    assert largest_difference(group["weights"], alone["weights"]) == 0.0
    assert group["sent"] is None, "it opens no connection"


@pytest.mark.parametrize(
    "case",
    [
        Case(**BF16, dropout=0.3),
        Case(is_async=True, clip="ours"),
        Case(loop="plain"),
        Case(by_layer=True, clip="ours", num_steps=4),
    ],
)
def test_a_repeated_run_has_the_same_bits_whenever_copies_run(pool: MachinePool, case: Case) -> None:
    first, second, third = (trained(pool, 3, case, seed) for seed in (None, 7, 8))
    assert third["losses"] == second["losses"]
    assert largest_difference(third["weights"], second["weights"]) == 0.0
    assert first["losses"] == second["losses"]
    assert largest_difference(first["weights"], second["weights"]) == 0.0
