"""Damaged and foreign checkpoints are refused with a CheckpointError that names file, key and reason.

A refusal changes no bit of model, optimizer, scheduler, scaler and random number generators.
"""

from __future__ import annotations

import errno
import importlib
import os
import pickle
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers_checkpoint import (
    MANIFEST,
    STATE,
    WIDTH,
    Training,
    assert_same_bits,
    network,
    rewrite_file,
    rewrite_manifest,
    rewrite_state,
)
from helpers_files import as_another_user
from roundpipe import CheckpointError, checkpoint, optim

NOTES = "notes.json"
CONTENTS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound() -> Iterator[Path]:
    """A checkpoint of three shards of weights. Other users may enter its folder: one test is another user."""
    with tempfile.TemporaryDirectory() as parent, pytest.MonkeyPatch.context() as patch:
        os.chmod(parent, 0o755)
        # By its name: the package's attribute `save` is the function.
        patch.setattr(importlib.import_module("roundpipe.checkpoint.contents"), "_SHARD_BYTES", 1000)
        run = Training(scaled=True)
        run.train(2)
        folder = Path(parent) / "checkpoint-2"
        run.save(folder, files={NOTES: '{"by": "hand"}'}).wait()
        run.close()
        assert {*CONTENTS, NOTES, STATE, MANIFEST} <= {path.name for path in folder.iterdir()}
        yield folder


@pytest.fixture
def folder(sound: Path) -> Iterator[Path]:
    """A copy of the checkpoint, to be damaged."""
    copy = sound.with_name("copy")
    shutil.copytree(sound, copy)
    yield copy
    shutil.rmtree(copy) if copy.is_dir() and not copy.is_symlink() else copy.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def module_run() -> Iterator[Training]:
    run = Training(num_devices=1, seed=2, scaled=True)
    run.train(3)
    yield run
    run.close()


@pytest.fixture
def run(module_run: Training) -> Training:
    """A run in another state than the checkpoint. Refusals do not change it, so one serves all tests."""
    return module_run


def check_refused(run: Training, folder: Path, *expected: str, load: Callable[[], object] | None = None) -> None:
    """Loading raises a CheckpointError with the `expected` parts, changes nothing, and the sound one still loads."""
    before = run.bits()
    with pytest.raises(CheckpointError) as caught:
        run.load(folder) if load is None else load()
    for part in expected:
        assert part in str(caught.value)
    assert_same_bits(run.bits(), before)


# Files that are damaged.


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def make_link(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "flipped": (flip_bit, "checksum"),
    "truncated": (truncate, "bytes instead of"),
    "extended": (extend, "bytes instead of"),
    "missing": (Path.unlink, "is missing"),
    "a folder": (make_folder, "is missing"),
    "a link to itself": (make_loop, "is missing"),
    "a link to its content": (lambda path: make_link(path, path.with_name("aside")), "it is a link"),
    "a link out of the folder": (lambda path: make_link(path, path.parents[1] / "aside"), "it is a link"),
    "a FIFO": (lambda path: make_fifo(path), "it is a FIFO"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [CONTENTS[0], CONTENTS[2], "optimizer-00001", STATE, NOTES])
def test_damaged_file(name: str, damage: str, folder: Path, run: Training) -> None:
    (path,) = folder.glob(f"{name}*")
    act, reason = DAMAGES[damage]
    act(path)
    check_refused(run, folder, str(path), reason)


def test_swapped_files(folder: Path, run: Training) -> None:
    sizes: dict[int, Path] = {}
    # Two files of the same size, so that only the checksum tells them apart.
    one, other = next(
        (sizes[path.stat().st_size], path)
        for path in sorted(folder.glob("optimizer-*"))
        if sizes.setdefault(path.stat().st_size, path) != path
    )
    other.rename(folder / "aside")
    one.rename(other)
    (folder / "aside").rename(one)
    check_refused(run, folder, str(one), "checksum")


# Manifests.


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe\0", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[1, 2]", "not the manifest of a RoundPipe checkpoint"),
        (b"{}", "not the manifest of a RoundPipe checkpoint"),
        (b'{"format": "other"}', "not the manifest of a RoundPipe checkpoint"),
    ],
    ids=["empty", "cut", "no text", "deep", "a list", "no keys", "of another program"],
)
def test_manifest_that_is_none(content: bytes, reason: str, folder: Path, run: Training) -> None:
    (folder / MANIFEST).write_bytes(content)
    check_refused(run, folder, str(folder / MANIFEST), reason)


