"""Manifests and state files changed by hand, with checksums that agree: refused without a trace, or loaded as they say.

Every sample changes the structure of a sound checkpoint in one to three places, signs it again and loads it. Either
loading raises CheckpointError and no bit of weights, optimizer, scheduler, scaler and generators has changed; or the
model holds the bytes that the manifest names, read here by other code. ROUNDPIPE_FORGED_MANIFESTS sets the number of
samples of each kind.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_checkpoint import MANIFEST, STATE, Training, assert_same_bits, rewrite_file, rewrite_manifest
from roundpipe import CheckpointError, checkpoint

NUM_SAMPLES = int(os.environ.get("ROUNDPIPE_FORGED_MANIFESTS", "150"))
BATCH = 50  # samples of one test
SECRET = b"\x01\x02\x03\x04" * 4096
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I16": torch.int16, "I64": torch.int64, "U8": torch.uint8}
VALUES = [
    *(None, True, False, -1, 0, 1, 2, 7, 255, 2**31, 2**63 - 1, 2**63, 10**30, 0.0, 1.0, 1.5, -1.0),
    *("", "x", ".", "..", "0", "F32", "U8", "I16", "\0", "\udcff", "x" * 300, [], {}, [0], [1, 1], [[]], {"x": 1}),
    *("../secret", "/etc/passwd", "fifo", "link", "folder", "folder/secret", "socket", "model/../x", "./state.json"),
]
Json = Any
Place = tuple[Any, Any]  # a dict or list, and a key of it


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint beside a file that is none of its business."""
    parent = tmp_path_factory.mktemp("forged")
    (parent / "secret").write_bytes(SECRET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("roundpipe.checkpoint.contents"), "_SHARD_BYTES", 3000)
        run = Training(scaled=True)
        run.train(2)
        run.save(parent / "sound").wait()
        run.train(1)
        run.save(parent / "other").wait()
        run.close()
    return parent / "sound"


@pytest.fixture(scope="module")
def run() -> Iterator[Training]:
    made = Training(num_devices=1, seed=2, scaled=True)
    made.train(3)
    yield made
    made.close()


@pytest.fixture
def folder(sound: Path) -> Iterator[Path]:
    """A copy of the checkpoint, with things in it that are no files."""
    forged = sound.with_name("copy")
    shutil.copytree(sound, forged)
    os.mkfifo(forged / "fifo")
    (forged / "link").symlink_to("../secret")
    (forged / "folder").symlink_to("..")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(forged)  # the path of a socket must be short
        listener.bind("socket")
        os.chdir(here)
    yield forged
    shutil.rmtree(forged)


# Changes of structure.


