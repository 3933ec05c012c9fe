"""The folders of checkpoints beside each other: their hidden names, the link `latest`, and which are complete.

While a checkpoint is written, its folder has a hidden name and is locked by the writer. A checkpoint that is replaced
or removed loses its name before its files are deleted. So a folder with a plain name is complete. If a process is
killed while it replaces a checkpoint, between the two renames, `find` finds the old one under its hidden name.

[Note: the order of checkpoints] Clocks can be set back, and several machines have several. So checkpoints of one folder
are ordered by `sequence` in their manifests: each save writes a number that is one larger than the largest of the
complete checkpoints beside it. `latest` and `keep=` use this order. Manifests of releases without the number come
first, in the order of their times.

[Note: what may be deleted] A save deletes a folder in three cases. It replaces a folder of the same name, if that is a
checkpoint and has no file that its manifest does not list: anything else is refused. It removes old checkpoints if the
user asks for that with `keep=`; files that their manifests do not list stay. And it removes what killed saves have
left, which has names that only saves give.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from roundpipe.checkpoint.format import MANIFEST, Manifest, read_manifest, sync_folder, write_synced
from roundpipe.errors import CheckpointError, ConfigError

logger = logging.getLogger("roundpipe")
LATEST = "latest"
PARTIAL, REPLACED, _REMOVED, _NEW_LINK = ".partial-", ".replaced-", ".removed-", ".new-"
_HIDDEN = re.compile(r"\.(?P<name>.+)(?P<kind>\.partial-|\.replaced-|\.removed-)[0-9a-f]+")
TOKEN = ".token"  # in a folder that several machines write: shows them that it is the same folder
_SEEN_S = 5.0  # a new folder on a network is visible to all machines within this time
_LINK_S = 60.0  # a link of a process that lives gets its name in less time


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints; None if there is none or no such folder.

    The newest is the one that was saved last: see [Note: the order of checkpoints]. A checkpoint whose manifest cannot
    be read is left out with a warning.
    """
    found = _complete(Path(folder), log_level=logging.WARNING)
    return found[-1][0] if found else None


def next_sequence(folder: Path) -> int:
    """The number of the next checkpoint in a folder: see [Note: the order of checkpoints]."""
    return 1 + max((manifest.sequence for _, manifest in _complete(folder)), default=0)


def _complete(folder: Path, log_level: int = logging.DEBUG) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints in a folder, the oldest first. Logs which folders have a manifest that is not valid."""
    try:
        paths = [Path(entry) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be searched for checkpoints: {error}.") from error
    found = []
    for path in paths:
        if _HIDDEN.fullmatch(path.name) and not _stands_in(path):
            continue
        try:
            if os.path.lexists(path / MANIFEST):
                found.append((path, read_manifest(path)))
        except (CheckpointError, OSError) as error:
            logger.log(log_level, "%s is not considered as a checkpoint: %s", path, error)
    return sorted(found, key=lambda pair: (pair[1].order, pair[0]))


def _hidden(folder: Path, kind: str) -> list[Path]:
    """The folders with a hidden name of one kind."""
    matches = ((path, _HIDDEN.fullmatch(path.name)) for path in folder.glob(f".*{kind}*"))
    return [path for path, match in matches if match and match["kind"] == kind and not path.is_symlink()]


def _stands_in(path: Path) -> bool:
    """Whether a hidden folder holds a checkpoint that a save was replacing when its process was killed."""
    match = _HIDDEN.fullmatch(path.name)
    is_replaced = match is not None and match["kind"] == REPLACED
    return is_replaced and not os.path.exists(path.parent / match["name"] / MANIFEST)  # type: ignore[index]


def find(folder: Path) -> Path:
    """The folder to read: `folder`, or where its checkpoint was moved to by a save that was killed in the middle."""
    try:
        if folder.exists():
            return folder
        named = folder.parent / os.readlink(folder) if folder.is_symlink() else folder
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    moved = [path for path, _ in _complete(named.parent) if path.name.startswith(f".{named.name}{REPLACED}")]
    return moved[-1] if moved else folder


def prune(folder: Path, keep: int, spared: frozenset[Path]) -> None:
    """Remove the oldest checkpoints until `keep` are left; never `spared` ones, nor files that no save wrote."""
    complete = _complete(folder)
    removable = [(path, manifest) for path, manifest in complete if path not in spared]
    for path, manifest in removable[: max(len(complete) - keep, 0)]:
        listed, foreign = _contents(path, manifest)
        if not foreign:
            remove(path)
            continue
        logger.warning("%s: the checkpoint is removed; what no save wrote stays: %s", path, _shown(foreign))
        for name in sorted(listed, key=lambda name: name != MANIFEST):  # without it, the rest is no checkpoint
            (path / name).unlink()


def _contents(folder: Path, manifest: Manifest) -> tuple[list[str], list[str]]:
    """The files of a checkpoint's folder: those that its save wrote, and all others. Follows no links."""
    every = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = sorted(path.relative_to(folder).as_posix() for path in every)
    listed = {MANIFEST, *manifest.files}
    return [name for name in names if name in listed], [name for name in names if name not in listed]