def test_manifest_missing(folder: Path, run: Training) -> None:
    (folder / MANIFEST).unlink()
    check_refused(run, folder, str(folder), f"has no {MANIFEST}")


@pytest.mark.parametrize("make", [make_folder, make_loop, make_fifo])
def test_manifest_that_cannot_be_read(make: Damage, folder: Path, run: Training) -> None:
    make(folder / MANIFEST)
    check_refused(run, folder, str(folder / MANIFEST), "cannot be read")


def test_manifest_altered(folder: Path, run: Training) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"step": 2', '"step": 3'))
    check_refused(run, folder, str(folder / MANIFEST), "altered", "checksum")


def test_a_flipped_bit_in_the_manifest(folder: Path, run: Training) -> None:
    content = (folder / MANIFEST).read_bytes()
    generator = random.Random(3)
    for position in [generator.randrange(len(content)) for _ in range(25)]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << generator.randrange(7)
        if damaged[position : position + 1].isspace() and content[position : position + 1].isspace():
            continue  # one kind of white space for another: the content is the same
        (folder / MANIFEST).write_bytes(damaged)
        check_refused(run, folder, str(folder / MANIFEST))


@pytest.mark.parametrize("version", [3, 0, "1", None, 1.5])
def test_other_format_version(version: Any, folder: Path, run: Training) -> None:
    rewrite_manifest(folder, lambda data: data.update(version=version))
    check_refused(run, folder, str(folder / MANIFEST), f"format version {version!r}", "this release reads version 1")


