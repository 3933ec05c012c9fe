"""Saving beside training: what waits for the writer and what does not, and what a file holds that is written late.

A gate blocks the writer before a chosen tensor. Layers are written from the last to the first, first all weights, then
the optimizer's tensors; a layer is released after its last tensor.
"""

from __future__ import annotations

import errno
import gc
import importlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from helpers_checkpoint import (
    MANIFEST,
    WIDTH,
    MakeOptimizer,
    Training,
    assert_same_bits,
    half_mse,
    momentum,
    network,
    rewrite_manifest,
)
from helpers_faults import WAIT_S, Background, run_script
from helpers_files import as_another_user, watched_files
from roundpipe import CheckpointError, ConfigError, checkpoint, optim
from roundpipe.checkpoint import PendingSave
from roundpipe.checkpoint.contents import Source
from roundpipe.checkpoint.folders import check_parent
from roundpipe.store import OptimizerCopy

SAVING = importlib.import_module("roundpipe.checkpoint.save")  # the package's attribute `save` is the function
CONTENTS = importlib.import_module("roundpipe.checkpoint.contents")
# A tensor of the middle layer which is written after all tensors of layer 2 and before the last of layers 1 and 0.
AMID = "state/exp_avg/1.0.weight"
AMID_OF_MOMENTUM = "state/momentum_buffer/1.0.weight"
FIRST = "2.0.weight"


class Gate:
    """Blocks the writer before it writes the tensor `name`."""

    closed: ClassVar[list[Gate]] = []  # those of a test that fails are opened at its end

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        self.closed.append(self)
        real = PendingSave._write_tensor

        def write_tensor(job: PendingSave, source: Source, put: Callable[[memoryview], None]) -> None:
            if source.name == name:
                self._reached.set()
                assert self._opened.wait(WAIT_S)
            real(job, source, put)

        patch.setattr(PendingSave, "_write_tensor", write_tensor)
        # One writer, so that the order of tensors is known.
        patch.setattr(SAVING, "io_threads", lambda: 1)

    def wait(self) -> None:
        assert self._reached.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.fixture
def opened() -> Iterator[list[Training]]:
    """Trainings that are closed at the end."""
    made: list[Training] = []
    yield made
    while Gate.closed:
        Gate.closed.pop().open()
    for training in made:
        training.close()


def held(training: Training) -> set[int]:
    """The layers that a checkpoint still reads."""
    store = training.model._engine.store
    return {layer_id for layer_id in range(len(store.layers)) if store.is_held(layer_id)}


def wait_until_waiting(training: Training, what: str) -> None:
    """Block until some thread waits in the monitor for `what`."""
    waits = training.model._engine.group.monitor._waits
    wait_for(lambda: any(what in wait for wait in list(waits.values())), f"a thread that waits for {what}")


def wait_for(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(1e-3)


def moments(training: Training) -> list[torch.Tensor]:
    """Copies of the first state tensor of the weight of each layer, also while a step runs."""
    optimizer = training.optimizer  # state_dict() would wait for the step
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [optimizer.state[params[index]] for index in (0, 2, 6)]
    tensors = [next(value for value in state.values() if value.dim()) for state in states]
    assert [tensor.shape for tensor in tensors] == [(WIDTH, WIDTH)] * 3
    return [tensor.clone() for tensor in tensors]


def unchanged(before: list[torch.Tensor], training: Training) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(before, moments(training), strict=True)]


def twin_bits(num_steps: int, further: int = 0, **options: Any) -> list[dict[str, Any]]:
    """The state of a training that is never saved, after some steps and after further ones.

    It synchronizes in between, as a save does: in stale mode, the next call then computes with the newest weights.
    """
    twin = Training(**options)
    found = []
    for count in (num_steps, further):
        twin.train(count)
        found.append(twin.bits())
    twin.close()
    return found


def assert_holds(folder: Path, expected: dict[str, Any], **options: Any) -> None:
    """The checkpoint has these bits: they are in another training after loading."""
    other = Training(seed=7, **options)
    other.load(folder)
    assert_same_bits(other.bits(), expected)
    other.close()


# Calls and steps while layers are unwritten.