def _shown(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more files" if len(names) > 1 else "")


def remove(folder: Path) -> None:
    """Remove a checkpoint. It loses its name first, so none is ever seen half removed."""
    removed = free_name(folder, _REMOVED)
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes have left in a folder. Folders of processes that live are locked."""
    for path in folder.glob(f".{LATEST}{_NEW_LINK}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > _LINK_S:
                path.unlink()
    for path in _hidden(folder, PARTIAL):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                if _lock(handle):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
    for path in _hidden(folder, _REMOVED):
        shutil.rmtree(path, ignore_errors=True)
    for path in _hidden(folder, REPLACED):
        if not _stands_in(path):
            with contextlib.suppress(OSError):
                remove(path)


def make_partial(folder: Path) -> tuple[Path, int]:
    """Make the hidden folder in which a checkpoint is written. Returns it with a handle that locks it.

    The system releases the lock when the process ends. Another process that takes the folder for abandoned before it
    is locked removes it; then this function makes another one.
    """
    while True:
        path = free_name(folder, PARTIAL)
        path.mkdir()
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        except OSError:
            path.rmdir()
            raise
        # Without locks in the file system, no process can lock the folder to remove it either.
        if _lock(handle) is not False and path.exists():
            return path, handle
        os.close(handle)


def make_token(partial: Path) -> str:
    """Write a random text into a new folder, by which other machines recognise it; returns the text."""
    token = secrets.token_hex(16)
    write_synced(partial / TOKEN, token.encode())
    sync_folder(partial)
    return token


def see_token(partial: Path, token: str, folder: Path) -> None:
    """Raise CheckpointError unless the folder that rank 0 has made for the checkpoint `folder` is visible here."""
    deadline = time.monotonic() + _SEEN_S
    while True:
        with contextlib.suppress(OSError):
            if (partial / TOKEN).read_text() == token:
                return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{folder.parent} on this machine is not the folder of that name on rank 0: {partial.name}, which rank "
                "0 has made there, is not in it. Save into a folder that all machines share, such as one on a network "
                "file system."
            )
        time.sleep(0.05)


def _lock(handle: int) -> bool | None:
    """Lock a folder. Returns False if another process has locked it, None if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def check_parent(folder: str | os.PathLike[str], prefix: str, after: int, until: int | None = None) -> None:
    """Raise CheckpointError if a run cannot save its checkpoints into a folder. Call it before the run begins.

    The run saves folders named `prefix` and a number that is larger than `after` and at most `until`.
    """
    parent = Path(os.path.abspath(folder))
    try:
        names = os.listdir(parent) if parent.is_dir() else []
        _check_link(parent)
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be saved into {parent}: {error}.") from error
    for name in sorted(names):
        number = name.removeprefix(prefix)
        is_own = name.startswith(prefix) and number.isdecimal() and str(int(number)) == number
        if is_own and after < int(number) and (until is None or int(number) <= until):
            check_target(parent / name)


def check_target(target: Path) -> None:
    """Raise before anything is written if the folder or `latest` are taken by something that is not a checkpoint."""
    if target.name == LATEST:
        raise ConfigError(f"{target} is the name of the link to the latest checkpoint; give the folder another name.")
    try:
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise CheckpointError(f"{target} exists and is not a folder; remove it, or save elsewhere.")
        if target.is_dir() and any(target.iterdir()):
            _check_replaceable(target)
        _check_link(target.parent)
    except OSError as error:
        raise not_written(target, error) from error


def _check_link(parent: Path) -> None:
    link = parent / LATEST
    if link.exists() and not link.is_symlink():
        raise CheckpointError(
            f"{link} exists and is not a link, and saves make a link of this name to the newest checkpoint; move it "
            "away, or save elsewhere."
        )


def _check_replaceable(target: Path) -> None:
    """Raise CheckpointError unless a folder is a checkpoint without other files: see [Note: what may be deleted]."""
    try:
        manifest = read_manifest(target)
    except CheckpointError as error:
        raise CheckpointError(
            f"{target} has other content than a checkpoint of RoundPipe, and a save would delete it ({error}) Move it "
            "away, or save elsewhere."
        ) from error
    _, foreign = _contents(target, manifest)
    if foreign:
        raise CheckpointError(
            f"{target} is a checkpoint, but has other content, too, and a save would delete it: {_shown(foreign)}. "
            "Move it away, or save elsewhere."
        )


def take_name(partial: Path, folder: Path) -> Path | None:
    """Give a complete folder its name. Returns the new, hidden name of the checkpoint that had the name, if any."""
    check_target(folder)  # again: the files took long to write
    replaced = None
    if folder.exists():
        replaced = free_name(folder, REPLACED)
        os.rename(folder, replaced)
    try:
        os.rename(partial, folder)
    except BaseException:
        if replaced is not None:
            os.rename(replaced, folder)
        raise
    return replaced


def not_written(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} could not be written: {error}. Earlier checkpoints are unchanged; free space or mend "
        "the permissions, then save again."
    )


def free_name(folder: Path, kind: str) -> Path:
    """A hidden name beside a folder that does not exist yet."""
    return folder.with_name(f".{folder.name}{kind}{secrets.token_hex(8)}")


def point_to(link: Path, name: str) -> None:
    """Make `link` point to `name`, replacing an older link in one step."""
    new = free_name(link, _NEW_LINK)
    os.symlink(name, new)
    try:
        os.replace(new, link)
    except BaseException:
        new.unlink()
        raise
    sync_folder(link.parent)
