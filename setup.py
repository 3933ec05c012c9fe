"""Builds the optimizer's C kernel with the package; pyproject.toml has all other settings.

Without a C compiler the package is built without the kernel. library.py then compiles it at first use, or falls back.
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
