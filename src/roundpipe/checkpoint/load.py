"""Loads checkpoints: verifies all files, compares them with the model, and only then changes anything.

Reads each tensor from its file into the memory where training uses it; no second copy exists. Knows no writer: it reads
whatever ranges the manifest names.

[Note: all or nothing] Whatever is wrong with a checkpoint is found before the first write into model, optimizer,
scheduler, scaler or generators: the manifest, the checksum of every file, the form of all values, and whether they fit.
Scheduler and scaler alone can only be tried; they get their old state back if anything else is refused. After the first
write one thing can still fail: the files themselves, if the disk fails or another process writes into them. Then no
byte that was not verified is loaded, and the error has a note that parts of the checkpoint are in the model
([Note: verified twice] in verified). Restoring the old values would need a second copy of the model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roundpipe.api.group import Group
from roundpipe.api.proxy import ModelProxy
from roundpipe.checkpoint.contents import (
    STATE,
    HasState,
    check_compiled_sizes,
    check_optimizer_values,
    check_random_states,
    description,
    names_in,
    set_compiled_sizes,
    set_random_states,
    weights_of,
)
from roundpipe.checkpoint.folders import find
from roundpipe.checkpoint.format import (
    DTYPE_OF,
    DTYPES,
    MANIFEST,
    STATE_FILE,
    Manifest,
    TensorEntry,
    check_overlaps,
    from_json,
    read_manifest,
    state_file,
)
from roundpipe.checkpoint.optimizer_states import check_states, forget_missing, ranged_masters, read_states
from roundpipe.checkpoint.ranges import (
    MASTER,
    MASTER_LOW,
    MASTER_TIES,
    RANGED_TIES,
    Conversions,
    check_forms,
    check_roundings,
    read_master,
    ties_in,
)
from roundpipe.checkpoint.save import check_model
from roundpipe.checkpoint.together import outcome_of, require_same, together
from roundpipe.checkpoint.verified import Reader, VerifiedFile, verify_files
from roundpipe.distributed.line import Payload
from roundpipe.distributed.machines import Machines
from roundpipe.errors import CheckpointError, MachineError, add_note
from roundpipe.optim.states import require_room_for_state, state_placement
from roundpipe.store import LayerStore, ParameterRecord, Share

_MOST_NAMED = 5  # keys that an error lists at most
_ADVICE = "Nothing was loaded. Free memory, or train fewer parameters."


def load(
    folder: str | os.PathLike[str],
    model: ModelProxy,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: HasState | None = None,
    scaler: HasState | None = None,
    restore_rng: bool = True,
) -> Any:
    """Load a checkpoint into a model of the same architecture, and set all random number generators. Returns `extra`.

    Training then continues bit for bit as after the save, with the same num_microbatch on any number of devices. With a
    process group, all machines call this together; the number of machines that saved may be another one. All files are
    verified first: if the checkpoint is damaged or does not fit, a CheckpointError names the reason and nothing has
    changed. If a file changes after that, a CheckpointError says so, and no byte of the change is loaded; only if the
    files change or fail while tensors are read, a note says that parts of the checkpoint are in the model already. What
    is not given is not loaded; without an optimizer, masters that do not exist yet are made from the weights when
    needed.

    restore_rng: False leaves the random number generators as they are.
    """
    engine = check_model(model)._engine
    small = [(name, part) for name, part in (("scheduler", scheduler), ("scaler", scaler)) if part is not None]
    request = _Request(folder, model, optimizer, small, restore_rng)
    machines = engine.group.machines
    if machines is None:
        verified = _verified(folder)
        return engine.while_idle(lambda: request.restore(verified))
    outcome: Callable[[], Any] = engine.while_idle(lambda: outcome_of(lambda: request.restore_together(machines)))
    return outcome()


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of one call of `load`. Its methods are called while the model is idle."""

    folder: str | os.PathLike[str]
    model: ModelProxy
    optimizer: torch.optim.Optimizer | None
    small: Sequence[tuple[str, HasState]]
    restore_rng: bool

    def restore(self, verified: _Verified) -> Any:
        """Load on this machine alone."""
        self._read(*self._checked(verified), verified)
        return verified.values["extra"]

    def restore_together(self, machines: Machines) -> Any:
        """Load on all machines, after all of them have compared their files and the checkpoint with the model."""
        found: list[tuple[_Verified, _Restoration, Undo]] = []

        def check() -> Payload:
            verified = _verified(self.folder, share=machines.share)
            found.append((verified, *self._checked(verified)))
            return {"checkpoint": verified.manifest.identity, "step": verified.manifest.step, **self._loads()}

        def compare_again() -> Payload:
            # A machine may have waited long for those that verify more files.
            found[0][0].require_unchanged()
            return {}

        what = "loading a checkpoint"
        try:
            _check_same(together(machines, what, check))
            together(machines, f"{what}: the files", compare_again)
        except BaseException:
            for _, _, undo in found:
                undo()
            raise
        verified, plan, undo = found[0]

        def read() -> Payload:
            self._read(plan, undo, verified)
            return {}

        together(machines, f"{what}: reading", read)
        return verified.values["extra"]

    def _loads(self) -> dict[str, Any]:
        """What this call loads besides the weights; it must be equal on all machines."""
        given = {"optimizer": self.optimizer, "scheduler": None, "scaler": None, **dict(self.small)}
        classes = {name: None if part is None else type(part).__name__ for name, part in given.items()}
        return {**classes, "restore_rng": self.restore_rng}

    def _checked(self, verified: _Verified) -> tuple[_Restoration, Undo]:
        plan = _Restoration(verified, self.model, self.model._engine.group, wants_masters=self.optimizer is not None)
        plan.check_weights()
        plan.check_masters()
        if self.optimizer is not None:
            plan.check_optimizer(self.optimizer)
        check_overlaps(verified.manifest, verified.path / MANIFEST)
        return plan, _load_small([(name, part, verified.values[name]) for name, part in self.small], verified.path)

    def _read(self, plan: _Restoration, undo: Undo, verified: _Verified) -> None:
        """Fill model and optimizer: see [Note: all or nothing]. `undo`: gives scheduler and scaler their old state."""
        restore_rng = self.restore_rng
        with Reader(verified.path, verified.files) as reader:
            try:
                verified.require_unchanged()
                plan.read_weights(reader)
                plan.read_masters(reader, self.optimizer)
                if self.optimizer is not None:
                    plan.read_optimizer(reader, self.optimizer)
            except BaseException as error:
                if reader.has_filled:
                    note = f"parts of {verified.path} are in the model already: load a checkpoint before you train on"
                    add_note(error, note)
                undo()
                raise
        set_compiled_sizes(self.model._engine.group, verified.values["compiled"])
        if restore_rng:
            set_random_states(verified.values["random"])


