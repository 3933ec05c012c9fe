"""Runs a command with an instruction set that torch's matrix products do not crash with on this processor.

    .venv/bin/python tools/cpu_canary.py [--folder .venv] [COMMAND ...]

Some virtual machines report AMX but do not allow it: the first bfloat16 product dies with SIGILL. A child process tries
such products. If a signal kills it, this script tries the levels of ONEDNN_MAX_CPU_ISA from the highest to the lowest
and sets the first one that works for COMMAND. Without COMMAND it prints one line with the level, or nothing if none is
needed. FOLDER keeps the result for this processor, kernel and torch. A value in the environment takes precedence.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

# Loaded by its path, because the package may not be installed yet.
_FILE = Path(__file__).parents[1] / "src" / "roundpipe" / "cli" / "instruction_sets.py"
instruction_sets = SimpleNamespace(**runpy.run_path(str(_FILE)))

FILE_NAME = ".cpu-isa"
_CPUINFO = Path("/proc/cpuinfo")
_CPUINFO_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix), help="where to keep the result")
    parser.add_argument("--canary", type=Path, help="a script to run instead of the products")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if instruction_sets.level_in_the_environment() is None:
        level = remembered(options.folder / FILE_NAME, processor(), instruction_sets.in_a_child(options.canary))
        if level is not None:
            variable = instruction_sets.VARIABLE
            os.environ[variable] = level
            if not options.command:
                sys.stdout.write(f"bfloat16 products crash on this processor: all targets use {variable}={level}\n")
    if options.command:
        os.execvp(options.command[0], options.command)
    return 0


def processor() -> str:
    """A key of everything that decides which instructions torch uses and whether they work."""
    described = [platform.machine(), platform.release(), platform.version(), importlib.metadata.version("torch")]
    if _CPUINFO.exists():
        first = _CPUINFO.read_text().split("\n\n")[0]
        described += [line for line in first.splitlines() if line.split(":")[0].strip() in _CPUINFO_FIELDS]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:32]


def remembered(file: Path, key: str, probe: object) -> str | None:
    """The level for this processor: from the file if it is there, else found by `probe` and written to the file."""
    known = _read(file)
    if key in known and known[key] in (*instruction_sets.LEVELS, None):
        return known[key]
    survival = instruction_sets.survived(probe)
    if survival.always_crashes:
        variable = instruction_sets.VARIABLE
        sys.stderr.write(
            f"matrix products crash at every level of {variable}: this torch cannot run on this processor\n"
        )
    if survival.is_certain:
        # Written beside and renamed, so that a parallel run never reads half a file.
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps({**known, key: survival.level}))
        partial.replace(file)
    return survival.level


def _read(file: Path) -> dict[str, str | None]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