def test_a_call_completes_while_nothing_is_written(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path
) -> None:
    expected, _ = twin_bits(2)
    opened.append(training := Training())
    training.train(2)
    gate = Gate(patch, FIRST)
    pending = training.save(tmp_path / "one")
    gate.wait()
    training.compute()  # also changes buffers
    training.compute()
    assert not pending.is_done
    assert held(training) == {0, 1, 2}
    gate.open()
    assert pending.wait() == tmp_path / "one"
    assert held(training) == set()
    assert_holds(tmp_path / "one", expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "stale"])
def test_a_step_changes_written_layers_and_waits_for_the_others(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path, is_async: bool
) -> None:
    expected, later = twin_bits(2, 2, is_async=is_async)
    opened.append(training := Training(is_async=is_async))
    training.train(2)
    gate = Gate(patch, AMID)
    pending = training.save(tmp_path / "one")
    gate.wait()
    assert held(training) == {0, 1}
    before = moments(training)
    step = Background(lambda: training.train(1))
    wait_until_waiting(training, "a checkpoint to read layer 1")
    assert unchanged(before, training) == [True, True, False]
    if is_async:
        step.result()  # the step itself is under way
    gate.open()
    step.result()
    pending.wait()
    training.train(1)
    assert_same_bits(training.bits(), later)
    assert_holds(tmp_path / "one", expected)


def test_a_step_takes_written_layers_first(patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path) -> None:
    """The last layer is updated first as a rule. Here a checkpoint reads it longer than the others."""
    opened.append(training := Training())
    training.train(2)
    store, monitor = training.model._engine.store, training.model._engine.group.monitor
    before = moments(training)
    with monitor:
        store.hold(2)
    step = Background(lambda: training.train(1))
    try:
        wait_for(lambda: unchanged(before, training) == [False, False, True], "the update of layers 0 and 1")
        assert not step.is_over()
    finally:
        with monitor:
            store.let_go(2)
    step.result()
    assert_same_bits(training.bits(), twin_bits(3)[0])


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "stale"])
def test_an_optimizer_that_first_reads_all_gradients_waits_for_all_layers(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path, is_async: bool
) -> None:
    options: dict[str, Any] = {"is_async": is_async, "make_optimizer": momentum}
    expected, later = twin_bits(2, 1, **options)
    opened.append(training := Training(**options))
    training.train(2)
    gate = Gate(patch, AMID_OF_MOMENTUM)
    training.save(tmp_path / "one")
    gate.wait()
    before = moments(training)
    step = Background(lambda: training.train(1))
    wait_until_waiting(training, "a checkpoint to read layer")
    assert unchanged(before, training) == [True, True, True]
    gate.open()
    step.result()
    assert_same_bits(training.bits(), later)
    assert_holds(tmp_path / "one", expected, make_optimizer=momentum)


