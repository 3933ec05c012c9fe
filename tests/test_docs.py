"""What the documents say is run and looked up, so that it stays true."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
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
API = ROOT / "docs" / "api.md"
FIRST_FINETUNE = ROOT / "docs" / "first-finetune.md"  # its blocks need each other
PAGES_THAT_RUN = [README, *sorted({*(ROOT / "docs").glob("*.md")} - {FIRST_FINETUNE})]
INSTALL = ROOT / "docs" / "install.md"
PAGES_WITH_TARGETS = [*PAGES_THAT_RUN, FIRST_FINETUNE, ROOT / "CONTRIBUTING.md"]


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


@pytest.mark.timeout(240)
def test_the_first_fine_tune_runs_from_top_to_bottom(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "roundpipe"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m roundpipe "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "ROUNDPIPE_DEVICES": "cpu*2",
    }
    text = FIRST_FINETUNE.read_text(encoding="utf-8")
    outputs = []
    for language, code in re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        words = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        outputs.append(done.stdout)
    assert len(outputs) == 5
    assert "80/80" in outputs[3], "the second command prolongs the run"
    assert outputs[4] == "white\n", "the model has learnt the answer"


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


def messages_of_the_library() -> str:
    """All strings of the library but docstrings; a formatted value in one of them is `...`, as on the page."""
    texts = []
    for file in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                texts.append(re.sub(r"%[ds]", "...", node.value))
    return "\n".join(texts)


def test_the_messages_of_the_troubleshooting_page_exist() -> None:
    known = messages_of_the_library()
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    quoted = [message for cell in cells for message in re.findall(r"`([^`]{12,})`", cell)]
    assert len(quoted) > 40
    of_torch = {"CUDA out of memory"}
    assert [message for message in quoted if message not in known and message not in of_torch] == []
