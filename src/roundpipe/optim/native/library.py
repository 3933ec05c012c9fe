"""Loads the compiled kernel library, and compiles it first if necessary.

The library was either built with the package or is compiled into the user's cache folder, once for every version of the
source. If neither works there is no kernel, and the optimizers use torch.

[Note: what may be loaded] Loading a library runs its code, so files that another user may have written are not loaded.
A library in the cache is loaded only if folder and file belong to this user, no other user can write to them, and the
content has the checksum that is part of the file name. It is loaded through the descriptor of the folder in which it
was checked. If there is no cache folder that this user alone can write to, the library is compiled into a temporary
folder, which is removed after loading.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("roundpipe")

SOURCE = Path(__file__).with_name("one_pass.c")
_SOURCES = (SOURCE, SOURCE.with_name("blocks.h"), SOURCE.with_name("rules.h"))
# The flags optimize without changing results: -ffp-contract=off makes the compiler round every operation separately.
COMPILE_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 120.0


@functools.cache
def load() -> ctypes.CDLL | None:
    """The kernel library. Logs a warning and returns None if there is none and it cannot be compiled."""
    try:
        for path in _built_with_the_package():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                logger.warning("the optimizer kernel %s cannot be loaded: %s", path, error)
        return _cached_or_compiled()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "roundpipe.optim runs without its one-pass kernel, about half as fast and with more memory: %s. "
            "To compile it, install gcc or clang, or name a compiler in CC.",
            reason(error),
        )
        return None


def built_name() -> str:
    """The file name of the library that setup.py builds, for any version of Python.

    The name contains a digest of the source, so that a library built from other source is not found.
    """
    return f"_one_pass_{_digest()}.so"


def is_built_with_the_package(loaded: ctypes.CDLL) -> bool:
    """Whether a loaded library came with the package; otherwise it was compiled at first use."""
    return loaded._name in map(str, _built_with_the_package())


def _built_with_the_package() -> Iterator[Path]:
    """The path of the library that was built from the current source, in its folder; nothing if there is none."""
    return (path for path in (SOURCE.with_name(built_name()),) if path.exists())


class _UnsoundError(OSError):
    """A file fails a check of [Note: what may be loaded]."""


def _cached_or_compiled() -> ctypes.CDLL:
    """Load the library from the cache. If it is not there, compile it into the cache or into a temporary folder."""
    if os.name != "posix":
        raise OSError("it needs POSIX threads")
    cache = _cache_folder()
    cached = None if cache is None else _cached(cache)
    if cached is not None:
        return cached
    if cache is not None and os.access(cache, os.W_OK):
        return _compiled(cache)
    with tempfile.TemporaryDirectory(prefix="roundpipe-") as folder:
        return _compiled(Path(folder))


def _name_without_checksum() -> str:
    return f"one_pass-{_digest()}-{sys.platform}-{platform.machine()}"


def _cached(cache: Path) -> ctypes.CDLL | None:
    """Load the first library in the cache that passes the checks; None without one. Removes those that fail them."""
    # The name contains the digest of the source, so libraries of other versions are not considered.
    for path in sorted(cache.glob(f"{_name_without_checksum()}-*.so")):
        try:
            return _load_checked(path)
        except OSError as error:
            logger.warning("the optimizer kernel %s is compiled again: %s", path, error)
            if isinstance(error, _UnsoundError):
                path.unlink(missing_ok=True)
    return None


def _load_checked(path: Path) -> ctypes.CDLL:
    """Load a library after the checks of [Note: what may be loaded]; raises _UnsoundError if one fails."""
    with _opened(path.parent, os.O_DIRECTORY) as folder, _opened(path.name, os.O_NOFOLLOW, folder) as file:
        if not _is_private(os.fstat(folder)) or not _is_private(os.fstat(file)):
            raise _UnsoundError("it belongs to another user, or others can write to it")
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _UnsoundError("it is not a regular file")
        with open(file, "rb", closefd=False) as content:
            checksum = hashlib.sha256(content.read()).hexdigest()
        if path.name != f"{_name_without_checksum()}-{checksum}.so":
            raise _UnsoundError("its content does not have the checksum in its name")
        # Through the descriptor: meanwhile `path` may lead to another folder, which was not checked.
        in_folder = f"/proc/self/fd/{folder}/{path.name}"
        return ctypes.CDLL(in_folder if os.path.exists(in_folder) else str(path))


@contextlib.contextmanager
def _opened(path: str | Path, flag: int, folder: int | None = None) -> Iterator[int]:
    """Open a file or folder for reading and yield its descriptor. A relative path starts at the descriptor `folder`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_private(status: os.stat_result) -> bool:
    """Whether this user owns a file and no other user except root can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest() -> str:
    """A digest of the source and the compiler flags, which together determine what the kernel does."""
    text = b"".join(source.read_bytes() for source in _SOURCES)
    return hashlib.sha256(text + " ".join(COMPILE_FLAGS).encode()).hexdigest()[:16]


def compiler() -> str | None:
    """The command of the C compiler: CC of the environment, else the first one found; None without one."""
    return os.environ.get("CC") or next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def compile_to(file: Path) -> None:
    """Compile the library into a file. Raises OSError without a compiler, SubprocessError if compiling fails."""
    command = compiler()
    if command is None:
        raise OSError("there is no C compiler")
    words = [*command.split(), *COMPILE_FLAGS, "-shared", "-fPIC", "-o", str(file), str(SOURCE), "-lm"]
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=_COMPILE_S)


def _compiled(folder: Path) -> ctypes.CDLL:
    """Compile the library into `folder` and load it.

    The file gets its final name only when it is complete, so that no other process loads an incomplete library.
    """
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        made = Path(directory) / "made.so"
        compile_to(made)
        made.chmod(0o600)  # whatever the umask is, no other user may write to the file
        checksum = hashlib.sha256(made.read_bytes()).hexdigest()
        return _load_checked(made.replace(folder / f"{_name_without_checksum()}-{checksum}.so"))


def _cache_folder() -> Path | None:
    """The user's cache folder, created if missing. None if it cannot be created or other users can write to it."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        folder = base / "roundpipe"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder if _is_private(folder.stat()) else None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None


def reason(error: Exception) -> str:
    """An error of loading or compiling as text. For a failed compilation, the end of the compiler's output."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error.cmd[0]} failed: {error.stderr.strip()[-500:]}"
    return str(error)