def first_tensor(data: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = data["tensors"]["weights"]["0.0.weight"]
    return entry


def first_piece(data: dict[str, Any]) -> dict[str, Any]:
    piece: dict[str, Any] = first_tensor(data)["pieces"][0]
    return piece


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file outside": (lambda data: data["files"].update({"../x": data["files"][STATE]}), "'../x'"),
    "a file below and up": (lambda data: data["files"].update({"a/../../x": data["files"][STATE]}), "'a/../../x'"),
    "a file from the root": (lambda data: data["files"].update({"/etc/passwd": data["files"][STATE]}), "'/etc/passwd'"),
    "a file without a name": (lambda data: data["files"].update({"": data["files"][STATE]}), "''"),
    "a tensor beyond its file": (lambda data: first_piece(data).update(offset=10**6), "'0.0.weight'"),
    "a tensor before its file": (lambda data: first_piece(data).update(offset=-1), "'0.0.weight'"),
    "a piece of negative size": (lambda data: first_piece(data).update(num_bytes=-512), "'0.0.weight'"),
    "a tensor in an unknown file": (lambda data: first_piece(data).update(file="x"), "'0.0.weight'"),
    "a tensor with a gap": (lambda data: first_piece(data).update(start=2), "'0.0.weight'"),
    "a tensor in a file outside, behind a piece that overlaps": (
        lambda data: first_tensor(data)["pieces"].extend(
            [
                {**first_piece(data), "start": 1, "num_bytes": 2},
                {**first_piece(data), "start": 2, "num_bytes": 100, "file": "../checkpoint-2/" + CONTENTS[0]},
            ]
        ),
        f"'../checkpoint-2/{CONTENTS[0]}'",
    ),
    "pieces that overlap": (
        lambda data: first_tensor(data)["pieces"].append({**first_piece(data), "start": 2}),
        "overlap",
    ),
    "two tensors with the same bytes": (
        lambda data: first_piece(data).update(data["tensors"]["weights"]["2.0.weight"]["pieces"][0]),
        "overlap",
    ),
    "an offset that is no number of bytes": (lambda data: first_piece(data).update(offset=64.5), "'0.0.weight'"),
    "a tensor without pieces": (lambda data: first_tensor(data).update(pieces=[]), "'0.0.weight'"),
    "a tensor of unknown type": (lambda data: first_tensor(data).update(dtype="F7"), "F7"),
    "a tensor of negative shape": (lambda data: first_tensor(data).update(shape=[-16, -16]), "'0.0.weight'"),
    "a shape of words": (lambda data: first_tensor(data).update(shape=["a", 16]), MANIFEST),
    "an alias of nothing": (lambda data: data["aliases"].update({"0.0.weight": "x"}), "'x'"),
    "no tensors": (lambda data: data.pop("tensors"), "'tensors'"),
    "tensors as a list": (lambda data: data.update(tensors=[1]), MANIFEST),
    "files as a list": (lambda data: data.update(files=[1]), MANIFEST),
    "a file without a size": (lambda data: data["files"][STATE].pop("num_bytes"), MANIFEST),
    "a size that is a word": (lambda data: data["files"][STATE].update(num_bytes="9"), STATE),
    "no state": (lambda data: data["files"].pop(STATE), STATE),
    "a low half of another type": (
        lambda data: data["tensors"]["optimizer"]["master.low/0.0.weight"].update(dtype="BF16"),
        "master.low/0.0.weight",
    ),
    "a moment of another shape": (
        lambda data: data["tensors"]["optimizer"]["state/exp_avg/0.0.weight"].update(shape=[8, 32]),
        "state/exp_avg/0.0.weight",
    ),
    "tensors of an unknown kind": (lambda data: data["tensors"].update(others={}), "'others'"),
    "a version that is no number": (lambda data: data.update(version=True), "format version True"),
    "another kind of model": (lambda data: data["model"].update(kind="adapter"), "'adapter'"),
    "no kind of model": (lambda data: data.update(model={}), "None"),
    "a step that is a list": (lambda data: data.update(step=[]), MANIFEST),
    "a further weight": (
        lambda data: data["tensors"]["weights"].update({"9.weight": first_tensor(data)}),
        "unexpected: '9.weight'",
    ),
    "a weight less": (lambda data: data["tensors"]["weights"].pop("0.0.weight"), "missing in it: '0.0.weight'"),
    "an optimizer's tensor of another parameter": (
        lambda data: data["tensors"]["optimizer"].update({"state/exp_avg/9.weight": first_tensor(data)}),
        "state/exp_avg/9.weight",
    ),
    "an optimizer's tensor without a parameter": (
        lambda data: data["tensors"]["optimizer"].update({"state/exp_avg": first_tensor(data)}),
        "state/exp_avg",
    ),
    "low halves of another shape": (
        lambda data: data["tensors"]["optimizer"].update({"master.low/0.0.bias": first_tensor(data)}),
        "master.low/0.0.bias",
    ),
    "a full master of another shape": (
        lambda data: data["tensors"]["optimizer"].update(
            {"master/0.0.bias": data["tensors"]["optimizer"]["state/exp_avg/0.0.weight"]}
        ),
        "master/0.0.bias",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_manifest_with_a_matching_checksum(forgery: str, folder: Path, run: Training) -> None:
    change, reason = FORGERIES[forgery]
    rewrite_manifest(folder, change)
    check_refused(run, folder, str(folder), reason)


# State files.

FALSE_STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no optimizer's class": (lambda state: state["optimizer"].pop("class"), STATE),
    "no optimizer's groups": (lambda state: state["optimizer"].pop("groups"), STATE),
    "no optimizer's numbers": (lambda state: state["optimizer"].pop("numbers"), STATE),
    "numbers of another parameter": (
        lambda state: state["optimizer"]["numbers"].update({"9.weight": {"step": 1}}),
        "'9.weight'",
    ),
    "an optimizer that is a list": (lambda state: state.update(optimizer=[1]), STATE),
    "no random states": (lambda state: state.pop("random"), STATE),
    "no torch generator": (lambda state: state["random"].pop("torch"), STATE),
    "a torch generator of another size": (lambda state: state["random"].update(torch=[1, 2]), STATE),
    "a python generator of another kind": (lambda state: state["random"].update(python="seed"), STATE),
    "a numpy generator of another kind": (lambda state: state["random"].update(numpy=["PCG64", 1]), STATE),
    "a value of an unknown kind": (lambda state: state.update(extra={"$type": "set", "value": []}), STATE),
    "a value without a value": (lambda state: state.update(extra={"$type": "tuple"}), STATE),
    "a tensor of an unknown type": (
        lambda state: state.update(extra={"$type": "tensor", "dtype": "F7", "shape": [1], "value": "AAAA"}),
        STATE,
    ),
    "a scheduler of another kind": (lambda state: state["scheduler"].pop("base_lrs"), "scheduler"),
    "a scheduler that is a number": (lambda state: state.update(scheduler=3), "scheduler"),
    "a scaler that refuses its state": (lambda state: state["scaler"].update(scale=-1.0), "scaler"),
}


@pytest.mark.parametrize("falsehood", FALSE_STATES)
def test_state_file_with_a_matching_checksum(falsehood: str, folder: Path, run: Training) -> None:
    change, reason = FALSE_STATES[falsehood]
    rewrite_state(folder, change)
    check_refused(run, folder, str(folder), reason)


def test_state_file_that_is_a_list(folder: Path, run: Training) -> None:
    rewrite_file(folder, STATE, b"[1, 2]")
    check_refused(run, folder, str(folder / STATE))


def test_state_file_that_is_too_deep(folder: Path, run: Training) -> None:
    rewrite_file(folder, STATE, b"[" * 100_000)
    check_refused(run, folder, str(folder / STATE))


@pytest.mark.parametrize("name", [MANIFEST, STATE, CONTENTS[0]])
@pytest.mark.parametrize("is_listed", [False, True], ids=["alone", "listed in the manifest"])
def test_a_pickle_is_never_opened(name: str, is_listed: bool, folder: Path, run: Training, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    content = pickle.dumps(Bomb())
    if not is_listed or name == MANIFEST:
        (folder / name).write_bytes(content)
    else:
        rewrite_file(folder, name, content)
    check_refused(run, folder, str(folder))
    assert not (tmp_path / "exploded").exists()


# Folders.


def test_folder_missing_empty_or_a_file(folder: Path, run: Training) -> None:
    check_refused(run, folder / "absent", str(folder / "absent"), "does not exist")
    check_refused(run, folder / STATE, str(folder / STATE))
    for path in folder.iterdir():
        path.unlink()
    check_refused(run, folder, str(folder), f"has no {MANIFEST}")


def test_folder_of_several_checkpoints(folder: Path, run: Training) -> None:
    check_refused(run, folder.parent, str(folder.parent), "checkpoint-2", "load one of them")


def test_folder_that_is_a_link_to_itself(folder: Path, run: Training) -> None:
    shutil.rmtree(folder)
    make = folder.with_name("copy")
    make.symlink_to("copy")
    check_refused(run, folder, str(folder))


@pytest.mark.parametrize("name", [MANIFEST, STATE, CONTENTS[1], NOTES, ""])
def test_no_permission(name: str, folder: Path, run: Training) -> None:
    path = folder / name
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        with as_another_user():
            check_refused(run, folder, str(path), "Permission denied")
    finally:
        path.chmod(mode)


def test_a_disk_that_fails_after_the_verification(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of the model exists, so the error says that parts are loaded. A later load mends it."""
    ours, expected = Training(seed=3, scaled=True), Training(seed=4, scaled=True)
    real, handles = os.preadv, []

    def fail(handle: int, buffers: Any, offset: int) -> int:
        handles.append(handle)
        if len(handles) == 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(handle, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=f"{folder}/.*Input/output error") as caught:
            ours.load(folder)
    assert f"parts of {folder} are in the model already" in "".join(caught.value.__notes__)
    ours.load(folder)
    loaded = ours.bits()
    expected.load(folder)
    assert_same_bits(loaded, expected.bits())
    ours.close()
    expected.close()


# Files that change after their verification.


def write_into(path: Path) -> None:
    """Change the last bytes of a file."""
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xaa" * 8)


def write_secretly(path: Path) -> None:
    """As `write_into`, with the times of before."""
    times = path.stat()
    write_into(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    write_into(other)
    os.replace(other, path)


LATE_CHANGES = {
    "written": write_into,
    "written with old times": write_secretly,
    "replaced": replace,
    "removed": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
}


@pytest.mark.parametrize("change", LATE_CHANGES)
@pytest.mark.parametrize("name", [CONTENTS[0], CONTENTS[2], "optimizer-00001", STATE])
def test_a_file_that_changes_after_its_verification(
    name: str, change: str, sound: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is never loaded. Where identity or time show it, nothing has changed; else a note says what has."""
    ours = Training(seed=3, scaled=True)
    before = ours.bits()
    (path,) = folder.glob(f"{name}*")
    loading = importlib.import_module("roundpipe.checkpoint.load")
    real = loading.verify_files

    def verify_then_change(*args: Any) -> Any:
        found = real(*args)
        LATE_CHANGES[change](path)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(loading, "verify_files", verify_then_change)
        with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
            ours.load(folder)
    after, notes = ours.bits(), "".join(getattr(caught.value, "__notes__", ()))
    if "are in the model already" in notes:
        assert change == "written with old times"
        assert name != STATE
    else:
        assert_same_bits(after, before)
    ours.load(sound)
    expected = ours.bits()
    weights = "weights and buffers"
    for key, value in after[weights].items():  # each is as before, or as in the sound checkpoint
        assert torch.equal(value, before[weights][key]) or torch.equal(value, expected[weights][key]), key
    ours.close()


def test_scheduler_and_scaler_get_their_old_state_back_if_the_files_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Training(seed=3, scaled=True)
    ours.train(1)
    before = ours.bits()
    real = torch.optim.lr_scheduler.LambdaLR.load_state_dict

    def change_then_load(self: Any, state: Any) -> None:
        (folder / CONTENTS[0]).write_bytes(b"")
        real(self, state)

    monkeypatch.setattr(torch.optim.lr_scheduler.LambdaLR, "load_state_dict", change_then_load)
    with pytest.raises(CheckpointError, match=f"{CONTENTS[0]}.* was changed after it was verified"):
        ours.load(folder)
    assert_same_bits(ours.bits(), before)
    ours.close()


def test_large_tensors_are_compared_part_by_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of many parts, read by several threads: equal to one that is read at once."""
    verified = importlib.import_module("roundpipe.checkpoint.verified")
    expected, ours = Training(seed=3, scaled=True), Training(seed=4, scaled=True)
    expected.load(folder)
    monkeypatch.setattr(verified, "_PART_BYTES", 24)
    monkeypatch.setattr(verified, "_MOST_OPEN", 1)
    monkeypatch.setattr(verified, "io_threads", lambda: 3)
    ours.load(folder)
    assert_same_bits(ours.bits(), expected.bits())
    ours.close()
    expected.close()


# Other models and optimizers.


def check_other(folder: Path, model: nn.Module | None, *expected: str, **options: Any) -> None:
    other = Training(model, scaled=True, **options)
    try:
        check_refused(other, folder, str(folder), *expected)
    finally:
        other.close()


def test_other_architecture(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH)).bfloat16()
    check_other(folder, model, "Sequential", "4 keys are missing in it: '0.bias', '0.weight'", "unexpected: '0.0.bias'")


def test_missing_key(folder: Path) -> None:
    model = network()
    model[2].extra = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    check_other(folder, model, "1 keys are missing in it: '2.extra'")


def test_unexpected_key(folder: Path) -> None:
    model = network()
    model[2][0] = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
    check_other(folder, model, "1 keys of it are unexpected: '2.0.bias'")


def test_buffer_of_another_shape(folder: Path) -> None:
    model = network()
    model[1][3].running_mean = torch.zeros(3, dtype=torch.bfloat16)
    check_other(folder, model, "'1.3.running_mean' has shape [16]", "the model's has [3]")


def test_other_shapes(folder: Path) -> None:
    model = network()
    model[2][0] = nn.Linear(WIDTH, 2 * WIDTH).bfloat16()
    check_other(folder, model, "'2.0.weight' has shape [16, 16]", "the model's has [32, 16]")


def test_other_dtype(folder: Path) -> None:
    check_other(folder, network(dtype=torch.float32), "has dtype torch.bfloat16", "the model's has torch.float32")


def test_other_precision_of_masters(folder: Path) -> None:
    check_other(folder, None, "has dtype torch.float32", "optim_dtype=torch.float32", optim_dtype=torch.bfloat16)


def test_optimizer_of_another_kind(folder: Path) -> None:
    check_other(folder, None, "'AdamW'", "'SGD'", make_optimizer=torch.optim.SGD)
    check_other(folder, None, "'AdamW'", "'Adam'", make_optimizer=optim.Adam)


def two_groups(params: Any, lr: float) -> torch.optim.Optimizer:
    every = list(params)
    return optim.AdamW([{"params": every[:2]}, {"params": every[2:]}], lr=lr)


def without_the_last(params: Any, lr: float) -> torch.optim.Optimizer:
    return optim.AdamW(list(params)[:-1], lr=lr)


def in_reverse(params: Any, lr: float) -> torch.optim.Optimizer:
    return optim.AdamW([{"params": [param]} for param in reversed(list(params))], lr=lr)


def test_other_parameter_groups(folder: Path) -> None:
    check_other(folder, None, "1 parameter groups, the one given has 2", make_optimizer=two_groups)
    check_other(folder, None, "parameter group 0", "'2.0.bias'", make_optimizer=without_the_last)


def test_parameter_groups_in_another_order(tmp_path: Path) -> None:
    ours = Training(
        scaled=True, make_optimizer=lambda params, lr: optim.AdamW([{"params": [p]} for p in params], lr=lr)
    )
    ours.train(1)
    ours.save(tmp_path / "one").wait()
    ours.close()
    check_other(tmp_path / "one", None, "parameter group 0", "'0.0.weight'", make_optimizer=in_reverse)


def test_tied_and_untied_weights(tmp_path: Path) -> None:
    """As in plain PyTorch, tied weights load into both of two parameters. Two weights do not fit into one."""
    tied = network(seed=5)
    tied[2][0].weight = tied[0][0].weight
    one, two = Training(tied, scaled=True), Training(seed=6, scaled=True)
    try:
        checkpoint.save(tmp_path / "tied", one.model).wait()
        checkpoint.save(tmp_path / "untied", two.model).wait()
        checkpoint.load(tmp_path / "tied", two.model)
        assert torch.equal(two.model.model[2][0].weight, tied[0][0].weight)
        assert torch.equal(two.model.model[0][0].weight, tied[0][0].weight)
        reason = "'0.0.weight' and '2.0.weight' are one tensor in this Sequential and two in"
        check_refused(one, tmp_path / "untied", reason, load=lambda: checkpoint.load(tmp_path / "untied", one.model))
    finally:
        one.close()
        two.close()


def test_checkpoint_without_optimizer_scheduler_and_scaler(run: Training, tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    checkpoint.save(folder, run.model).wait()
    for part, options in {
        "optimizer": {"optimizer": run.optimizer},
        "scheduler": {"scheduler": run.scheduler},
        "scaler": {"scaler": run.scaler},
    }.items():
        check_refused(
            run, folder, str(folder), f"has no {part}", load=lambda o=options: checkpoint.load(folder, run.model, **o)
        )


def test_what_comes_first_is_undone_if_what_comes_later_is_refused(run: Training, tmp_path: Path) -> None:
    folder = tmp_path / "no-scaler"
    checkpoint.save(folder, run.model, run.optimizer, scheduler=run.scheduler).wait()
    run.train(1)
    check_refused(run, folder, str(folder), "has no scaler")


def test_adapter_of_another_rank_and_of_another_kind(run: Training, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(rank: int, targets: list[str]) -> nn.Module:
        config = LoraConfig(r=rank, target_modules=targets, lora_alpha=4)
        made: nn.Module = get_peft_model(network(), config)
        return made

    ours = Training(adapted(2, ["0.0", "2.0"]), scaled=True)
    try:
        ours.train(1)
        ours.save(tmp_path / "adapter").wait()
    finally:
        ours.close()
    lora = "'base_model.model.0.0.lora_A.weight'"
    check_other(tmp_path / "adapter", adapted(4, ["0.0", "2.0"]), lora, "has shape [2, 16]", "[4, 16]")
    check_other(tmp_path / "adapter", adapted(2, ["1.0", "2.0"]), "unexpected: 'base_model.model.0.0.lora_A.weight'")
    check_refused(run, tmp_path / "adapter", "'adapter'", "'full'")


def test_the_sound_checkpoint_loads(sound: Path) -> None:
    """What all refusals above are compared with."""
    ours = Training(seed=9, scaled=True)
    assert ours.load(sound) == {"step": 2}
    ours.close()
