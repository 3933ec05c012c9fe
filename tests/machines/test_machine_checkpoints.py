"""Checkpoints over machines: ranges in one folder, loaded on another number of machines; failures of one machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import (
    Run,
    be_killed_while_saving,
    fail_to_save,
    load_alone,
    load_and_compare,
    load_and_go_on,
    load_other,
    save_alone,
    save_and_go_on,
    save_and_load_with_other_arguments,
    save_in_own_folder,
)
from torch import Tensor

from helpers_checkpoint import assert_same_bits
from helpers_machines import SMALL_BLOCK, MachinePool, values
from roundpipe.checkpoint import latest, verify
from roundpipe.store.forms import elements_per_entry
from roundpipe.store.values import BLOCK

pytestmark = pytest.mark.timeout(110)
RUNS = {
    "exact": Run(),
    "stale": Run(is_async=True),
    "float32": Run(dtype=torch.float32),
    "frozen part": Run(kind="frozen"),
    "not row-major": Run(kind="transposed"),
    "optimizer of torch": Run(optimizer="torch.SGD"),
    "float16": Run(dtype=torch.float16),
    "tied": Run(kind="tied", is_async=True),
    "part by part": Run(kind="auto"),
    "Lion": Run(optimizer="Lion"),
    "SGD": Run(optimizer="SGD", is_async=True),
    "24 bits": Run(master_bits=24, is_async=True),
    "24 bits, not row-major": Run(master_bits=24, kind="transposed", optimizer="Lion"),
}
SAVED = [
    ("exact", 2),
    *(pytest.param("exact", size, marks=pytest.mark.slow) for size in (1, 3)),
    *((name, 2 + at % 2) for at, name in enumerate(list(RUNS)[1:])),
    *(pytest.param(name, 3 - at % 2, marks=pytest.mark.slow) for at, name in enumerate(list(RUNS)[1:])),
]


def joined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of all machines together: ranges are joined, and weights are those of rank 0."""
    first = states[0]
    for state in states[1:]:
        assert_same_bits(state["weights"], first["weights"])
        assert state["step"] == first["step"]
        assert state["scheduler"] == first["scheduler"]
    whole = {name: value for name, value in first.items() if name != "random"}
    for kind in ("masters", "moments"):
        whole[kind] = {
            name: _whole([state[kind][name] for state in states], _size(first, name)) for name in first[kind]
        }
    return whole