def _check_same(answers: Sequence[Payload]) -> None:
    """Raise MachineError if machines load different checkpoints, or other parts of one."""
    for rank, answer in enumerate(answers):
        if answer["checkpoint"] != answers[0]["checkpoint"]:
            raise MachineError(
                rank,
                f"rank {rank} loads another checkpoint than rank 0: that of step {answer['step']} instead of step "
                f"{answers[0]['step']}, or another save of it. Give all machines the same folder.",
            )
    for key in ("optimizer", "scheduler", "scaler", "restore_rng"):
        require_same(answers, key, "load()")


def verify(folder: str | os.PathLike[str], names: Sequence[str] = ()) -> None:
    """Raise CheckpointError if a folder is not a complete checkpoint, or a file (of `names`) is damaged or missing."""
    path, manifest = _found(folder, names)
    check_overlaps(manifest, path / MANIFEST)
    verify_files(path, manifest, names or tuple(manifest.files))


def load_rng(folder: str | os.PathLike[str], rank: int = 0) -> None:
    """Set all random number generators to the state that a checkpoint holds; `rank`: of this machine."""
    set_random_states(_verified(folder, only=(STATE_FILE,), share=Share(rank, rank + 1)).values["random"])


def _found(folder: str | os.PathLike[str], needed: Sequence[str]) -> tuple[Path, Manifest]:
    """Where a checkpoint is, and its manifest. Raises CheckpointError if it does not list the `needed` files."""
    path = find(Path(folder))
    manifest = read_manifest(path)
    for name in needed:
        if name not in manifest.files:
            raise CheckpointError(f"{path / MANIFEST} does not list {name}.")
    return path, manifest


