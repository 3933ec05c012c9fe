"""What the documents say is run and looked up, so that it stays true."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
import roundpipe.integrations
from roundpipe import checkpoint, monitor
from roundpipe.__main__ import main
from roundpipe.cli import arguments, chat, doctor, estimate, merge, view
from roundpipe.cli.methods import METHODS
from roundpipe.store import host_memory

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
API = ROOT / "docs" / "api.md"
FIRST_FINETUNE = ROOT / "docs" / "first-finetune.md"  # its blocks need each other
PAGES_THAT_RUN = [README, *sorted({*(ROOT / "docs").glob("*.md")} - {FIRST_FINETUNE})]
ESTIMATE = ROOT / "docs" / "estimate.md"
INSTALL = ROOT / "docs" / "install.md"
EXAMPLES = ROOT / "examples" / "README.md"
USE = ROOT / "docs" / "use-the-model.md"
VIEW = ROOT / "docs" / "view.md"
TRAIN = ROOT / "docs" / "train.md"
TRAINING_LOOP = ROOT / "docs" / "training-loop.md"
PAGES = [*PAGES_THAT_RUN, FIRST_FINETUNE, EXAMPLES]
PAGES_WITH_TARGETS = [*PAGES, ROOT / "CONTRIBUTING.md"]
# Every block of a page has one of these languages. Blocks of `python` run; why the others do not, and what tests them:
BLOCKS_THAT_DO_NOT_RUN = {
    "bash": "installs packages or needs a model; runs on the page of the first fine-tune. Options are looked up below",
    "diff": "two versions of a part of a script. The new one is compiled, and its imports are looked up, below",
    "text": "what a command prints, shortened",
}


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
def test_python_block_runs(
    page: Path,
    line: int,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu*2")
    monkeypatch.chdir(tmp_path)
    # Blank lines in front make line numbers in a traceback those of the page.
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    finally:
        names.clear()  # a hook on a parameter that refers to its model is a cycle which no collector sees
    assert "loss_reduction" not in caplog.text, "the block leaves open how losses are combined"


@pytest.mark.timeout(240)
@pytest.mark.slow
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
    assert len(outputs) == 8
    for line in outputs[2].splitlines()[-3:]:
        assert line in text, "the page shows the last lines that the command prints"
    assert "the run goes on from" in outputs[3]
    assert "80/80" in outputs[3], "the second command prolongs the run"
    assert outputs[4] == "white\n", "the model has learnt the answer"
    assert outputs[7] == "etihw\n", "the adapter has learnt another one"


def test_the_complete_script_goes_on_where_it_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = (code for _, code in python_blocks(TRAINING_LOOP) if "checkpoint.latest" in code)
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu*2")
    monkeypatch.chdir(tmp_path)

    def printed() -> list[str]:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(code, "the complete script", "exec"), names)
        names.clear()
        return capsys.readouterr().out.splitlines()

    straight = printed()
    assert len(straight) == 4
    shutil.rmtree(tmp_path / "run" / "epoch-4")  # as if the process had been killed in the last epoch
    assert printed() == straight[3:]


def test_readme_is_one_page_with_a_quick_start() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110
    assert any("forward_backward" in code for _, code in python_blocks(README))


def fenced_blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of every block of a page, also in lists."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(found), f"{page.name}: a block is not closed"
    return [(language, code) for _, language, code in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_or_has_a_reason(page: Path) -> None:
    blocks = fenced_blocks(page)
    assert {language for language, _ in blocks} <= {"python", *BLOCKS_THAT_DO_NOT_RUN}
    # python_blocks() finds them all: none is indented.
    assert [code for language, code in blocks if language == "python"] == [code for _, code in python_blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_code_fit_the_page(page: Path) -> None:
    """The site shows 88 characters at a width of 1280 pixels; the README is shown wider."""
    limit = 120 if page is README else 88
    long = [line for _, code in fenced_blocks(page) for line in code.splitlines() if len(line) > limit]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_an_item_of_a_list_follows_an_indented_paragraph_after_an_empty_line(page: Path) -> None:
    """Without that line the site shows the item as a part of the paragraph."""
    assert re.findall(r"^ {4}.*\n\d+\. .*", page.read_text(encoding="utf-8"), re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_documents_have_valid_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(code for language, code in fenced_blocks(page) if language == "bash").replace("\\\n", " ")
    for command in re.findall(r"^ *roundpipe (\w+)(.*)$", blocks, re.MULTILINE):
        name, words = command[0], shlex.split(command[1], comments=True)
        assert name in ("train", "doctor", "estimate", "merge", "chat", "view")
        if name == "train" and "--config" not in words:
            arguments.parse([*words, "--devices", "cpu"])
        if name == "estimate":
            estimate.parser().parse_args(words)
        if name in ("merge", "chat", "view"):
            {"merge": merge, "chat": chat, "view": view}[name].parser().parse_args(words)
    for words in re.findall(r"`roundpipe train (--[^`]*)`", text):
        assert set(re.findall(r"--[a-z][a-z0-9-]*", words)) <= options_of_train(), words


def options_of_train() -> set[str]:
    parser = arguments._Parser()
    arguments._add_own_options(parser)
    for parser.method in METHODS.values():
        arguments._add_fields(parser)
    return set(parser._option_string_actions)


def test_the_page_on_estimates_shows_what_the_command_prints_and_names_every_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (_, command), (_, printed) = fenced_blocks(ESTIMATE)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == printed
    table = ESTIMATE.read_text(encoding="utf-8").partition("## Options")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(--[a-z][a-z0-9-]*)", table))
    assert named == {word for word in estimate.parser()._option_string_actions if word.startswith("--")} - {"--help"}


def test_the_pages_on_using_the_model_and_watching_runs_name_every_option_of_their_commands() -> None:
    for command, page, heading in (
        (merge, USE, "## Merge an adapter"),
        (chat, USE, "## Chat"),
        (view, VIEW, "# Watch"),
    ):
        section = page.read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
        named = set(re.findall(r"^\| `(--[a-z][a-z0-9-]*)", section, re.MULTILINE))
        assert named == {word for word in command.parser()._option_string_actions if word.startswith("--")} - {"--help"}


def test_the_page_of_the_command_names_existing_options() -> None:
    for page in (TRAIN, FIRST_FINETUNE):
        named = set(re.findall(r"`(--[a-z][a-z0-9-]*)", page.read_text(encoding="utf-8")))
        assert named
        assert named - {"--learnin-rate", "--rows"} <= options_of_train(), page.name


def test_new_sides_of_the_diffs_are_code_with_names_that_exist() -> None:
    diffs = [code for page in PAGES for language, code in fenced_blocks(page) if language == "diff"]
    assert diffs
    for diff in diffs:
        lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.ImportFrom) and node.module == "roundpipe.integrations":
                assert {alias.name for alias in node.names} <= set(roundpipe.integrations.__all__)


def documented_signatures() -> list[object]:
    """(object, signature on the page) of functions and classes in headings, and of the methods of RoundPipe."""
    text = API.read_text(encoding="utf-8")
    found = []
    for name, given in re.findall(r"^### `([\w.]+)\((.*)\)`$", text, re.MULTILINE):
        scope: Any = roundpipe if hasattr(roundpipe, name.split(".")[0]) else roundpipe.integrations
        found.append(pytest.param(operator.attrgetter(name)(scope), given, id=name))
    for name, given in re.findall(r"\*\*`(\w+)\((.*?)\)`\*\*", text.split("### `wrap_model")[0]):
        if "state_dict" not in name:  # these take what those of torch take
            found.append(pytest.param(getattr(roundpipe.RoundPipe, name), given, id=f"RoundPipe.{name}"))
    assert len(found) > 25
    return found


@pytest.mark.parametrize(("target", "given"), documented_signatures())
def test_signature_in_the_api_page_is_that_of_the_code(target: Any, given: str) -> None:
    """Names, kinds, order and defaults; `...` stands for a default that has no short form."""
    names: dict[str, Any] = {**vars(roundpipe), "torch": torch}
    exec(f"def shown({given}): pass", names)
    shown = inspect.signature(names["shown"]).parameters
    real = {name: param for name, param in inspect.signature(target).parameters.items() if name != "self"}
    assert list(shown) == list(real)
    for name, param in shown.items():
        if param.default is not ...:
            assert param.default == real[name].default, name


def rows_of_the_table_under(heading: str, page: Path) -> list[list[str]]:
    """Cells of the first table after a text of a page, without its header."""
    text = page.read_text(encoding="utf-8")
    table = re.search(r"(?:^\|.*\|\n)+", text[text.index(heading) :], re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def test_the_tables_of_options_have_every_field() -> None:
    config = {
        name
        for row in rows_of_the_table_under("### `RoundPipeRunConfig`", API)
        for name in re.findall(r"`(\w+)`", row[0])
    }
    assert config == {field.name for field in dataclasses.fields(roundpipe.RoundPipeRunConfig)}
    options = rows_of_the_table_under("| `RoundPipeOptions` |", ROOT / "docs" / "trainer.md")
    assert [row[0].strip("`| ") for row in options] == [
        field.name for field in dataclasses.fields(roundpipe.integrations.RoundPipeOptions)
    ]


def test_the_environment_variables_are_those_of_the_library() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    known = set(re.findall(r"ROUNDPIPE_[A-Z_]+", source))
    rows = rows_of_the_table_under("## Environment variables", API)
    assert {row[0].strip("`| ") for row in rows} == known
    defaults = {row[0].strip("`| "): row[1].strip("`| ") for row in rows}
    assert defaults[host_memory.CHECK_VARIABLE] == host_memory._REFUSE
    assert float(defaults[monitor.WATCHDOG_VARIABLE]) == monitor.DEFAULT_WATCHDOG_S
    for page in PAGES:
        assert set(re.findall(r"ROUNDPIPE_[A-Z_]+", page.read_text(encoding="utf-8"))) <= known, page.name


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


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site and the usual viewers of repositories make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_headings_lead_to_one() -> None:
    found = 0
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#: ]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            assert anchor in anchors(page.parent / target if target else page), f"{page.name}: {target}#{anchor}"
            found += 1
    assert found > 40


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


# What stands for a value in the messages on the page of the command. "no weights" is one of two faults of a model.
EXAMPLE_VALUES = r"\.\.\.|\b\d+\b|\w+\.jsonl|model\.safetensors|--learnin-rate|--learning-rate|nan|(?<=has )no weights"


def test_the_messages_on_the_page_of_the_command_exist() -> None:
    """Numbers and names stand for the values of an example, so each piece between them is looked up."""
    known = messages_of_the_library()
    quoted = [row[0].strip("`| ") for row in rows_of_the_table_under("## What goes wrong", TRAIN)]
    assert len(quoted) > 10
    for message in quoted:
        pieces = re.split(EXAMPLE_VALUES, message)
        assert [piece for piece in pieces if piece.strip(" ,.:;?") not in known] == [], message
