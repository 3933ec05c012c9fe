"""What the documents say is run and looked up, so that it stays true."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roundpipe
import roundpipe.integrations
from roundpipe import checkpoint
from roundpipe.cli import doctor

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TRAINING_LOOP = ROOT / "docs" / "training-loop.md"
API = ROOT / "docs" / "api.md"
TRANSFORMERS = ROOT / "docs" / "transformers.md"
TRAINER = ROOT / "docs" / "trainer.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
INSTALL = ROOT / "docs" / "install.md"
PAGES_THAT_RUN = [README, TRAINING_LOOP, API, TRANSFORMERS, TRAINER, CHECKPOINTS]
PAGES_WITH_TARGETS = [*PAGES_THAT_RUN, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "releasing.md"]


def python_blocks(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, code) of every python block of a page."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 2, match.group(1)


def all_blocks() -> list[object]:
    return [
        pytest.param(page, line, code, id=f"{page.name}:{line}")
        for page in PAGES_THAT_RUN
        for line, code in python_blocks(page)
    ]


@pytest.mark.parametrize(("page", "line", "code"), all_blocks())
def test_python_block_runs(page: Path, line: int, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu*2")
    monkeypatch.chdir(tmp_path)
    # Blank lines in front make line numbers in a traceback those of the page.
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    finally:
        names.clear()  # a hook on a parameter that refers to its model is a cycle which no collector sees


def test_readme_has_a_quick_start() -> None:
    assert any("forward_backward" in code for _, code in python_blocks(README))


def test_every_make_target_named_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES_WITH_TARGETS:
        named = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, f"{page.name} names targets the Makefile does not have"


def test_readme_names_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("name", roundpipe.__all__)
def test_public_name_is_in_the_api_page(name: str) -> None:
    assert re.search(rf"`(roundpipe\.)?{name}\b", API.read_text(encoding="utf-8")), f"docs/api.md does not name {name}"


@pytest.mark.parametrize("name", roundpipe.integrations.__all__)
def test_name_of_the_integrations_is_in_the_api_page(name: str) -> None:
    assert re.search(rf"`{name}\b", API.read_text(encoding="utf-8")), f"docs/api.md does not name {name}"


@pytest.mark.parametrize("name", checkpoint.__all__)
def test_public_name_of_checkpoints_is_in_the_api_page(name: str) -> None:
    assert re.search(rf"^### `checkpoint\.{name}\b", API.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_on_installing_names_every_finding_of_doctor_and_its_limit() -> None:
    text, source = INSTALL.read_text(encoding="utf-8"), Path(doctor.__file__).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (fails|slow) \|", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"\bFinding\(\s*Severity", source))
    for what, severity in rows:
        title = what.replace("a GPU", "{gpu.device}").replace("of the driver", "of driver {driver}")
        assert re.search(rf'Severity\.{severity.upper()},\s+f?"{re.escape(title)}', source), what
    for limit in (doctor._SLOW_LINK, doctor._LITTLE_MEMORY, doctor._LITTLE_DISK, doctor._SLOW_OPTIMIZER):
        assert re.search(rf"less than {limit / 1e9:g} (GB|billion)", text)


def test_every_extra_named_in_the_documents_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        named = set(re.findall(r"pip install '(?:roundpipe|\.)\[([a-z]+)\]'", page.read_text(encoding="utf-8")))
        assert named <= set(extras), page.name


def test_links_between_the_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
