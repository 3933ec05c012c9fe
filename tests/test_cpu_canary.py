"""The canary of the Makefile: which instruction set commands get on a processor whose best one crashes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "cpu_canary.py"
LEVELS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
SHOW = "import os; print(os.environ.get('ONEDNN_MAX_CPU_ISA'))"


@pytest.fixture(scope="module")
def canary() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_canary", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Cpu:
    """A simulated processor: a script that dies unless it is given one of the levels that work there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._script, self._log = folder / "products.py", folder / "log"

    def survives(self, *levels: str | None, signal_name: str = "SIGILL") -> None:
        self._script.write_text(
            f"import os, signal\n"
            f"level = os.environ.get('ONEDNN_MAX_CPU_ISA')\n"
            f"print(level, file=open({str(self._log)!r}, 'a'))\n"
            f"if level not in {levels!r}:\n"
            f"    os.kill(os.getpid(), signal.{signal_name})\n"
        )

    @property
    def tried(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.endswith("_MAX_CPU_ISA")}
        arguments = ["--folder", str(self.folder), "--canary", str(self._script), *command]
        return subprocess.run(
            [sys.executable, str(TOOL), *arguments],
            capture_output=True,
            text=True,
            env={**clean, **environment},
            timeout=100,
        )

    def level(self, **environment: str) -> str:
        """What a process started by a command finds in its environment."""
        nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}], check=True)"
        done = self.run(sys.executable, "-c", nested, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def cpu(tmp_path: Path) -> Cpu:
    return Cpu(tmp_path)


@pytest.mark.parametrize("num_crashing", [1, 2, 3])
def test_the_highest_level_that_survives_is_set(cpu: Cpu, num_crashing: int) -> None:
    cpu.survives(*LEVELS[num_crashing - 1 :])
    assert cpu.level() == LEVELS[num_crashing - 1]
    assert cpu.tried == ["None", *LEVELS[:num_crashing]]


def test_a_sound_processor_gets_no_level_and_no_line(cpu: Cpu) -> None:
    cpu.survives(None)
    assert cpu.level() == "None"
    assert cpu.run().stdout == ""
    assert cpu.tried == ["None"]


def test_one_line_says_what_is_set(cpu: Cpu) -> None:
    cpu.survives("AVX512_CORE")
    for _ in range(2):
        done = cpu.run()
        assert (
            done.stdout == "bfloat16 products crash on this processor: all targets use ONEDNN_MAX_CPU_ISA=AVX512_CORE\n"
        )
        assert done.stderr == ""
    assert cpu.run(sys.executable, "-c", "").stdout == "", "commands print what they print"


def test_the_result_is_kept_for_this_processor(cpu: Cpu, canary: ModuleType) -> None:
    cpu.survives("AVX512_CORE_BF16")
    assert cpu.level() == cpu.level() == "AVX512_CORE_BF16"
    assert cpu.tried == ["None", "AVX512_CORE_BF16"]
    assert json.loads((cpu.folder / ".cpu-isa").read_text()) == {canary.processor(): "AVX512_CORE_BF16"}


def test_the_result_of_another_processor_is_not_trusted(cpu: Cpu, canary: ModuleType) -> None:
    (cpu.folder / ".cpu-isa").write_text(json.dumps({"another": None}))
    cpu.survives("AVX2")
    assert cpu.level() == "AVX2"
    assert json.loads((cpu.folder / ".cpu-isa").read_text()) == {"another": None, canary.processor(): "AVX2"}


def test_the_key_tells_processors_apart(canary: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for flags in ("avx2 avx512f", "avx2 avx512f amx_tile", "avx2 avx512f amx_tile"):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name : X\ncpu MHz : {len(keys)}\nflags : {flags}\n\n")
        monkeypatch.setattr(canary, "_CPUINFO", tmp_path / "cpuinfo")
        keys.add(canary.processor())
    assert len(keys) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"%s": "AVX9"}', '{"%s": 3}'])
def test_a_damaged_result_is_made_again(cpu: Cpu, canary: ModuleType, content: str) -> None:
    (cpu.folder / ".cpu-isa").write_text(content.replace("%s", canary.processor()))
    cpu.survives("AVX2")
    assert cpu.level() == "AVX2"
    assert json.loads((cpu.folder / ".cpu-isa").read_text()) == {canary.processor(): "AVX2"}


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_value_of_the_user_wins(cpu: Cpu, name: str) -> None:
    cpu.survives("AVX2")
    assert cpu.level(**{name: "AVX512_CORE"}) == ("AVX512_CORE" if name.startswith("ONEDNN") else "None")
    assert cpu.run(**{name: "AVX512_CORE"}).stdout == ""
    assert cpu.tried == []


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_a_process_that_others_killed_proves_nothing(cpu: Cpu, signal_name: str) -> None:
    """Out of memory, say."""
    cpu.survives(signal_name=signal_name)
    assert cpu.level() == "None"
    assert not (cpu.folder / ".cpu-isa").exists()


def test_a_crash_at_every_level_is_told_and_not_kept(cpu: Cpu) -> None:
    cpu.survives()
    done = cpu.run()
    assert done.stdout == ""
    assert "crash at every level of ONEDNN_MAX_CPU_ISA" in done.stderr
    assert not (cpu.folder / ".cpu-isa").exists()
    assert cpu.tried == ["None", *LEVELS]


def test_a_command_keeps_its_options_and_exit_status(cpu: Cpu) -> None:
    cpu.survives(None)
    done = cpu.run(sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "--folder", "-n", "--", "x")
    assert done.returncode == 7
    assert done.stdout == "['--folder', '-n', '--', 'x']\n"


def test_the_products_run_on_this_machine(canary: ModuleType) -> None:
    """With the level in the environment, if this is a machine that needs one."""
    command = [sys.executable, "-c", canary.instruction_sets.PRODUCTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "target",
    [
        "check",
        "test",
        "demo",
        "bench",
        "test-20",
        "test-cpus",
        "test-models",
        "test-models-newest",
        "models-table",
        "wheel",
    ],
)
def test_every_target_computes_under_the_canary(target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    canary = ".venv/bin/python tools/cpu_canary.py --folder .venv"
    commands = list(re.finditer(r"\.venv(-newest)?/bin/python (?!tools/cpu_canary)", done.stdout))
    assert commands
    for command in commands:
        assert done.stdout[: command.start()].endswith(f"{canary} "), done.stdout[command.start() :]
    assert canary in done.stdout.splitlines(), "the canary's line comes before the commands"
