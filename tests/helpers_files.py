"""Counts the calls into the file system that change files and acts before a chosen one; permissions in tests."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

_NOBODY = 65534

Act = Callable[[int, str], None]  # gets the number of the call, from 0, and its description; may raise


class _WatchedFile(io.FileIO):
    """A new file whose writes are counted."""

    before: Callable[[str], None] = staticmethod(lambda what: None)

    def write(self, content: Any) -> int:
        self.before(f"write {os.path.basename(str(self.name))}")
        return super().write(content)


@contextlib.contextmanager
def watched_files(root: str | os.PathLike[str], act: Act) -> Iterator[list[str]]:
    """While this is open, call `act` before each change of a file below `root`. Gives the list of these changes.

    Changes are: making a file, folder or link, opening a folder, writing, flushing to the disk, and renaming.
    """
    below = os.path.abspath(root)
    seen: list[str] = []
    real_open = builtins.open
    names = ("fsync", "rename", "replace", "symlink", "mkdir", "open")
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names}

    def before(what: str) -> None:
        seen.append(what)
        act(len(seen) - 1, what)

    def is_below(*paths: Any) -> bool:
        return any(isinstance(path, str | os.PathLike) and os.fspath(path).startswith(below) for path in paths)

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            makes_nothing = name == "mkdir" and os.path.exists(args[0])
            if name == "fsync" or (is_below(*args) and not makes_nothing):
                before(f"{name} {' '.join(os.path.basename(str(arg)) for arg in args[:2])}")
            return real[name](*args, **options)

        return call

    def watched_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if "x" not in mode or not is_below(file):
            return real_open(file, mode, buffering, *args, **options)
        before(f"create {os.path.basename(str(file))}")
        raw = _WatchedFile(file, "x")
        raw.before = before  # type: ignore[method-assign]
        return raw if buffering == 0 else io.BufferedWriter(raw)

    builtins.open = watched_open
    for name in names:
        setattr(os, name, watched(name))
    try:
        yield seen
    finally:
        builtins.open = real_open
        for name in names:
            setattr(os, name, real[name])


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """The superuser may read and write everything; so become somebody else, if this is the superuser."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
