"""Packed weights in mapped files: the bits of weights in memory, written once, complete or absent, verified by name."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import labelled, livened, small, train_call, wrapped

import roundpipe
from helpers_packed import packed_places
from helpers_parity import assert_same
from helpers_tiny_hf import save_tiny_model
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.checkpoint.folders import PARTIAL, free_name
from roundpipe.errors import ConfigError
from roundpipe.loading import loader
from roundpipe.loading.weight_file import WeightWriter
from roundpipe.store import LayerStore, host_memory
from roundpipe.store.host_memory import MappedFiles
from roundpipe.store.training_memory import PinMode, training_memory
from roundpipe.store.weights import LayerWeights

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system does not list mapped memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("source") / "model", "llama")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were read from the source."""
    found: list[str] = []
    real = loader.WeightFolder.read
    monkeypatch.setattr(loader.WeightFolder, "read", lambda self, name: [found.append(name), real(self, name)][1])
    return found


def load(folder: Path, place: Path | None, form: str = "nf4", **more: Any) -> Any:
    return roundpipe.load(folder, frozen_weights=form, weights_folder=place, **more)


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


@pytest.mark.parametrize("model_type", ["mixtral", "gpt2"])
def test_written_and_mapped_weights_are_those_in_memory(model_type: str, tmp_path: Path, reads: list[str]) -> None:
    """Experts that are joined from several tensors, tied weights, linear modules of another kind."""
    small(model_type).save_pretrained(tmp_path / "source", max_shard_size="40KB")
    expected = load(tmp_path / "source", None, "int8")
    written = load(tmp_path / "source", tmp_path / "weights", "int8")
    reads.clear()
    mapped = load(tmp_path / "source", tmp_path / "weights", "int8")
    assert not reads, "nothing of the source is read again"
    files = MappedFiles()
    for model in (written, mapped):
        assert_same(tensors_of(model), tensors_of(expected))
        assert packed_places(model) == packed_places(expected)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
        assert all(files.hold(param) and not param.requires_grad for param in model.parameters())
        assert len({param.untyped_storage().data_ptr() for param in model.parameters()}) == len(
            list(model.parameters())
        )
        assert training_memory([model], torch.float32, PinMode.OFF)["weights"] == 0
    assert len(list((tmp_path / "weights").iterdir())) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_training_has_the_bits_of_weights_in_memory(folder: Path, tmp_path: Path, is_async: bool) -> None:
    batch = {name: value % 60 for name, value in labelled("llama").items()}
    found = []
    for place in (None, tmp_path, tmp_path):
        model = livened(load(folder, place, lora=4).train())
        with wrapped(model, pin_model="off" if place else "alloc") as ours:
            optimizer = roundpipe.optim.AdamW(list(ours.optim_parameters()), lr=0.01)
            losses = []
            for _ in range(3):
                losses.append(train_call(ours, batch))
                ours.step(lambda o=optimizer: (o.step(), o.zero_grad()), is_async=is_async)  # type: ignore[misc]
            ours.synchronize()
        found.append((losses, {name: p.detach().clone() for name, p in model.named_parameters()}))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_a_write_into_a_mapped_weight_stays_in_the_process(folder: Path, tmp_path: Path) -> None:
    load(folder, tmp_path)
    model = load(folder, tmp_path)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert_same(tensors_of(load(folder, tmp_path)), tensors_of(load(folder, None)))


def test_another_source_or_form_has_another_file(folder: Path, tmp_path: Path, reads: list[str]) -> None:
    source = shutil.copytree(folder, tmp_path / "model")
    place = tmp_path / "weights"
    for count, form in ((1, "nf4"), (2, "fp8")):
        load(source, place, form)
        assert len(list(place.iterdir())) == count
    load(source, place, dtype=torch.bfloat16)
    assert len(list(place.iterdir())) == 3
    os.utime(source / "model.safetensors", ns=(1, 1))
    reads.clear()
    load(source, place)
    assert reads
    assert len(list(place.iterdir())) == 4


