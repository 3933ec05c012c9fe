"""Builds the optimizer's kernel with the package; everything else stands in pyproject.toml.

Where there is no C compiler the package is made without it, and library.py compiles or falls back when asked.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup

NATIVE = "src/roundpipe/optim/native"
library = runpy.run_path(str(Path(__file__).parent / NATIVE / "library.py"))
kernel = Extension(
    "roundpipe.optim.native." + library["built_name"](),
    [f"{NATIVE}/one_pass_adam.c"],
    depends=[f"{NATIVE}/adam_block.h"],
    extra_compile_args=list(library["COMPILE_FLAGS"]),
    extra_link_args=["-pthread"],
    libraries=["m"],
    optional=True,
)

setup(ext_modules=[kernel])
