"""Writes checkpoints: captures a training run, then writes its layers in the background while training goes on.

[Note: saving beside training] `save` waits until the model is idle and captures which tensors to write. From then on
the layers are *held*: calls may run, but an optimizer step waits before it changes a held layer. Writer threads release
a layer when its last tensor is written. Tensors are written from the memory in which training uses them, so no second
copy exists.

[Note: complete or absent] Files are written into a hidden folder beside the final one, flushed to the disk, the
manifest last. A rename then gives the folder its name, and only then `latest` changes and old checkpoints are removed.
So a folder with its final name is always complete, and a process that is killed leaves the earlier checkpoints as they
were.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import platform
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from roundpipe.api.group import Group
from roundpipe.api.proxy import ModelProxy
from roundpipe.checkpoint.contents import Contents, HasState, Source, WeightSet, capture, is_adapter
from roundpipe.checkpoint.folders import (
    LATEST,
    REPLACED,
    free_name,
    make_partial,
    point_to,
    prune,
    remove,
    remove_abandoned,
)
from roundpipe.checkpoint.format import (
    DTYPES,
    MANIFEST,
    STATE_FILE,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    chunks,
    file_entry,
    io_threads,
    make_synced,
    raw_bytes,
    shard_header,
    sync_folder,
    to_json,
    write_synced,
)
from roundpipe.errors import ArgumentTypeError, CheckpointError, ConfigError, add_note
from roundpipe.monitor import THREAD_PREFIX, has_started, shielded, start_thread
from roundpipe.store import LayerStore
from roundpipe.version import __version__

logger = logging.getLogger("roundpipe")
_SHARD_BYTES = 2 << 30
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
    _check_target(target)
    _check_names(files or {})

    def begin() -> PendingSave:
        if engine.group.recovery.has_gradients():
            logger.warning(
                "%s: gradients gathered since the last optimizer step are not part of the checkpoint %s; save after a "
                "step to resume exactly.",
                model.name,
                target,
            )
        contents = capture(model.original_model, engine.group, optimizer, scheduler, scaler, extra)
        spared = frozenset(Path(os.path.abspath(each)) for each in spare)
        job = PendingSave(target, engine.group, contents, keep, spared)
        job.open(model.original_model, tokenizer, files or {})
        return job

    return engine.while_idle(begin)


def _check_target(target: Path) -> None:
    """Raise before anything is written if the folder or `latest` are taken by something that is not a checkpoint."""
    if target.name == LATEST:
        raise ConfigError(f"{target} is the name of the link to the latest checkpoint; give the folder another name.")
    link = target.parent / LATEST
    try:
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise CheckpointError(f"{target} exists and is not a folder; remove it, or save elsewhere.")
        if target.is_dir() and not (target / MANIFEST).exists() and any(target.iterdir()):
            raise CheckpointError(f"{target} has other content than a checkpoint; remove it, or save elsewhere.")
        if link.exists() and not link.is_symlink():
            raise CheckpointError(f"{link} exists and is not a link; move it away, or save elsewhere.")
    except OSError as error:
        raise _not_written(target, error) from error


def _check_names(files: Mapping[str, str]) -> None:
    """Refuse further files that would lie outside of the checkpoint or replace one of its files."""
    for name in files:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ConfigError(f"files has the name {name!r}, which does not lie inside of the checkpoint's folder.")
        if path.suffix == ".safetensors" or str(path) in (MANIFEST, STATE_FILE):
            raise ConfigError(f"files has the name {name!r}, which the checkpoint itself uses; choose another one.")


def _not_written(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} could not be written: {error}. Earlier checkpoints are unchanged; free space or mend "
        "the permissions, then save again."
    )


# Shards.


class _Shard:
    """One safetensors file to write."""

    def __init__(self, group: str, name: str, sources: Sequence[Source], folder: str = "") -> None:
        """`folder`: the beginning of the sources' names that the keys in the file do not have."""
        self.group, self.name, self.sources = group, name, sources
        self.header, self.offsets = shard_header(
            [(one.name.removeprefix(folder), one.tensor.dtype, tuple(one.tensor.shape)) for one in sources]
        )

    def entries(self) -> Iterator[tuple[str, TensorEntry]]:
        """The tensors of this shard for the manifest."""
        for source, offset in zip(self.sources, self.offsets, strict=True):
            tensor = source.tensor
            piece = Piece(self.name, offset, tensor.nbytes)
            yield source.name, TensorEntry(DTYPES[tensor.dtype], tuple(tensor.shape), (piece,))


