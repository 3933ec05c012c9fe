"""The kernel's library: compiled once, and never loaded from where another user could have put it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from roundpipe.optim.native import library

UNKNOWN_USER = 54321  # a user that no system knows
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can hand files to another user")

# Loads the kernel without the one that was built with the package, and steps with it.
STEP = """
import logging
logging.basicConfig(format="%(message)s")
import torch
from roundpipe.optim import Adam
from roundpipe.optim.native import library
library._built_with_the_package = lambda: iter(())
param = torch.nn.Parameter(torch.ones(3))
param.grad = torch.ones(3)
optimizer = Adam([param])
{before}
optimizer.step()
assert (param < 1).all()
print("kernel" if library.load() else "none")
"""


def step_in_a_process(environment: dict[str, str], before: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", STEP.format(before=before)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"], **environment},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this process, empty, with nothing built with the package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_built_with_the_package", lambda: iter(()))
    return tmp_path / "roundpipe"


@pytest.fixture
def loaded_from(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were loaded."""
    seen: list[Path] = []
    real = ctypes.CDLL

    def load(path: str) -> ctypes.CDLL:
        seen.append(Path(path).resolve())
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", load)
    return seen


def fresh_load() -> ctypes.CDLL | None:
    return library.load.__wrapped__()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


@pytest.fixture(scope="session")
def library_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled once for all tests that start with one."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(library, "_built_with_the_package", lambda: iter(()))
        return compiled_in(folder / "roundpipe")


@pytest.fixture
def made(cache: Path, library_file: Path) -> Path:
    """The library in the cache of this process, as `compiled_in` leaves it."""
    cache.mkdir(mode=0o700)
    path = cache / library_file.name
    path.write_bytes(library_file.read_bytes())
    path.chmod(0o600)
    return path


def compiled_in(cache: Path) -> Path:
    assert fresh_load() is not None, "the tests need a C compiler"
    (path,) = libraries(cache)
    return path


def replace(path: Path, content: bytes) -> None:
    """By another file: this process has loaded the old one."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def test_the_library_is_compiled_once(cache: Path) -> None:
    made = compiled_in(cache)
    before = made.stat()
    assert fresh_load() is not None
    after = made.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in cache.iterdir()] == [made.name], "nothing else is left behind"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_without_a_compiler_there_is_one_line_and_no_kernel(tmp_path: Path) -> None:
    done = step_in_a_process({"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})
    assert done.stdout.split() == ["none"]
    assert done.stderr.count("there is no C compiler") == 1


@pytest.mark.parametrize("length", [*(pytest.param(length, marks=pytest.mark.slow) for length in (0, 100)), 5000])
def test_a_truncated_library_is_compiled_again(cache: Path, made: Path, length: int) -> None:
    whole = made.read_bytes()
    replace(made, whole[:length])
    assert fresh_load() is not None
    (path,) = libraries(cache)
    assert path.read_bytes() == whole


def test_a_library_with_one_changed_byte_is_compiled_again(cache: Path, made: Path, loaded_from: list[Path]) -> None:
    whole = bytearray(made.read_bytes())
    whole[-1] ^= 1
    replace(made, bytes(whole))
    loaded_from.clear()
    assert fresh_load() is not None
    (path,) = libraries(cache)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in path.name
    assert len(loaded_from) == 1


def test_a_library_that_cannot_be_loaded_is_compiled_again(cache: Path, made: Path) -> None:
    """Its checksum is right: a machine with another C library has put it there."""
    made.unlink()
    content = b"no library"
    other = cache / f"{library._name_without_checksum()}-{hashlib.sha256(content).hexdigest()}.so"
    other.write_bytes(content)
    other.chmod(0o600)
    assert fresh_load() is not None
    assert libraries(cache) == sorted([made, other])


def test_a_library_of_any_umask_is_private(cache: Path) -> None:
    before = os.umask(0)
    try:
        made = compiled_in(cache)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "mode", [pytest.param(0o777, marks=pytest.mark.slow), 0o770, pytest.param(0o1777, marks=pytest.mark.slow), 0o702]
)
def test_a_folder_that_others_can_write_to_is_not_used(
    cache: Path, made: Path, loaded_from: list[Path], mode: int
) -> None:
    cache.chmod(mode)
    loaded_from.clear()
    assert fresh_load() is not None
    assert len(loaded_from) == 1
    assert made not in loaded_from
    assert not loaded_from[0].exists(), "compiled into a private folder that is gone"
    assert libraries(cache) == [made]


def test_a_file_that_others_can_write_to_is_compiled_again(cache: Path, made: Path) -> None:
    before = made.stat().st_ino
    made.chmod(0o666)
    holder = os.open(made, os.O_RDONLY)  # so that its inode is not used again
    try:
        assert fresh_load() is not None
        assert made.stat().st_ino != before
    finally:
        os.close(holder)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


@as_root
def test_the_folder_of_another_user_is_not_used(cache: Path, made: Path, loaded_from: list[Path]) -> None:
    os.chown(cache, UNKNOWN_USER, UNKNOWN_USER)
    loaded_from.clear()
    assert fresh_load() is not None
    assert loaded_from
    assert made not in loaded_from


@as_root
def test_the_file_of_another_user_is_compiled_again(cache: Path, made: Path) -> None:
    os.chown(made, UNKNOWN_USER, UNKNOWN_USER)
    assert fresh_load() is not None
    assert made.stat().st_uid == os.geteuid()


@as_root
def test_a_link_to_the_folder_of_another_user_is_not_followed(cache: Path, made: Path, loaded_from: list[Path]) -> None:
    elsewhere = cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to(elsewhere)
    os.chown(elsewhere, UNKNOWN_USER, UNKNOWN_USER)
    loaded_from.clear()
    assert fresh_load() is not None
    assert elsewhere / made.name not in loaded_from


def test_a_link_in_the_place_of_the_library_is_not_followed(cache: Path, made: Path, loaded_from: list[Path]) -> None:
    elsewhere = made.rename(cache.parent / made.name)
    made.symlink_to(elsewhere)
    loaded_from.clear()
    assert fresh_load() is not None
    assert loaded_from == [made]
    assert not made.is_symlink()


def test_a_relative_cache_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded_from: list[Path]
) -> None:
    """What lies in the present folder may be anybody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert fresh_load() is not None
    assert [path.parent for path in loaded_from] == [tmp_path / "home" / ".cache" / "roundpipe"]


@as_root
def test_a_user_without_a_home_directory_has_the_kernel() -> None:
    """As in containers: HOME is not set, and the user is not in the password file."""
    drop = f"import os; os.setgroups([]); os.setgid({UNKNOWN_USER}); os.setuid({UNKNOWN_USER})"
    done = step_in_a_process({}, before=drop)
    assert done.stdout.split() == ["kernel"], done.stderr


@pytest.mark.slow
def test_a_home_directory_that_cannot_be_found_is_no_error() -> None:
    gone = "import pathlib\ndef home(): raise RuntimeError('Could not determine home directory.')"
    done = step_in_a_process({}, before=f"{gone}\npathlib.Path.home = home")
    assert done.stdout.split() == ["kernel"], done.stderr


@pytest.mark.slow
def test_a_home_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = step_in_a_process({"HOME": str(tmp_path / "file")})
    assert done.stdout.split() == ["kernel"], done.stderr