def _size(state: dict[str, Any], name: str) -> int:
    """The number of elements of a whole master or of a whole part of a moment."""
    part, _, owner = name.rpartition(" of ")
    return -(-state["weights"][owner].numel() // elements_per_entry(part))


def _whole(parts: list[Tensor], count: int) -> Tensor:
    if not parts[0].dim():
        return parts[0]
    flats = [each.as_strided((each.numel(),), (1,)) for each in parts]
    return flats[0] if flats[0].numel() == count else torch.cat(flats)


@pytest.mark.parametrize(("name", "size"), SAVED)
def test_the_state_is_equal_bit_for_bit_after_loading_on_any_number_of_machines(
    pool: MachinePool, tmp_path: Path, name: str, size: int
) -> None:
    run, folder = RUNS[name], str(tmp_path / "step-2")
    saved = values(pool.run(size, save_and_go_on, run, folder))
    whole = joined([each["saved"] for each in saved])
    for number in (1, 2, 3, 4) if name == "exact" else (size, 1 + size % 3):
        loaded = values(pool.run(number, load_and_go_on, run, folder))
        assert_same_bits(joined([each["saved"] for each in loaded]), whole)
        if number == size:
            for before, after in zip(saved, loaded, strict=True):
                assert_same_bits(after, before, f"rank with the losses {before['losses']}")
        elif run.dtype is torch.float32:  # the number of machines changes the order of sums
            assert loaded[0]["losses"] == pytest.approx(saved[0]["losses"], rel=1e-6)
            for key, weight in loaded[0]["state"]["weights"].items():
                if weight.is_floating_point():  # the other tensor counts microbatches of this machine
                    assert float((weight - saved[0]["state"]["weights"][key]).abs().max()) < 5e-7, "weights are below 1"


def test_ranges_of_whole_blocks_load_on_any_number_of_machines(pool: MachinePool, tmp_path: Path) -> None:
    """Every parameter has one block: the last machine has all elements, the others have none."""
    run, folder = Run(optimizer="Lion"), str(tmp_path / "step-2")
    saved = values(pool.run(3, save_and_go_on, run, folder, block=BLOCK))
    assert [moment.numel() for moment in saved[0]["saved"]["moments"].values() if moment.dim()] == [0] * 8
    whole = joined([each["saved"] for each in saved])
    for number, block in ((3, BLOCK), (2, BLOCK), (2, SMALL_BLOCK)):
        loaded = values(pool.run(number, load_and_go_on, run, folder, block=block))
        assert_same_bits(joined([each["saved"] for each in loaded]), whole)
        if number == 3:
            assert_same_bits(loaded[2], saved[2])


@pytest.mark.parametrize("moments", ["8bit", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_ranges_of_low_bit_moments_load_on_any_number_of_machines(
    pool: MachinePool, tmp_path: Path, moments: str
) -> None:
    """Weights have three blocks, so that codes and scales are divided; with four machines the first one has nothing."""
    run, folder = Run(moments=moments, width=68), str(tmp_path / "step-2")
    saved = values(pool.run(2, save_and_go_on, run, folder, block=BLOCK))
    whole = joined([each["saved"] for each in saved])
    for number in (2, 3, 4):
        loaded = values(pool.run(number, load_and_go_on, run, folder, block=BLOCK))
        assert_same_bits(joined([each["saved"] for each in loaded]), whole)
        if number == 2:
            for before, after in zip(saved, loaded, strict=True):
                assert_same_bits(after, before)


def test_low_bit_moments_of_machines_are_converted_in_ranges(pool: MachinePool, tmp_path: Path) -> None:
    """Converting a range gives the bits of converting the whole state and cutting it."""
    folder = str(tmp_path / "step-2")
    values(pool.run(2, save_and_go_on, Run(width=68), folder, block=BLOCK))
    run = Run(moments="8bit", width=68)
    of_two = joined([each["saved"] for each in values(pool.run(2, load_and_go_on, run, folder, block=BLOCK))])
    of_three = joined([each["saved"] for each in values(pool.run(3, load_and_go_on, run, folder, block=BLOCK))])
    assert_same_bits(of_two, of_three)
    assert any("exp_avg_8bit" in name for name in of_two["moments"])


def test_masters_of_machines_are_converted_in_ranges(pool: MachinePool, tmp_path: Path) -> None:
    folder, short = str(tmp_path / "step-2"), Run(master_bits=24)
    saved = values(pool.run(2, save_and_go_on, Run(), folder))
    of_two = joined([each["saved"] for each in values(pool.run(2, load_and_go_on, short, folder))])
    of_three = joined([each["saved"] for each in values(pool.run(3, load_and_go_on, short, folder))])
    assert_same_bits(of_two, of_three)
    for name, master in joined([each["saved"] for each in saved])["masters"].items():
        assert not (of_two["masters"][name].view(torch.int32) & 0xFF).any()
        assert bool(((of_two["masters"][name] - master).abs() <= master.abs() * 2**-15).all())


def test_a_checkpoint_of_machines_loads_into_a_model_without_process_group(pool: MachinePool, tmp_path: Path) -> None:
    folder = str(tmp_path / "step-2")
    saved = values(pool.run(3, save_and_go_on, Run(), folder))
    alone = values(pool.run(1, load_alone, Run(), folder))
    assert_same_bits(joined([alone[0]["saved"]]), joined([each["saved"] for each in saved]))
    verify(folder)


def test_every_machine_writes_its_ranges_and_the_weights_are_written_once(pool: MachinePool, tmp_path: Path) -> None:
    folder = tmp_path / "step-2"
    values(pool.run(3, save_and_go_on, Run(), str(folder)))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["machines"] == 3
    assert [name for name in manifest["files"] if name.startswith("model")] == ["model.safetensors"]
    moment = manifest["tensors"]["optimizer"]["state/exp_avg/0.0.weight"]
    assert [piece["file"] for piece in moment["pieces"]] == [
        f"optimizer-rank0000{rank}-00001-of-00001.safetensors" for rank in range(3)
    ]
    assert [piece["num_bytes"] for piece in moment["pieces"]] == [4 * 3 * SMALL_BLOCK] * 3
    vector = manifest["tensors"]["optimizer"]["state/exp_avg/0.0.bias"]
    assert [piece["file"] for piece in vector["pieces"]] == ["optimizer-rank00002-00001-of-00001.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2"]


def test_a_folder_of_each_machine_is_refused_on_all_machines(pool: MachinePool, tmp_path: Path) -> None:
    outcomes = pool.run(3, save_in_own_folder, str(tmp_path))
    assert [outcome.error for outcome in outcomes] == ["MachineError", "CheckpointError", "CheckpointError"]
    assert outcomes[0].lost_rank == 1
    for outcome in outcomes:
        assert "Save into a folder that all machines share" in outcome.message
    assert not list((tmp_path / "of-rank-0").iterdir())  # nothing is left


@pytest.mark.parametrize("place", ["_write_small", "_write_shard", "_part", "_complete"])
def test_a_save_that_fails_on_one_machine_fails_on_all_and_the_next_one_works(
    pool: MachinePool, tmp_path: Path, place: str
) -> None:
    failing = 0 if place == "_complete" else 2
    caught = values(pool.run(3, fail_to_save, str(tmp_path), failing, place))
    for rank, (kind, message, lost) in enumerate(caught):
        assert "No space left on device" in message
        assert (kind, lost) == (("CheckpointError", None) if rank == failing else ("MachineError", failing))
    assert latest(tmp_path) == tmp_path / "step-3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-3"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_machine_that_is_killed_during_a_save_leaves_the_earlier_checkpoint(
    pool: MachinePool, tmp_path: Path, killed: int
) -> None:
    outcomes = pool.run(2, be_killed_while_saving, str(tmp_path), killed)
    assert outcomes[killed].died
    assert outcomes[1 - killed].error == "MachineError"
    assert outcomes[1 - killed].lost_rank == killed
    assert latest(tmp_path) == tmp_path / "step-1"
    verify(tmp_path / "step-1")
    assert not (tmp_path / "step-2").exists()
    loaded = values(pool.run(1, load_and_go_on, Run(), str(tmp_path / "step-1")))
    assert loaded[0]["saved"]["step"] == 1


def test_a_damaged_file_of_one_machine_refuses_to_load_on_all_and_changes_nothing(
    pool: MachinePool, tmp_path: Path
) -> None:
    folder = tmp_path / "step-2"
    values(pool.run(3, save_and_go_on, Run(), str(folder), 2, 0))
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    for number, name in ((3, "optimizer-rank00002-00001-of-00001.safetensors"), (2, "state-rank00001.json")):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)
        for caught, before, after in values(pool.run(number, load_and_compare, str(folder))):
            assert caught[0] in ("MachineError", "CheckpointError")
            assert f"{name} of the checkpoint is damaged" in caught[1]
            assert_same_bits(after, before)


def test_a_save_on_one_machine_alone_raises_on_all(pool: MachinePool, tmp_path: Path) -> None:
    for outcome in pool.run(2, save_alone, str(tmp_path / "step-1")):
        assert outcome.error == "MachineError"
        assert "Make the same calls on all of them" in outcome.message
    assert not (tmp_path / "step-1").exists()


def test_machines_that_load_different_checkpoints_are_refused(pool: MachinePool, tmp_path: Path) -> None:
    values(pool.run(2, save_and_go_on, Run(), str(tmp_path / "step-1"), 1, 0))
    values(pool.run(2, save_and_go_on, Run(), str(tmp_path / "step-2"), 2, 0))
    for outcome in pool.run(2, load_other, str(tmp_path)):
        assert outcome.error == "MachineError"
        assert outcome.lost_rank == 1
        assert "rank 1 loads another checkpoint than rank 0: that of step 2 instead of step 1" in outcome.message


def test_other_arguments_on_one_machine_raise_on_all(pool: MachinePool, tmp_path: Path) -> None:
    """Without the ranges of one machine a checkpoint could never be loaded; after other loads the machines differ."""
    for caught, before, after in values(pool.run(2, save_and_load_with_other_arguments, str(tmp_path))):
        assert [(kind, rank) for kind, _, rank in caught] == [("MachineError", 1)] * 4
        messages = [message for _, message, _ in caught]
        assert "save() got optimizer=None on rank 1 and optimizer=AdamW on rank 0" in messages[0]
        assert "load() got scheduler=None on rank 1 and scheduler=LambdaLR on rank 0" in messages[1]
        assert "load() got restore_rng=False on rank 1 and restore_rng=True on rank 0" in messages[2]
        assert "load() got optimizer=None on rank 1 and optimizer=AdamW on rank 0" in messages[3]
        assert_same_bits(after, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "two"]