def _cut(sources: Sequence[Source], limit_bytes: int | None) -> list[list[Source]]:
    """Consecutive sources in lists of at most `limit_bytes`, or of one source."""
    parts: list[list[Source]] = [[]]
    size = 0
    for source in sources:
        if parts[-1] and limit_bytes is not None and size + source.tensor.nbytes > limit_bytes:
            parts.append([])
            size = 0
        parts[-1].append(source)
        size += source.tensor.nbytes
    return parts


def _shards_of(contents: Contents) -> tuple[list[_Shard], dict[str, str]]:
    """The shards of a checkpoint in the order of writing, and the texts of index files by name."""
    shards: list[_Shard] = []
    indices: dict[str, str] = {}
    for weights, sources in contents.weight_sets:
        parts = _cut(sources, _SHARD_BYTES if weights.may_shard else None)
        mine = [
            _Shard("weights", _shard_name(weights, i, len(parts)), part, weights.folder) for i, part in enumerate(parts)
        ]
        shards += mine
        if len(parts) > 1:
            indices[f"{weights.folder}{weights.file}.safetensors.index.json"] = _index_of(mine)
    parts = _cut(contents.optimizer_tensors, _SHARD_BYTES)
    if parts[0]:
        shards += [
            _Shard("optimizer", f"optimizer-{i + 1:05}-of-{len(parts):05}.safetensors", part)
            for i, part in enumerate(parts)
        ]
    return shards, indices


def _shard_name(weights: WeightSet, index: int, count: int) -> str:
    number = "" if count == 1 else f"-{index + 1:05}-of-{count:05}"
    return f"{weights.folder}{weights.file}{number}.safetensors"


