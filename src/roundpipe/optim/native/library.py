"""Finds the compiled kernel, or compiles it.

Asked once per process, when an optimizer first steps. The library was built with the package, or is compiled into the
user's cache, once for every version of the source. Where neither works the caller does without.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("roundpipe")

SOURCE = Path(__file__).with_name("one_pass_adam.c")
_SOURCES = (SOURCE, SOURCE.with_name("adam_block.h"))
# Optimized, but every operation rounded by itself: no flag may change what comes out.
COMPILE_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 120.0


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library; None, and one line in the log, where there is none and none can be made."""
    for path in _built_with_the_package():
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            logger.warning("the optimizer kernel %s cannot be loaded: %s", path, error)
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "Adam runs without its one-pass kernel, about half as fast and with more memory: %s. "
            "A C compiler (cc) is all it needs.",
            _reason(error),
        )
        return None


def built_name() -> str:
    """Of the library that setup.py builds. It tells the source, so one of another source is never found."""
    return f"_one_pass_adam_{_digest()}"


def _built_with_the_package() -> Iterator[Path]:
    name = built_name()
    candidates = (SOURCE.with_name(name + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return (path for path in candidates if path.exists())


def _compiled() -> Path:
    library = _cache_directory() / f"one_pass_adam-{_digest()}-{sys.platform}-{platform.machine()}.so"
    if not library.exists():
        _compile(library)
    return library


def _digest() -> str:
    """Of all that decides what the kernel does: its source and how it is compiled."""
    text = b"".join(source.read_bytes() for source in _SOURCES)
    return hashlib.sha256(text + " ".join(COMPILE_FLAGS).encode()).hexdigest()[:16]


def _compile(library: Path) -> None:
    """Into a file of its own first, so that another process never loads half a library."""
    compiler = os.environ.get("CC") or next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory) / library.name
        command = [*compiler.split(), *COMPILE_FLAGS, "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        made.replace(library)


def _cache_directory() -> Path:
    """One that only the user can write to: what lies in it is executed."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundpipe"
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_ours = not hasattr(os, "getuid") or base.stat().st_uid == os.getuid()
        if is_ours and os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="roundpipe-"))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error.cmd[0]} failed: {error.stderr.strip()[-500:]}"
    return str(error)
