"""The package as it is built and described: one version, extras, one wheel for every Python, no old kernel.

`make wheel` builds and installs the wheel; these tests run the steps of setup.py that decide what is in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import roundpipe
from roundpipe.__main__ import main
from roundpipe.cli.doctor import OLDEST_TORCH
from roundpipe.optim.native import library

ROOT = Path(__file__).parents[1]
NATIVE = "roundpipe/optim/native"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(name: str) -> dict[str, str]:
    """Package to version of a file of pinned requirements."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9_-]+)==(\S+)$", text, re.MULTILINE))


# Version and metadata.


def test_every_place_names_the_same_version(project: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    version = roundpipe.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version)
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "roundpipe.version.__version__"}
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"roundpipe {version}\n"


def test_the_package_runs_as_a_module() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "roundpipe", "--version"], capture_output=True, text=True, env=environment, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"roundpipe {roundpipe.__version__}\n", "")


def test_every_extra_exists(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {"transformers", "train", "kernels", "demo", "docs"}
    assert all(extras.values())
    assert set(extras["transformers"]) < set(extras["train"]), "training with the command line needs transformers"


def test_the_pins_satisfy_the_extras(project: dict[str, Any]) -> None:
    """What is tested is what the extras ask for; kernels needs a GPU, docs is no part of the library."""
    pinned = pins("requirements-dev.txt")
    extras = project["project"]["optional-dependencies"]
    assert extras["demo"] == ["roundpipe[train]"]
    for requirement in (*project["project"]["dependencies"], *extras["train"]):
        name, _, least = requirement.partition(">=")
        assert name in pinned
        if least:
            assert tuple(map(int, pinned[name].split("."))) >= tuple(map(int, least.split(".")))


def test_doctor_asks_for_the_same_torch_as_the_package(project: dict[str, Any]) -> None:
    assert project["project"]["dependencies"] == [f"torch>={'.'.join(map(str, OLDEST_TORCH))}"]


def test_both_environments_build_with_the_same_setuptools(project: dict[str, Any]) -> None:
    (requirement,) = project["build-system"]["requires"]
    pinned = pins("requirements-build.txt")["setuptools"]
    assert pins("requirements-dev.txt")["setuptools"] == pinned
    assert int(pinned.split(".")[0]) >= int(requirement.removeprefix("setuptools>="))


def test_continuous_integration_tests_every_python_that_the_package_names(project: dict[str, Any]) -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["project"]["classifiers"]), re.MULTILINE)
    assert tested == named
    assert project["project"]["requires-python"] == f">={named[0]}"
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert [command.split()[:2] for command in commands if command] == [["make", "test"], ["make", "wheel"]]


def test_hooks_before_a_commit_download_nothing() -> None:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repository,) = settings["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-format", "ruff-check", "mypy"]


# What a build puts into a wheel.


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, with what earlier builds of other sources may have left in it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for folder in (
        tree / "src" / NATIVE,
        tree / "build" / "lib" / NATIVE,
        tree / "build" / "lib.linux-x86_64" / NATIVE,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_one_pass_0123456789abcdef.so").write_bytes(b"old")
    (tree / "build" / "lib" / "roundpipe" / "removed_module.py").write_text("")
    return tree


def build_wheel(tree: Path, into: Path, **environment: str) -> tuple[Path, str]:
    """The wheel that setup.py builds, and what the build wrote to stderr."""
    call = f"from setuptools import build_meta; build_meta.build_wheel({str(into)!r})"
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=tree, capture_output=True, text=True, env={**os.environ, **environment},
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel, done.stderr


def kernels(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_a_wheel_serves_every_python_and_has_only_the_kernel_of_its_source(tree: Path, tmp_path: Path) -> None:
    wheel, _ = build_wheel(tree, tmp_path)
    assert re.fullmatch(rf"roundpipe-{re.escape(roundpipe.__version__)}-py3-none-(?!any)\w+\.whl", wheel.name)
    assert kernels(wheel) == [f"{NATIVE}/{library.built_name()}"]
    contents = zipfile.ZipFile(wheel)
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in contents.namelist() if name.endswith(".py")} == modules
    assert {f"{NATIVE}/one_pass.c", f"{NATIVE}/blocks.h", f"{NATIVE}/rules.h", "roundpipe/py.typed"} <= set(
        contents.namelist()
    )


def test_without_a_compiler_one_line_says_so_and_the_wheel_is_pure(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wheel, stderr = build_wheel(tree, tmp_path, PATH=str(tmp_path / "empty"), CC="")
    assert wheel.name == f"roundpipe-{roundpipe.__version__}-py3-none-any.whl"
    assert kernels(wheel) == []
    assert (
        stderr.count("roundpipe: built as a pure wheel, without the optimizer's C kernel: there is no C compiler") == 1
    )


def test_a_compiler_that_fails_makes_a_pure_wheel(tree: Path, tmp_path: Path) -> None:
    wheel, stderr = build_wheel(tree, tmp_path, CC=f"{sys.executable} --no-such-option")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert stderr.count("roundpipe: built as a pure wheel") == 1
    assert "no-such-option" in stderr


def test_a_changed_source_changes_the_name_of_its_kernel(tree: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tree, tmp_path / "tree")
    with (copy / "src" / NATIVE / "rules.h").open("a") as header:
        header.write("/* changed */\n")
    (name,) = kernels(build_wheel(copy, tmp_path)[0])
    assert Path(name).name != library.built_name()
