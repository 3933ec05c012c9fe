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
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
VARIABLES = (VARIABLE, "DNNL_MAX_CPU_ISA")  # oneDNN reads either name
LEVELS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
FILE_NAME = ".cpu-isa"
_TIMEOUT_S = 300.0
_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CPUINFO = Path("/proc/cpuinfo")
_CPUINFO_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")

Probe = Callable[[str | None], int | None]
"""Runs the products with a level, or with none. Returns the exit status (negative: a signal), None if unknown."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix), help="where to keep the result")
    parser.add_argument("--canary", type=Path, help="a script to run instead of the products")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if not any(os.environ.get(name) for name in VARIABLES):
        level = remembered(options.folder / FILE_NAME, processor(), _in_a_child(options.canary))
        if level is not None:
            os.environ[VARIABLE] = level
            if not options.command:
                sys.stdout.write(f"bfloat16 products crash on this processor: all targets use {VARIABLE}={level}\n")
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


def remembered(file: Path, key: str, probe: Probe) -> str | None:
    """The level for this processor: from the file if it is there, else found by `probe` and written to the file."""
    known = _read(file)
    if key in known and known[key] in (*LEVELS, None):
        return known[key]
    level, is_certain = survived(probe)
    if is_certain:
        # Written beside and renamed, so that a parallel run never reads half a file.
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps({**known, key: level}))
        partial.replace(file)
    return level


def _read(file: Path) -> dict[str, str | None]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def survived(probe: Probe) -> tuple[str | None, bool]:
    """The highest level that works, None if no level is needed; and whether the result is certain."""
    for level in (None, *LEVELS):
        status = probe(level)
        if status is None:
            return None, False
        if status >= 0:
            return level, True
    sys.stderr.write(f"matrix products crash at every level of {VARIABLE}: this torch cannot run on this processor\n")
    return None, False


def _in_a_child(script: Path | None) -> Probe:
    command = [sys.executable, "-c", _PRODUCTS] if script is None else [sys.executable, str(script)]

    def probe(level: str | None) -> int | None:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        if level is not None:
            environment[VARIABLE] = level
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return None
        return None if -done.returncode in _SENT_BY_OTHERS else done.returncode

    return probe


# Every kind of kernel that uses AMX if the processor reports it, in sizes large enough for oneDNN to use it.
_PRODUCTS = """
import contextlib

import torch
from torch.nn import functional as F

def products(dtype):
    for size in (16, 64, 256):
        x = torch.ones(size, size, dtype=dtype)
        yield lambda: x @ x
        yield lambda: torch.bmm(x.expand(4, size, size), x.expand(4, size, size))
        yield lambda: F.linear(x, x.clone().requires_grad_(), x[0]).sum().backward()
    heads = torch.ones(1, 4, 128, 64, dtype=dtype)
    yield lambda: F.scaled_dot_product_attention(heads, heads, heads)
    yield lambda: F.conv2d(torch.ones(1, 16, 16, 16, dtype=dtype), torch.ones(32, 16, 3, 3, dtype=dtype))

for dtype in (torch.bfloat16, torch.float16):
    for product in products(dtype):
        with contextlib.suppress(RuntimeError):  # some releases of torch lack some of these kernels
            product()
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