class OneByOne(torch.optim.Optimizer):
    """Updates one parameter after the other, the last first."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in reversed(group["params"]):
                total = self.state[param].setdefault("total", torch.zeros_like(param))
                with torch.no_grad():
                    param.mul_(0.999)
                    total.add_(param.grad)
                    param.add_(total, alpha=-group["lr"])


def test_an_optimizer_that_updates_one_parameter_after_the_other_waits_only_for_unwritten_ones(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path
) -> None:
    expected, later = twin_bits(2, 1, make_optimizer=OneByOne)
    opened.append(training := Training(make_optimizer=OneByOne))
    training.train(2)
    gate = Gate(patch, "state/total/1.0.weight")
    training.save(tmp_path / "one")
    gate.wait()
    before = moments(training)
    step = Background(lambda: training.train(1))
    wait_until_waiting(training, "a checkpoint to read layer 1")
    assert unchanged(before, training) == [True, True, False]
    gate.open()
    step.result()
    assert_same_bits(training.bits(), later)
    assert_holds(tmp_path / "one", expected, make_optimizer=OneByOne)


@pytest.mark.parametrize("make_optimizer", [optim.AdamW, momentum], ids=["one pass", "foreign"])
def test_the_step_of_a_plain_loop_waits(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path, make_optimizer: MakeOptimizer
) -> None:
    def step(training: Training) -> None:
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3)).to(training.dtype)
        half_mse(training.model(x), x).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    def twin(num_steps: int) -> dict[str, Any]:
        made = Training(make_optimizer=make_optimizer)
        for _ in range(num_steps):
            step(made)
        bits = made.bits()
        made.close()
        return bits

    expected, later = twin(2), twin(3)
    opened.append(training := Training(make_optimizer=make_optimizer))
    step(training)
    step(training)
    gate = Gate(patch, AMID if make_optimizer is optim.AdamW else AMID_OF_MOMENTUM)
    training.save(tmp_path / "one")
    gate.wait()
    before = moments(training)
    third = Background(lambda: step(training))
    wait_until_waiting(training, "a checkpoint to read layer")
    assert unchanged(before, training) == [True, True, True]  # its body may write any parameter
    gate.open()
    third.result()
    assert_same_bits(training.bits(), later)
    assert_holds(tmp_path / "one", expected, make_optimizer=make_optimizer)


# Other writes while layers are unwritten.


@pytest.mark.parametrize("what", ["load_state_dict", "load", "save", "close", "synchronize"])
def test_a_call_that_needs_all_layers_waits_for_the_whole_checkpoint(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path, what: str
) -> None:
    expected, _ = twin_bits(2)
    opened.append(training := Training())
    training.save(tmp_path / "start").wait()
    training.train(2)
    others = {key: value + 1 for key, value in training.model.state_dict().items()}
    calls: dict[str, Callable[[], object]] = {
        "load_state_dict": lambda: training.model.load_state_dict(others),
        "load": lambda: training.load(tmp_path / "start"),
        "save": lambda: training.save(tmp_path / "two").wait(),
        "close": training.close,
        "synchronize": training.model.synchronize,
    }
    gate = Gate(patch, AMID)
    pending = training.save(tmp_path / "one")
    gate.wait()
    call = Background(calls[what])
    wait_until_waiting(training, f"the checkpoint {tmp_path / 'one'} to be written")
    assert not call.is_over()
    gate.open()
    call.result()
    assert pending.is_done
    assert_holds(tmp_path / "one", expected)
    assert os.readlink(tmp_path / "latest") == ("two" if what == "save" else "one")


@pytest.mark.parametrize("what", ["parameter", "state"])
def test_a_write_of_the_user_into_unwritten_tensors_is_found(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path, what: str
) -> None:
    opened.append(training := Training())
    training.save(tmp_path / "start").wait()
    training.train(2)
    name = "1.0.weight"
    param = dict(training.model.named_parameters())[name]
    state = list(training.optimizer.state.values())[2]["exp_avg"]
    gate = Gate(patch, name)
    pending = training.save(tmp_path / "one")
    gate.wait()
    with torch.no_grad():
        (param if what == "parameter" else state).zero_()
    gate.open()
    with pytest.raises(CheckpointError, match=rf"1\.0\.weight' was changed while the checkpoint {tmp_path}/one"):
        pending.wait()
    assert sorted(os.listdir(tmp_path)) == ["latest", "start"]
    training.train(1)
    training.save(tmp_path / "one").wait()


def test_a_write_of_the_user_into_written_tensors_does_no_harm(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path
) -> None:
    expected, _ = twin_bits(2)
    opened.append(training := Training())
    training.train(2)
    gate = Gate(patch, "state/exp_avg/2.0.weight")  # comes after all weights
    pending = training.save(tmp_path / "one")
    gate.wait()
    with torch.no_grad():
        for param in training.model.parameters():
            param.zero_()
    gate.open()
    pending.wait()
    assert_holds(tmp_path / "one", expected)
    training.train(1)


def test_halved_masters_are_not_widened(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    training.train(2)
    training.save(tmp_path / "one").wait()
    training.train(1, save_in=tmp_path, save_every=1)
    training.model.synchronize()
    masters = list(training.model.optim_parameters())
    assert len(masters) == 8
    for master in masters:
        assert isinstance(master, OptimizerCopy)
        assert master.halves is not None
        with torch._C.DisableTorchFunctionSubclass():
            assert master.untyped_storage().nbytes() == 0


# Ends of processes and models.


def test_the_interpreter_ends_after_the_checkpoint(tmp_path: Path) -> None:
    """The writer goes on only when the main thread is over."""
    done = run_script(
        f"""
from helpers_checkpoint import Training
from roundpipe.checkpoint import PendingSave
from pathlib import Path
training = Training()
training.train(2)
real = PendingSave._write_tensor
def write_tensor(*args):
    threading.main_thread().join()
    real(*args)