def only_folder(place: Path) -> Path:
    (found,) = place.iterdir()
    return found


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def of_another(folder: Path) -> None:
    """A manifest that is whole, but has another key."""
    from roundpipe.loading import weight_file

    content = json.loads((folder / "manifest.json").read_text())
    del content["checksum"]
    content["key"]["form"] = "int8"
    content["checksum"] = weight_file._checksum(content)
    (folder / "manifest.json").write_text(json.dumps(content))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (lambda f: flip(f / "weights.bin", 5), r"the bytes of \S+ are not those that were written"),
    "cut": (lambda f: os.truncate(f / "weights.bin", 4096), r"its weights.bin has 4096 bytes instead of \d+"),
    "no weights": (lambda f: (f / "weights.bin").unlink(), "its files cannot be read"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "its files cannot be read"),
    "manifest": (lambda f: flip(f / "manifest.json", 40), "cannot be used: its"),
    "foreign": (of_another, "it has the weights of another model"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_and_foreign_files_are_refused_by_name(folder: Path, tmp_path: Path, kind: str) -> None:
    load(folder, tmp_path)
    damage, message = DAMAGE[kind]
    damage(only_folder(tmp_path))
    with pytest.raises(ConfigError, match=message) as refused:
        load(folder, tmp_path)
    assert str(only_folder(tmp_path)) in str(refused.value)
    assert "Remove that folder" in str(refused.value)


def test_a_file_is_complete_or_absent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    real, calls = WeightWriter.keep, []

    def keep(self: WeightWriter, weight: torch.Tensor) -> torch.Tensor:
        calls.append(weight)
        if len(calls) == 3:
            raise Killed
        return real(self, weight)

    monkeypatch.setattr(WeightWriter, "keep", keep)
    with pytest.raises(Killed):
        load(folder, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match=r"cannot be written into .* No space left on device.* Free space"):
        load(folder, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    free_name(tmp_path / "model-nf4-0123456789abcdef", PARTIAL).mkdir()
    load(folder, tmp_path)
    assert only_folder(tmp_path).name.startswith("model-nf4-"), "what a killed process left is removed"


def test_two_processes_may_write_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = WeightWriter._take_name
    second: list[Any] = []

    def take_name(self: WeightWriter) -> None:
        if not second:
            second.append(None)
            second.append(load(folder, tmp_path))
        real(self)

    monkeypatch.setattr(WeightWriter, "_take_name", take_name)
    first = load(folder, tmp_path)
    assert only_folder(tmp_path).name.startswith("model-nf4-")
    expected = tensors_of(load(folder, None))
    for model in (first, second[1], load(folder, tmp_path)):
        assert_same(tensors_of(model), expected)


@pytest.mark.parametrize("has_many_stages", [False, True])
def test_each_layer_is_read_ahead_before_its_upload(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_many_stages: bool
) -> None:
    """Also with one layer per stage: the layer that comes next is then one of another task."""
    model = livened(load(folder, tmp_path, lora=4).train())
    batch = {name: value % 60 for name, value in labelled("llama").items()}
    events: list[tuple[str, int]] = []
    read: list[tuple[int, str]] = []
    monkeypatch.setattr(
        host_memory,
        "read_pages_ahead",
        lambda tensor: read.append((tensor.data_ptr(), threading.current_thread().name)),
    )
    for owner, name, kind in ((LayerStore, "read_ahead", "ahead"), (LayerWeights, "upload_pieces", "up")):
        real = getattr(owner, name)

        def noted(self: Any, layer_id: int, *args: Any, kind: str = kind, real: Any = real) -> Any:
            events.append((kind, layer_id))
            return real(self, layer_id, *args)

        monkeypatch.setattr(owner, name, noted)
    with wrapped(model, 1, pin_model="off") as ours:
        store = ours._engine.store
        last = len(store.layers) - 1
        if has_many_stages:
            stages = [range(layer, layer + 1) for layer in range(last + 1)]
            plan = ModelExecutePlan(fwd_plan=stages[:-1], bwd_plan=stages[::-1])
            ours.set_run_config(RoundPipeRunConfig(execute_plan=plan, num_microbatch=2))
        train_call(ours, batch)
    for thread in threading.enumerate():
        if thread.name.endswith("read-ahead"):
            thread.join()
    ups = [position for position, (kind, _) in enumerate(events) if kind == "up"]
    assert len(ups) == (2 * last + 1 if has_many_stages else last + 1)
    for before, position in itertools.pairwise(ups):
        assert ("ahead", events[position][1]) in events[:before], "before the upload of the layer in front of it"
    assert {name for _, name in read} == {"roundpipe-read-ahead"}
    frozen = {param.data_ptr() for param in model.parameters() if not param.requires_grad}
    assert {address for address, _ in read} <= frozen
    assert len({address for address, _ in read}) > len(frozen) / 2


def test_options_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights_folder=.* is for packed weights: give frozen_weights"):
        roundpipe.load(folder, weights_folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written into .*file"):
        load(folder, tmp_path / "file")