@dataclasses.dataclass(frozen=True)
class _Verified:
    """A checkpoint whose files were compared with its manifest, and its values."""

    path: Path
    manifest: Manifest
    values: dict[str, Any]
    files: Mapping[str, VerifiedFile]

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a file was replaced, removed or written since it was verified."""
        for file in self.files.values():
            file.require_unchanged()


def _verified(folder: str | os.PathLike[str], only: Sequence[str] = (), share: Share | None = None) -> _Verified:
    """Read the manifest and the values of a checkpoint. First compare all files, or `only` some, with the manifest.

    share: that of this machine in a process group. It has random states for itself, and need not read the files that
    hold ranges of other machines alone: these compare them.
    """
    path, manifest = _found(folder, only or (STATE_FILE,))
    own = STATE_FILE if share is None else state_file(share.rank)
    own = own if own in manifest.files else STATE_FILE  # the checkpoint is of fewer machines
    names = {*(only or manifest.files), own}
    unread = set() if share is None else _files_of_others(manifest, share) - {own, STATE_FILE}
    files = verify_files(path, manifest, sorted(names - unread))
    with Reader(path, files) as reader:
        texts = {name: reader.content(name) for name in (own, STATE_FILE)}
    read = own
    try:
        of_machine = from_json(json.loads(texts[own]))
        random, compiled = of_machine["random"], of_machine.get("compiled", ())
        check_random_states(random)
        check_compiled_sizes(compiled)
        read = STATE_FILE
        values = from_json(json.loads(texts[STATE_FILE]))
        _ = values["extra"], values["scheduler"], values["scaler"]
        check_optimizer_values(values["optimizer"])
        check_roundings(values.get("roundings", {}))
    except Exception as error:  # values of another form can make torch, numpy and json raise anything
        raise CheckpointError(f"{path / read} does not have the expected content ({error!r}).") from error
    return _Verified(path, manifest, {**values, "random": random, "compiled": compiled}, files)


def _files_of_others(manifest: Manifest, share: Share) -> set[str]:
    """The files that hold no byte of this machine's ranges, only ranges of masters and moments of other machines."""
    of_ranges, own = set[str](), set[str]()
    for name, entry in manifest.tensors.get("optimizer", {}).items():
        mine = share.range_of(math.prod(entry.shape))
        size = DTYPE_OF[entry.dtype].itemsize
        for piece in entry.pieces:
            of_ranges.add(piece.file)
            is_mine = piece.start < mine.stop * size and piece.start + piece.num_bytes > mine.start * size
            if (is_mine and mine.start < mine.stop) or name.startswith((MASTER_TIES, RANGED_TIES)):
                own.add(piece.file)
    return of_ranges - own


Undo = Callable[[], None]


def _load_small(parts: Iterable[tuple[str, HasState, Any]], path: Path) -> Undo:
    """Load scheduler and scaler. If one refuses its state, those loaded before get their old state back.

    Returns a function that gives all of them their old state back.
    """
    undo: list[Callable[[], Any]] = []

    def undo_all() -> None:
        for restore in reversed(undo):
            restore()

    for name, part, state in parts:
        before = part.state_dict()
        try:
            if state is None:
                raise CheckpointError(f"{path} has no {name}; load without {name}=, or save it with one.")
            if isinstance(before, Mapping) and set(before) != set(state):
                differing = _listed(set(before) ^ set(state))
                raise CheckpointError(f"the {name} in {path} is of another kind: its entries differ in {differing}.")
            undo.append(lambda part=part, before=before: part.load_state_dict(before))  # type: ignore[misc]
            part.load_state_dict(state)
        except Exception as error:
            undo_all()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the {name} refuses its state in {path}: {error}") from error
    return undo_all


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    rest = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return ", ".join(map(repr, every[:_MOST_NAMED])) + rest


