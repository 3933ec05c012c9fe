"""Tries whether torch's half-precision products work on this processor, and with which instruction sets.

Some virtual machines report AMX but do not allow it: the first bfloat16 product dies with SIGILL. A child process tries
such products, because the signal kills the process. The levels of ONEDNN_MAX_CPU_ISA limit the instructions in use.

Imports the standard library alone, and tools/cpu_canary.py loads this file by its path: the Makefile needs it before
the package can be imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

VARIABLE = "ONEDNN_MAX_CPU_ISA"
VARIABLES = (VARIABLE, "DNNL_MAX_CPU_ISA")  # oneDNN reads either name
LEVELS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Probe = Callable[[str | None], int | None]
"""Runs the products with a level, or with none. Returns the exit status (negative: a signal), None if unknown."""


class Survival(NamedTuple):
    """What the probes have shown. Both flags are False if a probe did not finish: then nothing is known."""

    level: str | None  # the highest level that works; None if no level is needed or none was found
    is_certain: bool
    always_crashes: bool = False


def level_in_the_environment() -> str | None:
    """The level that the user has set; None if there is none."""
    return next((level for name in VARIABLES if (level := os.environ.get(name))), None)


def survived(probe: Probe) -> Survival:
    """Try all instructions, then the levels from the highest to the lowest, until the products work."""
    for level in (None, *LEVELS):
        status = probe(level)
        if status is None:
            return Survival(None, is_certain=False)
        if status >= 0:
            return Survival(level, is_certain=True)
    return Survival(None, is_certain=False, always_crashes=True)


def in_a_child(script: Path | None = None, timeout_s: float = 300.0) -> Probe:
    """A probe that runs the products, or a script instead, in a child process."""
    command = [sys.executable, "-c", PRODUCTS] if script is None else [sys.executable, str(script)]

    def probe(level: str | None) -> int | None:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        if level is not None:
            environment[VARIABLE] = level
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return None
        return None if -done.returncode in _SENT_BY_OTHERS else done.returncode

    return probe


# Every kind of kernel that uses AMX if the processor reports it, in sizes large enough for oneDNN to use it.
PRODUCTS = """
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