PendingSave._write_tensor = write_tensor
training.save(Path({str(tmp_path / "one")!r}))
training.compute()
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert_holds(tmp_path / "one", twin_bits(2)[0])


def test_the_checkpoint_is_written_after_the_model_is_gone(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected, _ = twin_bits(2)
    training = Training()
    training.train(2)
    gate = Gate(patch, FIRST)
    pending = training.save(tmp_path / "one")
    gate.wait()
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None
    gate.open()
    pending.wait()
    assert_holds(tmp_path / "one", expected)


def test_a_failure_after_the_model_was_closed_is_logged(
    patch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    training.train(1)
    gate = Gate(patch, FIRST)
    pending = training.save(tmp_path / "one")
    gate.wait()
    del training
    gc.collect()
    shutil.rmtree(next(tmp_path.glob(".one.partial-*")))
    gate.open()
    with caplog.at_level(logging.ERROR, "roundpipe"):
        with pytest.raises(CheckpointError, match=r"No such file|was removed while"):
            pending.wait()
        wait_for(lambda: "a checkpoint failed after its model was closed" in caplog.text, "the log")
    assert os.listdir(tmp_path) == []


# Failures of the file system.


class _FailAt:
    """Fails one call into the file system, once."""

    def __init__(self, number: int) -> None:
        self.number, self.reason = number, (errno.ENOSPC, errno.EACCES, errno.EIO)[number % 3]
        self.what = ""

    def __call__(self, number: int, what: str) -> None:
        if number == self.number:
            self.what = what
            raise OSError(self.reason, os.strerror(self.reason))


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "replaces", [pytest.param(False, marks=pytest.mark.slow), True], ids=["new folder", "same folder"]
)
def test_a_failure_at_every_call_into_the_file_system(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path, replaces: bool
) -> None:
    patch.setattr(CONTENTS, "_SHARD_BYTES", 2000)
    opened.append(training := Training())
    training.train(1)
    num_calls, number = 1, -1
    while number < num_calls:  # the last round fails no call
        number += 1
        parent = tmp_path / str(number)
        training.save(parent / "old").wait()
        if replaces:
            training.save(parent / "new").wait()
        before = {path.name: contents_of(path) for path in parent.iterdir()}
        links = os.readlink(parent / "latest")
        fail, message = _FailAt(number), ""
        with watched_files(parent, fail) as calls:
            try:
                training.save(parent / "new", keep=1).wait()
            except CheckpointError as error:
                message = str(error)
        num_calls = max(num_calls, len(calls))
        present = {path.name: contents_of(path) for path in parent.iterdir()}
        assert held(training) == set(), fail.what
        if fail.what:
            if message:
                assert str(parent / "new") in message, fail.what
                assert os.strerror(fail.reason) in message, fail.what
            else:  # only removing what an older checkpoint has left may fail in silence: the next save repeats it
                assert re.match(r"open \.+(old|new\.replaced-\w+)\.removed-", fail.what), fail.what
            if not message or "is complete" in message:
                checkpoint.load(parent / "new", training.model, training.optimizer)
                assert checkpoint.latest(parent) == parent / "new"
            else:
                assert present == before, fail.what
                assert os.readlink(parent / "latest") == links, fail.what
            training.train(1)
            training.save(parent / "new", keep=1).wait()
        assert sorted(os.listdir(parent)) == ["latest", "new"], fail.what
        assert os.readlink(parent / "latest") == "new"
        shutil.rmtree(parent)
    assert number > 40
    assert not fail.what


def test_a_failure_that_is_not_waited_for_is_raised_by_the_next_call(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    training.train(1)

    def fail(number: int, what: str) -> None:
        if what == "create optimizer-00001-of-00001.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watched_files(tmp_path, fail):
        pending = training.save(tmp_path / "one")
        pending.wait_until_done()
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        training.train(1)
    assert "training can go on" in "".join(caught.value.__notes__)
    training.train(1)
    training.save(tmp_path / "one").wait()


def test_too_small_a_disk_is_refused_before_anything_is_written(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path
) -> None:
    opened.append(training := Training())
    usage = shutil.disk_usage(tmp_path)
    patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"needs [\d.e-]+ GB, 1e-07 GB are free.*Nothing was written"):
        training.save(tmp_path / "one")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["not writable", "not accessible"])
