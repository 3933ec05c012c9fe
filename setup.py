"""Builds the optimizer's C kernel with the package; pyproject.toml has all other settings.

ctypes loads the kernel, so one wheel serves every version of Python on a platform: its tag is py3-none-<platform>.
Without a C compiler one line says so, and the wheel has no kernel and the tag py3-none-any. library.py then compiles
the kernel at first use, or the optimizers do without.

Everything is built in a temporary folder: build/ may hold modules and kernels of earlier sources, and a wheel contains
every file of the folder in which it is built.
"""

import functools
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_py import build_py

NATIVE = Path("roundpipe/optim/native")
SOURCE = Path(__file__).parent / "src" / NATIVE
library = runpy.run_path(str(SOURCE / "library.py"))


class Kernel(NamedTuple):
    """The content of the compiled library, or why it could not be compiled."""

    content: bytes | None
    why_not: str


@functools.cache
def kernel() -> Kernel:
    with tempfile.TemporaryDirectory(prefix="roundpipe-kernel-") as folder:
        made = Path(folder) / library["built_name"]()
        try:
            library["compile_to"](made)
            return Kernel(made.read_bytes(), "")
        except (OSError, subprocess.SubprocessError) as error:
            return Kernel(None, " ".join(library["reason"](error).split()))


class DistributionWithKernel(Distribution):
    """Depends on the platform exactly if the kernel can be compiled."""

    def has_ext_modules(self) -> bool:
        return kernel().content is not None


class BuildInTemporaryFolder(build):
    """Builds in a fresh folder instead of build/, unless the command line names one."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self._folder = tempfile.TemporaryDirectory(prefix="roundpipe-build-")
        self.build_base = self._folder.name


class BuildWithKernel(build_py):
    """Puts the compiled kernel beside its source; for an editable install, in the source tree."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            for old in SOURCE.glob("_one_pass_*.so"):
                old.unlink()
        content, why_not = kernel()
        if content is None:
            sys.stderr.write(f"roundpipe: built as a pure wheel, without the optimizer's C kernel: {why_not}\n")
        else:
            self._kernel_file().write_bytes(content)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if kernel().content is None else [*outputs, str(self._kernel_file())]

    def _kernel_file(self) -> Path:
        folder = SOURCE if self.editable_mode else Path(self.build_lib) / NATIVE
        return folder / library["built_name"]()


class WheelForEveryPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    distclass=DistributionWithKernel,
    cmdclass={"build": BuildInTemporaryFolder, "build_py": BuildWithKernel, "bdist_wheel": WheelForEveryPython},
)