def places(data: Json) -> list[Place]:
    """All places of a nested value."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else []
    return [place for key in keys for place in ((data, key), *places(data[key]))]


def remove(chosen: random.Random, data: Json, place: Place) -> None:
    del place[0][place[1]]


def put_any(chosen: random.Random, data: Json, place: Place) -> None:
    place[0][place[1]] = copy.deepcopy(chosen.choice(VALUES))


def put_near(chosen: random.Random, data: Json, place: Place) -> None:
    """Change a value a little, or its type."""
    value = place[0][place[1]]
    if type(value) is int:
        near = [value + 1, value - 1, -value, 2 * value, value // 2, value + 64, value - 64, float(value), str(value)]
        place[0][place[1]] = chosen.choice(near)
    elif isinstance(value, str):
        place[0][place[1]] = chosen.choice(
            [value[:-1], value + "x", "../" + value, "./" + value, value.upper(), [value]]
        )
    elif isinstance(value, list):
        place[0][place[1]] = chosen.choice(
            [value[::-1], value[:-1], value + value, [*value, 0], [value], tuple(value[1:])]
        )
    else:
        put_any(chosen, data, place)


def put_other(chosen: random.Random, data: Json, place: Place) -> None:
    """Copy a value from elsewhere, or exchange both."""
    value = place[0][place[1]]
    alike = [(owner, key) for owner, key in places(data) if type(owner[key]) is type(value)]
    owner, key = chosen.choice(alike)
    other = copy.deepcopy(owner[key])
    if chosen.random() < 0.5:
        owner[key] = copy.deepcopy(value)
    place[0][place[1]] = other


def rename(chosen: random.Random, data: Json, place: Place) -> None:
    """Give an entry of a dict another name, or a second one."""
    owner, key = place
    if isinstance(owner, dict):
        value = copy.deepcopy(owner[key]) if chosen.random() < 0.5 else owner.pop(key)
        owner[
            chosen.choice([f"{key}x", f"../{key}", f"./{key}", *(v for v in VALUES if isinstance(v, str)), *owner])
        ] = value


GENERIC = [remove, put_any, put_near, put_other, rename]


def a_tensor(chosen: random.Random, data: Json) -> dict[str, Any]:
    group = chosen.choice(["weights", "optimizer"])
    entry: dict[str, Any] = data["tensors"][group][chosen.choice(sorted(data["tensors"][group]))]
    return entry


def divide_piece(chosen: random.Random, data: Json) -> None:
    """Divide a piece into two, which hold the same bytes. Sometimes they overlap, or leave a gap."""
    entry = a_tensor(chosen, data)
    piece = chosen.choice(entry["pieces"])
    cut = chosen.randrange(piece["num_bytes"] + 1)
    error = chosen.choice([0, 0, 0, 1, -1, 2])
    first = {**piece, "num_bytes": cut}
    second = {
        **piece,
        "offset": piece["offset"] + cut + error,
        "num_bytes": piece["num_bytes"] - cut,
        "start": piece["start"] + cut + chosen.choice([0, error]),
    }
    entry["pieces"].remove(piece)
    entry["pieces"] += [first, second] if chosen.random() < 0.5 else [second, first]


def reshape(chosen: random.Random, data: Json) -> None:
    """Another shape, dtype or order of the same bytes."""
    entry = a_tensor(chosen, data)
    sizes = {"BF16": 2, "F32": 4, "I16": 2, "I64": 8, "U8": 1}
    total = sizes.get(entry["dtype"], 1)
    for size in entry["shape"]:
        total *= size
    kind = chosen.choice(["dtype", "shape", "stride"])
    if kind == "dtype":
        entry["dtype"] = chosen.choice(sorted(sizes))
        if chosen.random() < 0.5:
            entry["shape"] = [total // sizes[entry["dtype"]]]
    elif kind == "shape":
        shapes = [entry["shape"][::-1], [1, *entry["shape"]], [0], [], [total], [2, -1], [0, 2**62]]
        entry["shape"] = chosen.choice(shapes)
    else:
        entry["stride"] = chosen.choice([[1, 16], [16, 1], [1], [0], [-1], [2, 32], [1, 1], [2**62, 1], []])


def name_other_file(chosen: random.Random, data: Json) -> None:
    """Let a piece, or only one of several, lie in a file outside, in a link, or in another file of the checkpoint."""
    entry = a_tensor(chosen, data)
    file = chosen.choice(["../secret", "link", "folder/secret", "fifo", "socket", "folder", *data["files"]])
    if chosen.random() < 0.6 and file not in data["files"]:
        data["files"][file] = {"num_bytes": len(SECRET), "sha256": hashlib.sha256(SECRET).hexdigest()}
    piece = chosen.choice(entry["pieces"])
    if chosen.random() < 0.5:
        entry["pieces"].append({**piece, "file": file, "start": piece["start"] + chosen.choice([0, 1, 10**6])})
    else:
        piece["file"] = file


def tie(chosen: random.Random, data: Json) -> None:
    """Make one weight the alias of another."""
    names = sorted(data["tensors"]["weights"])
    name = chosen.choice(names)
    data["aliases"][name] = chosen.choice([*names, "x"])
    if chosen.random() < 0.7:
        del data["tensors"]["weights"][name]


def add_form_of_master(chosen: random.Random, data: Json) -> None:
    """One more tensor of a master, with bytes of a new file."""
    name = chosen.choice(sorted(data["tensors"]["weights"]))
    kind = chosen.choice(
        ["master/", "master.low/", "master.ties/", "master.ties.8/", "master.ties.x/", "state/x/", "y/"]
    )
    dtype = chosen.choice(["F32", "I16", "U8", "BF16"])
    shape = chosen.choice([[256], [16, 16], [16], [32], [2], [0]])
    size = {"F32": 4, "I16": 2, "U8": 1, "BF16": 2}[dtype]
    for each in shape:
        size *= each
    data["files"]["more"] = {"num_bytes": len(SECRET), "sha256": hashlib.sha256(SECRET).hexdigest()}
    entry = {"dtype": dtype, "shape": shape, "pieces": [{"file": "more", "offset": 0, "num_bytes": size, "start": 0}]}
    data["tensors"]["optimizer"][kind + name] = entry


TARGETED = [divide_piece, reshape, name_other_file, tie, add_form_of_master]


def forged(chosen: random.Random, data: Json, targeted: list[Callable[[random.Random, Json], None]]) -> list[str]:
    """Change the data in a few places; returns what was done."""
    done = []
    num_changes = chosen.choice([1, 1, 1, 2, 3])
    num_targeted = sum(chosen.random() < 0.5 for _ in range(num_changes)) if targeted else 0
    for act in chosen.sample(targeted, num_targeted):  # they come first: they need the structure
        act(chosen, data)
        done.append(act.__name__)
    for _ in range(num_changes - num_targeted):
        change, place = chosen.choice(GENERIC), chosen.choice(places(data))
        done.append(f"{change.__name__} {place[1]!r}")
        change(chosen, data, place)
    return done


# What a manifest says, read by other code.


def bytes_of(folder: Path, entry: dict[str, Any]) -> bytes:
    pieces = sorted(entry["pieces"], key=lambda piece: piece["start"])
    contents = [(folder / piece["file"]).read_bytes() for piece in pieces]
    return b"".join(c[p["offset"] : p["offset"] + p["num_bytes"]] for c, p in zip(contents, pieces, strict=True))


def tensor_of(folder: Path, entry: dict[str, Any]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(bytes_of(folder, entry)), dtype=DTYPES[entry["dtype"]])
    if entry.get("stride") is not None:
        return flat.as_strided(entry["shape"], entry["stride"])
    return flat.reshape(entry["shape"])


def assert_is_as_named(run: Training, folder: Path) -> None:
    """The model has the weights, moments and masters that the manifest names."""
    data = json.loads((folder / MANIFEST).read_text())
    weights = data["tensors"]["weights"]
    for name, value in run.model.state_dict().items():
        expected = tensor_of(folder, weights[data["aliases"].get(name, name)])
        assert_same_bits(value.reshape(expected.shape), expected, name)
    moments = data["tensors"].get("optimizer", {})
    for name, master in run.model.optim_named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            entry = moments.get(f"state/{key}/{name}")
            assert (entry is not None) == (key in run.optimizer.state[master]), (key, name)
            if entry is not None:
                assert_same_bits(run.optimizer.state[master][key], tensor_of(folder, entry), f"{key} of {name}")
        low = moments.get(f"master.low/{name}")
        full = moments.get(f"master/{name}")
        values = master.detach().flatten().view(torch.int32)
        if full is not None:
            assert_same_bits(master.detach(), tensor_of(folder, full), f"master of {name}")
        elif low is not None:
            assert_same_bits((values & 0xFFFF).to(torch.int16), tensor_of(folder, low), f"low half of {name}")
        else:
            assert not (values & 0xFFFF).any(), f"the master of {name} is its weight"


def check_load(run: Training, folder: Path, done: list[str]) -> bool:
    """Load; returns whether the checkpoint was accepted. Anything but CheckpointError is raised."""
    before = run.bits()
    try:
        checkpoint.load(folder, run.model, run.optimizer, scheduler=run.scheduler, scaler=run.scaler)
    except CheckpointError as error:
        message = str(error)
    except Exception as error:
        error.add_note(f"{done}")
        raise
    else:
        return True
    assert str(folder) in message, done
    assert_same_bits(run.bits(), before, f"after {done}: {message}: state")
    return False


@pytest.mark.timeout(600 if NUM_SAMPLES > 1000 else 120)
@pytest.mark.parametrize("seed", range(max(1, NUM_SAMPLES // BATCH)))
def test_forged_manifests(seed: int, sound: Path, folder: Path, run: Training) -> None:
    original = (folder / MANIFEST).read_bytes()
    (folder / "more").write_bytes(SECRET)
    chosen, num_accepted = random.Random(seed), 0
    for _ in range(BATCH):
        done: list[str] = []
        (folder / MANIFEST).write_bytes(original)
        rewrite_manifest(folder, lambda data: done.extend(forged(chosen, data, TARGETED)))  # noqa: B023
        if check_load(run, folder, done):
            num_accepted += 1
            assert_is_as_named(run, folder)
            run.load(sound.with_name("other"))
    assert 0 < num_accepted < BATCH / 2


@pytest.mark.timeout(600 if NUM_SAMPLES > 1000 else 120)
@pytest.mark.parametrize("seed", range(max(1, NUM_SAMPLES // BATCH)))
def test_forged_state_files(seed: int, sound: Path, folder: Path, run: Training) -> None:
    original = (folder / STATE).read_text()
    chosen = random.Random(1000 + seed)
    for _ in range(BATCH):
        data = json.loads(original)
        done = forged(chosen, data, [])
        rewrite_file(folder, STATE, json.dumps(data).encode())
        if check_load(run, folder, done):
            run.load(sound.with_name("other"))