@pytest.mark.parametrize("where", ["one", "below/one"])
def test_no_permission(opened: list[Training], mode: int, where: str) -> None:
    opened.append(training := Training())
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, mode)
        try:
            with (
                as_another_user(),
                pytest.raises(CheckpointError, match=f"{parent}/{where} could not be written.*denied"),
            ):
                training.save(Path(parent) / where)
        finally:
            os.chmod(parent, 0o755)
        assert os.listdir(parent) == []
        training.train(1)
        training.save(Path(parent) / where).wait()


# Folders beside each other.


def test_old_checkpoints_are_removed(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    for number in range(5):
        training.save(tmp_path / f"c{number}", keep=2).wait()
        assert checkpoint.latest(tmp_path) == tmp_path / f"c{number}"
        assert os.readlink(tmp_path / "latest") == f"c{number}"
    assert sorted(os.listdir(tmp_path)) == ["c3", "c4", "latest"]
    training.save(tmp_path / "c5").wait()
    assert sorted(os.listdir(tmp_path)) == ["c3", "c4", "c5", "latest"]


def test_only_checkpoints_are_removed(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    for name, content in {"logs": b"", "other": b'{"format": "other"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / (MANIFEST if content else "text")).write_bytes(content)
    for number in range(2):
        training.save(tmp_path / f"c{number}", keep=1).wait()
    assert sorted(os.listdir(tmp_path)) == ["c1", "latest", "logs", "other"]


def test_the_latest_checkpoint_of_a_folder(
    opened: list[Training], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened.append(training := Training())
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "absent") is None
    training.save(tmp_path / "b").wait()
    training.save(tmp_path / "a").wait()
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    assert training.load(tmp_path / "latest") == {"step": 0}
    (tmp_path / "a" / MANIFEST).write_text("{")
    with caplog.at_level(logging.WARNING, "roundpipe"):
        assert checkpoint.latest(tmp_path) == tmp_path / "b"
    assert str(tmp_path / "a") in caplog.text


def test_a_folder_that_cannot_be_searched_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0)
        with as_another_user(), pytest.raises(CheckpointError, match=f"{parent} cannot be searched.*denied"):
            checkpoint.latest(parent)


def test_a_save_killed_while_it_replaces_a_checkpoint_leaves_the_old_one(
    opened: list[Training], tmp_path: Path
) -> None:
    """Between its two renames, the old checkpoint has a hidden name only."""
    expected, _ = twin_bits(2)
    opened.append(training := Training())
    training.train(2)
    training.save(tmp_path / "one").wait()
    hidden = tmp_path / ".one.replaced-1"
    (tmp_path / "one").rename(hidden)
    assert checkpoint.latest(tmp_path) == hidden
    for name in ("one", "latest", hidden.name):
        assert_holds(tmp_path / name, expected)
    training.save(tmp_path / "two").wait()
    assert hidden.exists()
    assert_holds(tmp_path / "one", expected)
    training.save(tmp_path / "one").wait()
    training.save(tmp_path / "three").wait()
    assert sorted(os.listdir(tmp_path)) == ["latest", "one", "three", "two"]


def test_a_checkpoint_that_is_half_removed_is_none(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    training.save(tmp_path / "one").wait()
    for name in (".one.removed-1", "..one.replaced-1.removed-1"):
        (tmp_path / "one").rename(tmp_path / name)
        assert checkpoint.latest(tmp_path) is None
        (tmp_path / name).rename(tmp_path / "one")


def test_what_killed_saves_have_left_is_removed(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    for name in (".one.partial-1", ".one.removed-1"):
        (tmp_path / name).mkdir()
    (tmp_path / ".latest.new-1").symlink_to("one")
    os.utime(tmp_path / ".latest.new-1", (0, 0), follow_symlinks=False)
    training.save(tmp_path / "one").wait()
    assert sorted(os.listdir(tmp_path)) == ["latest", "one"]


def test_the_folder_of_a_save_that_runs_is_not_removed(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path
) -> None:
    opened += [one := Training(), other := Training()]
    gate = Gate(patch, "1.0.weight")
    first = one.save(tmp_path / "one")
    gate.wait()
    patch.undo()
    other.save(tmp_path / "other").wait()
    gate.open()
    first.wait()
    assert sorted(os.listdir(tmp_path)) == ["latest", "one", "other"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"keep": 0}, "keep must be"),
        ({"keep": True}, "keep must be"),
        ({"files": {"../x": ""}}, "'../x'"),
        ({"files": {"/x": ""}}, "'/x'"),
        ({"files": {"": ""}}, "''"),
        ({"files": {"state.json": ""}}, "'state.json'"),
        ({"files": {"./manifest.json": ""}}, "manifest.json"),
        ({"files": {"model.safetensors": ""}}, "'model.safetensors'"),
    ],
)
def test_arguments_that_are_refused(
    opened: list[Training], tmp_path: Path, arguments: dict[str, Any], reason: str
) -> None:
    opened.append(training := Training())
    with pytest.raises(ConfigError) as caught:
        training.save(tmp_path / "one", **arguments)
    assert reason in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_targets_that_are_refused(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    for name, reason in {"file": "not a folder", "link": "not a folder", "full": "other content"}.items():
        with pytest.raises(CheckpointError, match=f"{tmp_path}/{name} .*{reason}"):
            training.save(tmp_path / name)
    with pytest.raises(ConfigError, match="another name"):
        training.save(tmp_path / "latest")
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="latest exists and is not a link"):
        training.save(tmp_path / "one")
    assert (tmp_path / "full" / "mine").exists()


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "the manifest of a web page": (lambda folder: (folder / MANIFEST).write_text('{"icons": []}'), "not the manifest"),
    "an empty manifest": (lambda folder: (folder / MANIFEST).write_text(""), "cannot be read"),
    "a folder named manifest": (lambda folder: (folder / MANIFEST).mkdir(), "it is a folder"),
    "a manifest that was altered": (
        lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"step"', '"steps"')),
        "altered",
    ),
    "a file beside the checkpoint's": (lambda folder: (folder / "thesis.txt").write_text("years"), "'thesis.txt'"),
    "files in a folder": (
        lambda folder: [(folder / "mine").mkdir(), (folder / "mine" / "a").touch(), (folder / "mine" / "b").touch()],
        "'mine/a' and 1 more files",
    ),
    "a link": (lambda folder: (folder / "link").symlink_to(".."), "'link'"),
    "a FIFO beside the files": (lambda folder: os.mkfifo(folder / "fifo"), "'fifo'"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_folder_with_anything_but_a_checkpoint_is_not_replaced(
    opened: list[Training], tmp_path: Path, kind: str
) -> None:
    opened.append(training := Training())
    make, reason = FOREIGN[kind]
    training.save(tmp_path / "one").wait()
    make_all = "file" in kind or "link" in kind or "altered" in kind
    if not make_all:  # a folder that never was a checkpoint
        shutil.rmtree(tmp_path / "one")
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "thesis.txt").write_text("years")
    make(tmp_path / "one")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/one .*other content.*{reason}") as caught:
        training.save(tmp_path / "one")
    assert "a save would delete it" in str(caught.value)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    training.train(1)
    training.save(tmp_path / "two").wait()


def test_a_folder_that_gets_other_content_while_files_are_written_is_not_replaced(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path
) -> None:
    opened.append(training := Training())
    training.save(tmp_path / "one").wait()
    gate = Gate(patch, FIRST)
    pending = training.save(tmp_path / "one")
    gate.wait()
    (tmp_path / "one" / "thesis.txt").write_text("years")
    gate.open()
    with pytest.raises(CheckpointError, match=r"'thesis\.txt'"):
        pending.wait()
    assert (tmp_path / "one" / "thesis.txt").read_text() == "years"
    assert sorted(os.listdir(tmp_path)) == ["latest", "one"]
    training.load(tmp_path / "one")


def test_files_that_no_save_wrote_stay_when_an_old_checkpoint_is_removed(
    opened: list[Training], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened.append(training := Training())
    training.save(tmp_path / "one", files={"below/mine": ""}).wait()
    (tmp_path / "one" / "thesis.txt").write_text("years")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    shutil.rmtree(tmp_path / "one" / "below")
    (tmp_path / "one" / "below").symlink_to("../elsewhere")  # leads a name of the manifest out of the folder
    with caplog.at_level(logging.WARNING, "roundpipe"):
        training.save(tmp_path / "two", keep=1).wait()
    assert "one: the checkpoint is removed; what no save wrote stays: 'below' and 1 more files" in caplog.text
    assert sorted(os.listdir(tmp_path / "one")) == ["below", "thesis.txt"]
    assert (tmp_path / "elsewhere" / "mine").exists()
    assert checkpoint.latest(tmp_path) == tmp_path / "two"


def test_folders_with_names_like_those_of_killed_saves_are_not_removed(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    names = [".film.partial-download", ".notes.removed-by-me", ".a.replaced-", "x.partial-1"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").touch()
    (tmp_path / ".one.removed-1").symlink_to(names[0])
    training.save(tmp_path / "one").wait()
    assert sorted(os.listdir(tmp_path)) == sorted([*names, ".one.removed-1", "latest", "one"])
    assert all((tmp_path / name / "content").exists() for name in names)


@pytest.mark.parametrize("clock", ["back", "forward and back", "at rest"])
def test_the_order_of_checkpoints_does_not_depend_on_the_clock(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path, clock: str
) -> None:
    opened.append(training := Training())
    hour_ns, now_ns = 3_600_000_000_000, time.time_ns()
    shifts = {"back": [0, -1, -2, -3, -4], "forward and back": [0, 9, -9, 3, 1], "at rest": [0, 0, 0, 0, 0]}[clock]
    for number, shift in enumerate(shifts):
        patch.setattr(time, "time_ns", lambda shift=shift: now_ns + shift * hour_ns)
        name = f"c{9 - number}"  # nor on the names
        training.save(tmp_path / name, keep=2).wait()
        os.utime(tmp_path / name, ns=(now_ns + shift * hour_ns,) * 2)
        assert checkpoint.latest(tmp_path) == tmp_path / name
        kept = sorted(f"c{9 - each}" for each in range(max(number - 1, 0), number + 1))
        assert sorted(os.listdir(tmp_path)) == [*kept, "latest"]
    training.save(tmp_path / "c6", keep=2).wait()  # saved again: the newest
    assert checkpoint.latest(tmp_path) == tmp_path / "c6"


def test_checkpoints_of_releases_that_did_not_count_come_first_by_their_times(
    opened: list[Training], tmp_path: Path
) -> None:
    opened.append(training := Training())
    for name, saved_at_ns in {"b": 1, "a": 3, "c": 2}.items():
        training.save(tmp_path / name).wait()

        def make_old(data: dict[str, Any], saved_at_ns: int = saved_at_ns) -> None:
            del data["sequence"]
            data["saved_at_ns"] = saved_at_ns

        rewrite_manifest(tmp_path / name, make_old)
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    rewrite_manifest(tmp_path / "a", lambda data: data.update(saved_at_ns=2**62))
    training.save(tmp_path / "new", keep=2).wait()
    assert checkpoint.latest(tmp_path) == tmp_path / "new"
    assert sorted(os.listdir(tmp_path)) == ["a", "latest", "new"]


def test_a_run_learns_before_it_begins_that_it_cannot_save(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    folder = tmp_path / "out"
    check_parent(folder, "checkpoint-", after=0)  # does not exist yet
    training.save(folder / "checkpoint-20").wait()
    for name in ("checkpoint-10", "checkpoint-30", "checkpoint-x", "checkpoint-050", "other-40"):
        (folder / name).mkdir()
        (folder / name / "optimizer.pt").touch()
    check_parent(folder, "checkpoint-", after=10, until=29)  # a checkpoint is replaced, others are not reached
    check_parent(folder, "checkpoint-", after=30)
    for limits in ({"after": 0}, {"after": 9, "until": 10}, {"after": 29}):
        with pytest.raises(CheckpointError, match=r"checkpoint-[13]0 has other content"):
            check_parent(folder, "checkpoint-", **limits)
    (folder / "latest").unlink()
    (folder / "latest").mkdir()
    with pytest.raises(CheckpointError, match="latest exists and is not a link"):
        check_parent(folder, "checkpoint-", after=100)


def test_a_system_that_refuses_advice(patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path) -> None:
    """Some file systems do not know posix_fadvise: the checkpoint is complete without it."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    opened.append(training := Training())
    training.train(1)
    patch.setattr(os, "posix_fadvise", refuse, raising=False)
    training.save(tmp_path / "one").wait()
    assert_holds(tmp_path / "one", twin_bits(1)[0])


def endless() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (
            {"mask": torch.eye(3).to_sparse()},
            r"state\.extra\.mask is a tensor of torch.float32, torch.sparse_coo.*to_dense",
        ),
        ([torch.eye(3).to_sparse()], r"state\.extra\[0\] .*sparse_coo"),
        (torch.empty(2, device="meta"), r"state\.extra .*without values"),
        (torch.ones(2, dtype=torch.complex128), r"state\.extra .*complex128"),
        (endless(), "state cannot be saved"),
        ({"digits": 10**5000}, "state cannot be saved"),
        ({"set": {1}}, r"state\.extra\.set is a set"),
    ],
    ids=["sparse", "sparse in a list", "meta", "dtype", "endless", "long number", "set"],
)
def test_an_extra_that_no_checkpoint_can_hold(opened: list[Training], tmp_path: Path, extra: Any, reason: str) -> None:
    opened.append(training := Training())
    training.train(1)
    before = training.bits()
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.save(tmp_path / "one", training.model, training.optimizer, extra=extra)
    assert os.listdir(tmp_path) == []
    assert_same_bits(training.bits(), before)
    training.train(1)
    assert_same_bits(training.bits(), twin_bits(2)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_extra_of_nested_tensors(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    extra = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(CheckpointError, match=r"state\.extra is a tensor of .*cannot hold"):
        checkpoint.save(tmp_path / "one", training.model, extra=extra)


def test_an_extra_whose_memory_is_not_its_values(opened: list[Training], tmp_path: Path) -> None:
    """torch conjugates and negates lazily: the memory of such a tensor holds other values."""
    opened.append(training := Training())
    values = torch.tensor([1 + 2j, 3 - 4j])
    extra = {"conjugate": values.conj(), "negative": values.conj().imag, "transposed": torch.arange(6).view(2, 3).t()}
    assert extra["conjugate"].is_conj()
    assert extra["negative"].is_neg()
    checkpoint.save(tmp_path / "one", training.model, extra=extra).wait()
    found = checkpoint.load(tmp_path / "one", training.model)
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in extra.items()}


def test_a_state_that_no_checkpoint_can_hold(opened: list[Training], tmp_path: Path) -> None:
    opened.append(training := Training())
    training.train(1)
    state = training.optimizer.state
    first = next(iter(state))
    cases: list[tuple[Any, Any, str]] = [
        ("global", {"step": 1}, "'global'"),
        (torch.zeros(3), {"step": 1}, r"tensor of shape \[3\]"),
        (first, {"wave": torch.zeros(3, dtype=torch.complex128)}, "'wave' .*complex128"),
    ]
    for key, value, reason in cases:
        old = state.pop(key, None)
        state[key] = value
        with pytest.raises(CheckpointError, match=reason):
            training.save(tmp_path / "one")
        del state[key]
        if old is not None:
            state[key] = old
    assert os.listdir(tmp_path) == []


def test_a_plain_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="wrap the model first"):
        checkpoint.save(tmp_path / "one", network())  # type: ignore[arg-type]


def test_a_system_that_allows_no_further_thread(
    patch: pytest.MonkeyPatch, opened: list[Training], tmp_path: Path
) -> None:
    """Without further threads, one writes all files."""
    real = SAVING.start_thread

    def refuse(thread: threading.Thread) -> None:
        if "save-" in thread.name:
            raise RuntimeError("can't start new thread")
        real(thread)

    expected, _ = twin_bits(1)
    opened.append(training := Training())
    training.train(1)
    patch.setattr(CONTENTS, "_SHARD_BYTES", 500)
    patch.setattr(SAVING, "io_threads", lambda: 4)
    patch.setattr(SAVING, "start_thread", refuse)
    training.save(tmp_path / "one").wait()
    assert_holds(tmp_path / "one", expected)


def test_a_finished_save_keeps_no_memory_of_the_model(tmp_path: Path) -> None:
    training = Training()
    pending = training.save(tmp_path / "one")
    pending.wait()
    param = weakref.ref(next(training.model.original_model.parameters()))
    training.close()
    del training
    gc.collect()
    assert param() is None
    assert pending.folder == tmp_path / "one"
