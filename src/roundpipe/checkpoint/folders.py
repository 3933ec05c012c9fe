"""The folders of checkpoints beside each other: their hidden names, the link `latest`, and which are complete.

While a checkpoint is written, its folder has a hidden name and is locked by the writer. A checkpoint that is replaced
or removed loses its name before its files are deleted. So a folder with a plain name is complete. If a process is
killed while it replaces a checkpoint, between the two renames, `find` finds the old one under its hidden name.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import time
from pathlib import Path

from roundpipe.checkpoint.format import MANIFEST, read_manifest, sync_folder
from roundpipe.errors import CheckpointError

LATEST = "latest"
PARTIAL, REPLACED, _REMOVED = ".partial-", ".replaced-", ".removed-"


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints; None if there is none."""
    found = complete_checkpoints(Path(folder))
    return found[-1] if found else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the oldest first. A folder whose manifest cannot be read is left out."""
    found = []
    for manifest in folder.glob(f"*/{MANIFEST}"):
        path = manifest.parent
        if path.is_symlink() or path.name.startswith("."):
            continue
        with contextlib.suppress(CheckpointError):
            found.append((read_manifest(path).saved_at_ns, path))
    return [path for _, path in sorted(found)]


def find(folder: Path) -> Path:
    """The folder to read: `folder`, or where its checkpoint was moved to by a save that was killed in the middle."""
    if not folder.exists() and not folder.is_symlink():
        moved = sorted(folder.parent.glob(f".{glob.escape(folder.name)}{REPLACED}*/{MANIFEST}"))
        if moved:
            return moved[-1].parent
    return folder


def prune(folder: Path, keep: int, spared: frozenset[Path]) -> None:
    """Remove the oldest checkpoints until `keep` are left; never `spared` ones.

    A folder loses its name first: none is ever seen half removed.
    """
    complete = complete_checkpoints(folder)
    removable = [path for path in complete if path not in spared]
    for path in removable[: max(len(complete) - keep, 0)]:
        removed = free_name(path, _REMOVED)
        os.rename(path, removed)
        shutil.rmtree(removed, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes have left in a folder. Folders of processes that live are locked."""
    for path in folder.glob(f".*{PARTIAL}*"):
        handle = locked(path)
        if handle is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(handle)
    for path in folder.glob(f".*{_REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".*{REPLACED}*"):
        if (folder / path.name[1:].partition(REPLACED)[0] / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)


def locked(folder: Path) -> int | None:
    """A handle of a folder with an exclusive lock, which the system releases when the process ends. None if taken."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def free_name(folder: Path, kind: str) -> Path:
    """A hidden name beside a folder that does not exist yet."""
    return folder.with_name(f".{folder.name}{kind}{time.time_ns():x}")


def point_to(link: Path, name: str) -> None:
    """Make `link` point to `name`, replacing an older link in one step."""
    new = free_name(link, ".new-")
    os.symlink(name, new)
    os.replace(new, link)
    sync_folder(link.parent)