class _Restoration:
    """Compares one checkpoint with one model, then reads it. The checks change nothing."""

    def __init__(
        self,
        verified: _Verified,
        model: ModelProxy,
        group: Group,
        *,
        wants_masters: bool,
    ) -> None:
        self._path, self._manifest, self._values = verified.path, verified.manifest, verified.values
        self._group = group
        self._model = model.original_model
        self._wants_masters = wants_masters
        self._weights = self._manifest.tensors.get("weights", {})
        self._tensors = self._manifest.tensors.get("optimizer", {})
        self._ties = ties_in(self._tensors, self._path)
        self._records: dict[ParameterRecord, LayerStore] = {
            record: store for store in group.stores for record in store.parameters
        }
        self._targets: list[tuple[TensorEntry, ParameterRecord]] = []  # weights that are parameters
        self._buffers: list[tuple[TensorEntry, torch.Tensor]] = []
        self._others: dict[str, TensorEntry] = {}  # further tensors of the state dict, which code of the model makes

    # Checks.

    def check_weights(self) -> None:
        saved, present = self._manifest.model, description(self._model)
        if saved.get("kind") != present["kind"]:
            raise CheckpointError(
                f"{self._path} holds {saved.get('class')!r} saved as {saved.get('kind')!r}, the model given is "
                f"{present['class']!r} and loads {present['kind']!r}."
            )
        # Models inside of the model take part in state_dict() and load_state_dict().
        sets = self._group.lock.run_user_code(lambda: weights_of(self._model))
        current = {one.folder + key: tensor for one in sets for key, tensor in one.tensors.items()}
        known = {**{name: name for name in self._weights}, **self._manifest.aliases}
        missing, unexpected = current.keys() - known.keys(), known.keys() - current.keys()
        if missing or unexpected:
            raise CheckpointError(
                f"{self._path} does not fit this {present['class']}: "
                + "; ".join(
                    f"{len(names)} keys {what}: {_listed(names)}"
                    for what, names in (("are missing in it", missing), ("of it are unexpected", unexpected))
                    if names
                )
                + "."
            )
        by_address = {record.weights.data_ptr(): record for record in self._records if record.weights.numel()}
        buffers = {buffer.data_ptr(): buffer for buffer in self._model.buffers() if buffer.numel()}
        names: dict[ParameterRecord, str] = {}
        for name, tensor in current.items():
            entry = self._entry(self._weights, known[name])
            self._check_tensor(name, entry, tensor)
            record, buffer = by_address.get(tensor.data_ptr()), buffers.get(tensor.data_ptr())
            if record is not None and record.weights.shape == tensor.shape:
                if (first := names.setdefault(record, name)) == name:
                    self._targets.append((entry, record))
                elif known[first] != known[name]:
                    raise CheckpointError(
                        f"{first!r} and {name!r} are one tensor in this {present['class']} and two in {self._path}; "
                        "load it into a model that does not tie them."
                    )
            elif buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
                self._buffers.append((entry, buffer))
            else:
                self._others[name] = entry

    def check_masters(self) -> None:
        """Compare the masters in the checkpoint with the model's, and the precision of those that will be read."""
        known = {record.name for record in self._records}
        for name in self._tensors:
            kind, _, owner = name.partition("/")
            is_of_master = f"{kind}/" in (MASTER, MASTER_LOW, MASTER_TIES) or kind.startswith(RANGED_TIES)
            if not name.startswith(STATE) and not (is_of_master and owner in known):
                raise CheckpointError(f"{self._path} has {name!r}, but the model has no such parameter.")
        for record, store in self._records.items():
            check_forms(record, self._tensors, self._ties.get(record.name, ()), self._path)
            saved = self._tensors.get(MASTER + record.name)
            dtype = saved and DTYPE_OF[saved.dtype]
            if MASTER_LOW + record.name in self._tensors:
                dtype = torch.float32
            wanted = store.masters.optim_dtype or record.weights.dtype
            if dtype is not None and dtype != wanted and self._reads_master(record):
                raise CheckpointError(
                    f"the master of {record.name!r} in {self._path} has dtype {dtype}, this model's has "
                    f"{wanted}; wrap the model with optim_dtype={dtype}."
                )

    def _reads_master(self, record: ParameterRecord) -> bool:
        return record.master is not None or (self._wants_masters and record.param.requires_grad)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        saved = self._values["optimizer"]
        if saved is None:
            raise CheckpointError(f"{self._path} has no optimizer; load it without one, or save with one.")
        kind = type(optimizer).__name__
        if saved["class"] != kind:
            raise CheckpointError(f"{self._path} has the state of {saved['class']!r}, the optimizer given is {kind!r}.")
        names = names_in(optimizer, self._records)
        groups = optimizer.param_groups
        if len(groups) != len(saved["groups"]):
            raise CheckpointError(
                f"the optimizer in {self._path} has {len(saved['groups'])} parameter groups, the one given has "
                f"{len(groups)}."
            )
        for index, (group, options) in enumerate(zip(groups, saved["groups"], strict=True)):
            differing = {names[id(param)] for param in group["params"]} ^ set(options["params"])
            if differing:
                raise CheckpointError(
                    f"parameter group {index} of the optimizer in {self._path} has other parameters than the one "
                    f"given: {_listed(differing)} are in only one of them."
                )
        params = {names[id(param)]: param for group in groups for param in group["params"]}
        needed = {"optimizer state": check_states(self._tensors, optimizer, params, self._path)}
        unknown = saved["numbers"].keys() - params.keys()
        if unknown:
            raise CheckpointError(f"{self._path} has a state of {_listed(unknown)}, which the optimizer does not have.")
        with state_placement(optimizer):
            require_room_for_state(needed, f"loading {self._path}", _ADVICE)

    def _entry(self, group: Mapping[str, TensorEntry], name: str) -> TensorEntry:
        if name not in group:
            raise CheckpointError(f"{self._path / MANIFEST} names the tensor {name!r} and does not say where it is.")
        return group[name]

    def _check_tensor(self, name: str, entry: TensorEntry, tensor: torch.Tensor) -> None:
        if entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name!r} has shape {list(entry.shape)} in {self._path}, the model's has {list(tensor.shape)}."
            )
        if entry.dtype != DTYPES[tensor.dtype]:
            raise CheckpointError(
                f"{name!r} has dtype {DTYPE_OF.get(entry.dtype)} in {self._path}, the model's has {tensor.dtype}; "
                "build the model in the dtype of the checkpoint."
            )

    # Reading.

    def read_weights(self, reader: Reader) -> None:
        for entry, record in self._targets:
            reader.read_into(entry, record.weights)
        # Also sets the masters to the weights, and makes pending autograd graphs invalid.
        self._group.adopt_written([record for _, record in self._targets])
        # Not by load_state_dict: peft names the buffers of an adapter otherwise than the model does.
        with torch.no_grad():
            for entry, buffer in self._buffers:
                buffer.copy_(reader.read(entry))
        if self._others:
            others = {name: reader.read(entry) for name, entry in self._others.items()}
            self._group.lock.run_user_code(lambda: self._model.load_state_dict(others, strict=False))

    def read_masters(self, reader: Reader, optimizer: torch.optim.Optimizer | None) -> None:
        conversions = Conversions(self._values.get("roundings", {}))
        whole = set[int]()  # masters that an optimizer of torch updates, on all machines
        if self._group.machines is not None and optimizer is not None:
            whole = {id(param) for group in optimizer.param_groups for param in group["params"]}
            whole -= ranged_masters(optimizer)
        for record, store in self._records.items():
            low, full = self._tensors.get(MASTER_LOW + record.name), self._tensors.get(MASTER + record.name)
            has_own_values = low is not None or full is not None
            if not self._reads_master(record) or not (has_own_values or store.masters.bits == 24):
                continue
            master = store.masters.of(record)
            conversions.begin(record.name, master, has_own_values=has_own_values)
            if not has_own_values:
                continue
            with master.lock:
                if id(master) in whole:
                    master.take_memory()
                read_master(reader, record, master, full, low, self._ties.get(record.name, ()))
        conversions.log(self._path)

    def read_optimizer(self, reader: Reader, optimizer: torch.optim.Optimizer) -> None:
        saved, names = self._values["optimizer"], names_in(optimizer, self._records)
        params = {names[id(param)]: param for group in optimizer.param_groups for param in group["params"]}
        for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
            # The form of the states is the optimizer's: what was saved in another one is converted.
            group.update({key: value for key, value in options.items() if key not in ("params", "moments")})
        for param in params.values():
            if optimizer.state.get(param):
                forget_missing(optimizer.state[param], names[id(param)], self._tensors, saved["numbers"])
        for name, numbers in saved["numbers"].items():
            optimizer.state[params[name]].update(numbers)
        read_states(reader, self._tensors, optimizer, params, self._path)
        order = getattr(optimizer, "_order_states", None)
        if order is not None:
            order()
