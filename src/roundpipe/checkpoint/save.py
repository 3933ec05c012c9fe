"""Writes checkpoints: captures a training run, then writes its layers in the background while training goes on.

[Note: saving beside training] `save` waits until the model is idle and captures which tensors to write. From then on
the layers are *held*: calls may run, but an optimizer step waits before it changes a held layer. Writer threads release
a layer when its last tensor is written. Tensors are written from the memory in which training uses them, so no second
copy exists.

[Note: complete or absent] Files are written into a hidden folder beside the final one, flushed to the disk, the
manifest last. A rename then gives the folder its name, and only then `latest` changes and old checkpoints are removed.
So a folder with its final name is always complete, and a process that is killed leaves the earlier checkpoints as they
were.

With a process group, all machines write into the folder that rank 0 has made. [Note: saving together] says how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import platform
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roundpipe.api.group import Group
from roundpipe.api.proxy import ModelProxy
from roundpipe.checkpoint.contents import (
    Contents,
    HasState,
    Shard,
    all_entries,
    capture,
    check_names,
    master_kinds,
    part_of,
    shards_of,
    write_configuration,
)
from roundpipe.checkpoint.folders import (
    LATEST,
    TOKEN,
    check_target,
    make_partial,
    make_token,
    next_sequence,
    not_written,
    point_to,
    prune,
    remove,
    remove_abandoned,
    see_token,
    take_name,
)
from roundpipe.checkpoint.format import (
    MANIFEST,
    STATE_FILE,
    FileEntry,
    Manifest,
    check_manifest,
    check_overlaps,
    chunks,
    file_entry,
    make_synced,
    plain_values,
    raw_bytes,
    state_file,
    state_text,
    sync_folder,
    write_synced,
)
from roundpipe.checkpoint.ranges import Source
from roundpipe.checkpoint.together import Progress, outcome_of, require_same, together
from roundpipe.checkpoint.verified import io_threads
from roundpipe.distributed.line import Payload
from roundpipe.distributed.machines import Machines
from roundpipe.errors import ArgumentTypeError, CheckpointError, ConfigError, add_note
from roundpipe.monitor import THREAD_PREFIX, has_started, shielded, start_thread
from roundpipe.store import LayerStore, Share
from roundpipe.version import __version__

logger = logging.getLogger("roundpipe")
_ALONE = Share(0, 1)
_Layer = tuple[LayerStore, int]


def check_model(model: object) -> ModelProxy:
    """Return the model if it is a wrapped one; raise if it is not."""
    if not isinstance(model, ModelProxy):
        raise ArgumentTypeError(
            f"a checkpoint is made of a RoundPipe or AutoRoundPipe, got {type(model).__name__}; wrap the model first, "
            "or use its own save_pretrained() or torch.save()."
        )
    return model


def save(
    folder: str | os.PathLike[str],
    model: ModelProxy,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: HasState | None = None,
    scaler: HasState | None = None,
    extra: Any = None,
    tokenizer: Any = None,
    files: Mapping[str, str] | None = None,
    keep: int | None = None,
    spare: Sequence[str | os.PathLike[str]] = (),
) -> PendingSave:
    """Save a training run into `folder`, which holds this checkpoint alone. Returns while layers are still written.

    Waits for all calls and steps, as `model.synchronize()` does. Calls and steps after it are not part of the
    checkpoint. The parent folder's `latest` becomes a link to the checkpoint when it is complete. A failure of the
    background is raised by `wait()` of the result and by the next call of the model.

    With a process group, all machines call this together, with the same folder on a file system that they share. Each
    writes its part. `extra`, `tokenizer`, `files`, `keep` and `spare` of rank 0 count.

    extra: numbers, strings, tensors and lists, tuples and dicts of them; `load` returns it.
    tokenizer: saved with its `save_pretrained`, so that the folder loads with `from_pretrained`.
    files: names and texts of further small files.
    keep: after this save, remove all but the `keep` newest checkpoints beside it.
    spare: checkpoints that are not removed, such as the best one. They count as kept ones.
    """
    engine = check_model(model)._engine
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigError(f"keep must be a number of checkpoints, 1 or more, or None to remove none, got {keep!r}.")
    target = Path(os.path.abspath(folder))
    machines = engine.group.machines
    if machines is None:
        check_target(target)
    check_names(files or {})
    spared = frozenset(Path(os.path.abspath(each)) for each in spare)

    request = _Request(model, target, optimizer, scheduler, scaler, extra, tokenizer, files or {}, keep, spared)
    if machines is None:
        return engine.while_idle(request.begin)
    outcome: Callable[[], PendingSave] = engine.while_idle(lambda: outcome_of(lambda: request.begin_together(machines)))
    return outcome()


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of one call of `save`. Its methods are called while the model is idle."""

    model: ModelProxy
    target: Path
    optimizer: torch.optim.Optimizer | None
    scheduler: HasState | None
    scaler: HasState | None
    extra: Any
    tokenizer: Any
    files: Mapping[str, str]
    keep: int | None
    spared: frozenset[Path]

    def begin(self) -> PendingSave:
        """Save on this machine alone."""
        self._warn()
        job = self._captured(None)
        job.open(self.model.original_model, self.tokenizer, self.files)
        return job

    def begin_together(self, machines: Machines) -> PendingSave:
        """Save on all machines: see [Note: saving together]."""
        group, what = self.model._engine.group, f"saving the checkpoint {self.target.name}"
        optimizer = None if self.optimizer is None else type(self.optimizer).__name__
        answers = together(machines, what, lambda: {"kinds": master_kinds(group), "optimizer": optimizer})
        require_same(answers, "optimizer", "save()")  # else the ranges of some machines would be missing
        kinds = [each["kinds"] for each in answers]
        if machines.share.rank == 0:
            self._warn()
        jobs: list[PendingSave] = []

        def make() -> Payload:
            jobs.append(self._captured(kinds))
            return jobs[0].make_shared_folder()

        try:
            folder = together(machines, f"{what}: the folder", make)[0]
            model = self.model.original_model
            jobs[0].open_together(machines, what, folder, model, self.tokenizer, self.files)
        except BaseException as error:
            for job in jobs:
                job.give_up(error)
            raise
        return jobs[0]

    def _captured(self, kinds: Sequence[str] | None) -> PendingSave:
        group = self.model._engine.group
        contents = capture(
            self.model.original_model, group, self.optimizer, self.scheduler, self.scaler, self.extra, kinds
        )
        return PendingSave(self.target, group, contents, self.keep, self.spared)

    def _warn(self) -> None:
        if self.model._engine.group.recovery.has_gradients():
            logger.warning(
                "%s: gradients gathered since the last optimizer step are not part of the checkpoint %s; save after a "
                "step to resume exactly.",
                self.model.name,
                self.target,
            )