def _index_of(shards: Sequence[_Shard]) -> str:
    """The index with which `from_pretrained` finds the tensors of several files."""
    total = sum(source.tensor.nbytes for shard in shards for source in shard.sources)
    weight_map = {source.name: shard.name for shard in shards for source in shard.sources}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


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
        self._shards, self._indices = _shards_of(contents)
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
            with self._monitor:
                errors = self._group.stepper.errors
                errors[:] = [error for error in errors if error is not self.error]
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
            assert self._partial is not None
            _write_configuration(self._partial, model, tokenizer)
            for name, text in files.items():
                self._write_small(name, text)
            state = to_json(self._contents.values, "state")
            self._write_small(STATE_FILE, json.dumps(state))
            for name, text in self._indices.items():
                self._write_small(name, text)
            self._contents.values = {}
            # Not a daemon: the interpreter waits for the checkpoint before it exits.
            thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}save", daemon=False)
            self._set_held(True)
            assert self._group is not None
            self._group.pending_save = self
            start_thread(thread)
        except BaseException as error:
            if thread is not None and has_started(thread):  # a Ctrl-C: the checkpoint is written nevertheless
                raise
            explained = self._explained(error)
            # Shielded: after another Ctrl-C in the middle, steps would wait forever for layers that stay held.
            shielded(lambda: self._end(explained, raises_here=True))
            raise explained  # noqa: B904 - `_explained` has set the cause

    def _make_partial(self) -> None:
        parent = self.folder.parent
        make_synced(parent)
        remove_abandoned(parent)
        needed = sum(source.tensor.nbytes for shard in self._shards for source in shard.sources)
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise CheckpointError(
                f"the checkpoint {self.folder} needs {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free on its disk. "
                "Nothing was written; free space, or save elsewhere."
            )

        def make() -> None:
            self._partial, self._lock = make_partial(self.folder)

        shielded(make)  # after a Ctrl-C in between, the folder would stay
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
                    (store.held.add if held else store.held.discard)(layer_id)
            self._monitor.changed()

    # On the thread of this save.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._write_all(self._shards)
            self._complete()
        except BaseException as raised:
            error = self._explained(raised)
        self._end(error)

    def _write_all(self, shards: Sequence[_Shard]) -> None:
        """Write all shards with a few threads; raises the first error after all threads have ended."""
        queue, errors = iter(shards), list[BaseException]()

        def work() -> None:
            while not errors:
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

    def _write_shard(self, shard: _Shard) -> None:
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
            # The system need not keep the file in memory, which training needs.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with self._monitor:
            self._files[shard.name] = FileEntry(size, digest.hexdigest())

    def _write_tensor(self, source: Source, put: Callable[[memoryview], None]) -> None:
        """Write one tensor, then let the optimizer change its layer if no tensor of the layer is left."""
        plain = source.tensor.contiguous()  # copies only a tensor whose memory is in another order
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
                store.held.discard(layer_id)
                self._monitor.changed()

    def _complete(self) -> None:
        """Write the manifest, give the folder its name, then replace `latest` and remove old checkpoints."""
        assert self._partial is not None
        present = {path.relative_to(self._partial).as_posix(): path for path in self._partial.rglob("*")}
        for name in self._files.keys() - present.keys():
            raise CheckpointError(f"{self._partial / name} was removed while the checkpoint was being written.")
        for name, path in present.items():
            if path.is_dir():
                sync_folder(path)
            elif name not in self._files:
                with open(path, "rb") as file:  # another library may have written it
                    os.fsync(file.fileno())
                self._files[name] = file_entry(path)
        write_synced(self._partial / MANIFEST, self._manifest().to_bytes())
        sync_folder(self._partial)
        self._take_name(self._partial)
        point_to(self.folder.parent / LATEST, self.folder.name)
        if self._keep is not None:
            prune(self.folder.parent, self._keep, self._spared | {self.folder})

    def _manifest(self) -> Manifest:
        tensors: dict[str, dict[str, TensorEntry]] = {"weights": {}, "optimizer": {}}
        for shard in self._shards:
            tensors[shard.group].update(shard.entries())
        return Manifest(
            saved_at_ns=time.time_ns(),
            step=self._contents.step,
            versions=_versions(),
            model=self._contents.model,
            aliases=self._contents.aliases,
            files=self._files,
            tensors=tensors,
        )

    def _take_name(self, partial: Path) -> None:
        """Rename the partial folder; an older checkpoint of the same name is removed afterwards."""
        replaced = None
        if self.folder.exists():
            replaced = free_name(self.folder, REPLACED)
            os.rename(self.folder, replaced)
        try:
            os.rename(partial, self.folder)
        except BaseException:
            if replaced is not None:
                os.rename(replaced, self.folder)
            raise
        self._partial, self._is_named = None, True
        sync_folder(self.folder.parent)
        if replaced is not None:
            remove(replaced)

    def _explained(self, error: BaseException) -> BaseException:
        """The error to raise: failures of the file system become a CheckpointError."""
        if not isinstance(error, OSError):
            return error
        explained = _not_written(self.folder, error)
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
            if self._partial is not None:
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
                    group.stepper.errors.append(error)
            if error is None:
                self._group = None
            self._left.clear()
            self._monitor.changed()
        if error is not None and group.is_closed:  # no later call can raise it
            logger.error("a checkpoint failed after its model was closed", exc_info=error)


def _versions() -> dict[str, str]:
    """The releases that wrote the checkpoint, for people who read the manifest."""
    return {"torch": str(torch.__version__), "python": platform.python_version(), "roundpipe": __version__}


def _write_configuration(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write what `from_pretrained` needs besides the weights."""
    if is_adapter(model):
        for adapter, config in model.peft_config.items():
            _write_adapter_configuration(folder if adapter == "default" else folder / adapter, model, config)
    elif hasattr(getattr(model, "config", None), "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _write_adapter_configuration(folder: Path, model: Any, config: Any) -> None:
    config = copy.copy(config)
    config.inference_mode = True  # as peft saves it: who loads an adapter without saying so does not train it
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