# Saving in the background.


class PendingSave:
    """A checkpoint that is being written. `save` returns it."""

    def __init__(
        self, folder: Path, group: Group, contents: Contents, keep: int | None, spared: frozenset[Path]
    ) -> None:
        self.folder = folder
        self.error: BaseException | None = None  # why the checkpoint could not be completed
        self.is_done = False  # whether the checkpoint is complete or has failed
        self._group: Group | None = group  # None after a success: this object must not keep the model's memory alive
        self._monitor, self._keep, self._spared = group.monitor, keep, spared
        self._contents = contents
        self._share = _ALONE if group.machines is None else group.machines.share
        self._progress: Progress | None = None  # with several machines, once the files are being written
        self._shards, self._indices = shards_of(contents, self._share)
        self._left = Counter(source.layer for shard in self._shards for source in shard.sources)
        self._files: dict[str, FileEntry] = {}
        self._partial: Path | None = None  # the hidden folder, from its creation until it gets its final name
        self._is_named = False  # whether the complete folder has its final name
        self._lock: int | None = None  # a locked handle of the partial folder: shows that its writer lives

    def wait(self) -> Path:
        """Block until the checkpoint is complete, and return its folder. Raises what prevented it."""
        self.wait_until_done()
        if self.error is not None:
            assert self._group is not None
            self._group.stepper.was_raised(self.error)
            raise self.error
        return self.folder

    def wait_until_done(self) -> None:
        """Block until the checkpoint is complete or has failed. Raises nothing of the save."""
        with self._monitor:
            self._monitor.wait_until(lambda: self.is_done, f"the checkpoint {self.folder} to be written")

    # On the caller's thread, while nothing runs.

    def open(self, model: torch.nn.Module, tokenizer: Any, files: Mapping[str, str]) -> None:
        """Write the small files, hold all layers, and start the thread that writes the large ones."""
        thread: threading.Thread | None = None
        try:
            self._make_partial()
            self._write_small_files(model, tokenizer, files)
            thread = self._thread()
            self._start(thread)
        except BaseException as error:
            if thread is not None and has_started(thread):  # a Ctrl-C: the checkpoint is written nevertheless
                raise
            explained = self._explained(error)
            # Shielded: after another Ctrl-C in the middle, steps would wait forever for layers that stay held.
            shielded(lambda: self._end(explained, raises_here=True))
            raise explained  # noqa: B904 - `_explained` has set the cause

    def make_shared_folder(self) -> Payload:
        """Make the folder on rank 0; returns what the other machines need to find it."""
        if self._share.rank:
            return {}
        with self._explaining():
            check_target(self.folder)
            self._make_partial()
            assert self._partial is not None
            return {"name": self._partial.name, "token": make_token(self._partial)}

    def open_together(
        self,
        machines: Machines,
        what: str,
        folder: Payload,
        model: torch.nn.Module,
        tokenizer: Any,
        files: Mapping[str, str],
    ) -> None:
        """As `open`, on all machines or on none. `folder`: what `make_shared_folder` gives on rank 0."""

        def prepare() -> Payload:
            with self._explaining():
                partial = self.folder.parent / folder["name"]
                if self._share.rank:
                    see_token(partial, folder["token"], self.folder)
                    self._partial = partial
                    state = state_text({name: self._contents.values[name] for name in ("random", "compiled")}, "state")
                    self._write_small(state_file(self._share.rank), state)
                else:
                    self._write_small_files(model, tokenizer, files)
                self._make_subfolders()
            return {}

        def start(_: object) -> None:
            assert machines.saves is not None
            progress = Progress(machines.saves, self._monitor, self.folder.name)
            progress.start()
            with self._monitor:
                if self.is_done:  # a Ctrl-C on this machine has ended the save
                    progress.report_failure("it was interrupted")
                    return
                self._progress = progress
            self._start(self._thread())

        together(machines, what, prepare, start)

    def give_up(self, error: BaseException) -> None:
        """End a save that has failed on a machine before the files were being written."""
        if self._progress is None and not self.is_done:
            with self._monitor:
                self.is_done = True
            shielded(lambda: self._end(error, raises_here=True))

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn failures of the file system inside the block into a CheckpointError."""
        try:
            yield
        except OSError as error:
            raise self._explained(error) from error

    def _write_small_files(self, model: torch.nn.Module, tokenizer: Any, files: Mapping[str, str]) -> None:
        assert self._partial is not None
        write_configuration(self._partial, model, tokenizer)
        for name, text in files.items():
            self._write_small(name, text)
        self._write_small(STATE_FILE, state_text(self._contents.values, "state"))
        for name, text in self._indices.items():
            self._write_small(name, text)
        self._contents.values = {}

    def _thread(self) -> threading.Thread:
        # Not a daemon: the interpreter waits for the checkpoint before it exits.
        return threading.Thread(target=self._run, name=f"{THREAD_PREFIX}save", daemon=False)

    def _start(self, thread: threading.Thread) -> None:
        self._set_held(True)
        assert self._group is not None
        self._group.pending_save = self
        start_thread(thread)

    def _make_partial(self) -> None:
        parent = self.folder.parent
        make_synced(parent)
        remove_abandoned(parent)
        # The ranges of the other machines are as large as that of this one.
        needed = sum(
            source.tensor.nbytes * (1 if source.range is None else self._share.size)
            for shard in self._shards
            for source in shard.sources
        )
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise CheckpointError(
                f"the checkpoint {self.folder} needs {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free on its disk. "
                "Nothing was written; free space, or save elsewhere."
            )

        def make() -> None:
            self._partial, self._lock = make_partial(self.folder)

        shielded(make)  # after a Ctrl-C in between, the folder would stay
        self._make_subfolders()

    def _make_subfolders(self) -> None:
        assert self._partial is not None
        for shard in self._shards:
            (self._partial / shard.name).parent.mkdir(exist_ok=True)

    def _write_small(self, name: str, text: str) -> None:
        assert self._partial is not None
        path = self._partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, text.encode())

    def _set_held(self, held: bool) -> None:
        """Make optimizer steps wait for the layers that are still to be written, or let them go on."""
        with self._monitor:
            for layer in self._left:
                if layer is not None:
                    store, layer_id = layer
                    (store.hold if held else store.let_go)(layer_id)

    # On the thread of this save.

    def _run(self) -> None:
        error: BaseException | None = None
        progress, parts = self._progress, list[Payload]()
        try:
            self._write_all(self._shards)
            if progress is not None:
                parts = progress.written(self._part())
            if self._share.rank == 0:
                self._complete(parts)
            if progress is not None:
                progress.complete()
        except BaseException as raised:
            error = self._explained(raised)
            if progress is not None and raised is not progress.failure:
                progress.failed(error)
        self._end(error)

    def _part(self) -> Payload:
        """What rank 0 writes into the manifest of the files of this machine. Makes their names survive."""
        assert self._partial is not None
        if self._share.rank == 0:
            return {}
        state = state_file(self._share.rank)
        self._files[state] = file_entry(self._partial / state)
        for folder in {(self._partial / shard.name).parent for shard in self._shards}:
            sync_folder(folder)
        return part_of(self._shards, self._files)

    def _write_all(self, shards: Sequence[Shard]) -> None:
        """Write all shards with a few threads; raises the first error after all threads have ended."""
        queue, errors = iter(shards), list[BaseException]()

        def work() -> None:
            while not errors:
                if self._progress is not None and self._progress.failure is not None:
                    errors.append(self._progress.failure)
                    return
                with self._monitor:
                    shard = next(queue, None)
                if shard is None:
                    return
                try:
                    self._write_shard(shard)
                except BaseException as error:
                    errors.append(error)

        threads = [
            threading.Thread(target=work, name=f"{THREAD_PREFIX}save-{index}") for index in range(1, io_threads())
        ]
        try:
            with contextlib.suppress(RuntimeError):  # the system allows no further thread: use those that run
                for thread in threads:
                    start_thread(thread)
            work()
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if errors:
            raise errors[0]

    def _write_shard(self, shard: Shard) -> None:
        assert self._partial is not None
        path, digest, size = self._partial / shard.name, hashlib.sha256(), 0
        with open(path, "xb", buffering=0) as file:

            def put(memory: memoryview) -> None:
                nonlocal size
                digest.update(memory)
                size += len(memory)
                while memory:
                    memory = memory[file.write(memory) :]

            put(memoryview(shard.header))
            for source in shard.sources:
                self._write_tensor(source, put)
            os.fsync(file.fileno())
            # The system need not keep the file in memory, which training needs. The file is complete without that.
            if hasattr(os, "posix_fadvise"):
                with contextlib.suppress(OSError):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with self._monitor:
            self._files[shard.name] = FileEntry(size, digest.hexdigest())

    def _write_tensor(self, source: Source, put: Callable[[memoryview], None]) -> None:
        """Write one tensor, then let the optimizer change its layer if no tensor of the layer is left."""
        plain = plain_values(source.tensor)
        for chunk in chunks(raw_bytes(plain)):
            put(chunk)
        if source.was_changed:
            raise CheckpointError(
                f"{source.name!r} was changed while the checkpoint {self.folder} was being written; call wait() of "
                "what save() returns before you write into parameters or into the optimizer's state."
            )
        layer = source.layer
        with self._monitor:
            self._left[layer] -= 1
            if self._left[layer]:
                return
            del self._left[layer]
            if layer is not None:
                store, layer_id = layer
                store.let_go(layer_id)

    def _complete(self, parts: Sequence[Payload]) -> None:
        """Write the manifest, give the folder its name, then replace `latest` and remove old checkpoints.

        parts: what the machines have written, by rank; empty if this machine is alone.
        """
        assert self._partial is not None
        for part in parts[1:]:
            self._files.update({name: FileEntry(**entry) for name, entry in part["files"].items()})
        (self._partial / TOKEN).unlink(missing_ok=True)
        present = {path.relative_to(self._partial).as_posix(): path for path in self._partial.rglob("*")}
        for name, entry in self._files.items():
            # The list of a folder on a network may be old: ask for the file itself.
            if name not in present and not (self._partial / name).exists():
                raise CheckpointError(f"{self._partial / name} was removed while the checkpoint was being written.")
            if (self._partial / name).stat().st_size != entry.num_bytes:
                raise CheckpointError(f"{self._partial / name} was changed while the checkpoint was being written.")
        for name, path in present.items():
            if path.is_dir():
                sync_folder(path)
            elif name not in self._files:
                with open(path, "rb") as file:  # another library may have written it
                    os.fsync(file.fileno())
                self._files[name] = file_entry(path)
        manifest = self._manifest(parts)
        check_manifest(manifest, self.folder / MANIFEST)  # what is saved can be loaded
        check_overlaps(manifest, self.folder / MANIFEST)
        write_synced(self._partial / MANIFEST, manifest.to_bytes())
        sync_folder(self._partial)
        self._take_name(self._partial)
        point_to(self.folder.parent / LATEST, self.folder.name)
        if self._keep is not None:
            prune(self.folder.parent, self._keep, self._spared | {self.folder})

    def _manifest(self, parts: Sequence[Payload]) -> Manifest:
        return Manifest(
            saved_at_ns=time.time_ns(),
            step=self._contents.step,
            versions={"torch": str(torch.__version__), "python": platform.python_version(), "roundpipe": __version__},
            model=self._contents.model,
            aliases=self._contents.aliases,
            files=self._files,
            tensors=all_entries(self._shards, parts[1:]),
            machines=self._share.size,
            sequence=next_sequence(self.folder.parent),
        )

    def _take_name(self, partial: Path) -> None:
        """Rename the partial folder; an older checkpoint of the same name is removed afterwards."""
        replaced = take_name(partial, self.folder)
        self._partial, self._is_named = None, True
        sync_folder(self.folder.parent)
        if replaced is not None:
            remove(replaced)

    def _explained(self, error: BaseException) -> BaseException:
        """The error to raise: failures of the file system become a CheckpointError."""
        if not isinstance(error, OSError):
            return error
        explained = not_written(self.folder, error)
        if self._is_named:
            explained = CheckpointError(
                f"the checkpoint {self.folder} is complete, but the work after it failed: {error}. The link "
                f"{LATEST!r} or old checkpoints beside it may be as before."
            )
        explained.__cause__ = error
        return explained

    def _end(self, error: BaseException | None, *, raises_here: bool = False) -> None:
        """Release all layers, remove an incomplete folder, and report the error. `raises_here`: the caller raises it.

        Nothing in here may prevent that waiting threads go on.
        """
        try:
            self._set_held(False)
            if self._partial is not None and self._share.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
        except Exception:
            logger.exception("cleaning up after the checkpoint %s failed", self.folder)
        self._shards, self._contents.weight_sets, self._contents.optimizer_tensors = [], [], []
        group = self._group
        assert group is not None
        with self._monitor:
            self.error, self.is_done = error, True
            if group.pending_save is self:
                group.pending_save = None
                if error is not None and not raises_here:
                    add_note(error, "it happened in the background while a checkpoint was written; training can go on")
                    group.report(error)
            if error is None:
                self._group = None
            self._left.clear()
            self._monitor.changed()
        if error is not None and group.is_closed:  # no later call can raise it
            logger.error("a checkpoint failed after its model was closed", exc_info=error)
