"""Build hook of hatchling: compiles the kernel for statistics, if there is a C compiler.

Without a compiler, or if it fails, the package is complete without the compiled kernel, and torch operations are used.
`python hatch_build.py` compiles the kernel for a source tree that is used without an installation.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # the file is run, or imported by a test
    BuildHookInterface = object

FOLDER: Final = Path(__file__).resolve().parent / "exporter" / "rankscope_exporter" / "measure" / "kernels"
SOURCE: Final = FOLDER / "kernel.c"
LIBRARY: Final = "_kernel.so"

# With contractions, the sums would depend on the processor.
FLAGS: Final = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-shared")


def compiler() -> list[str]:
    """Return the command of the C compiler: the environment variable CC, or cc."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def source_hash() -> str:
    """Return the hash of the source, which the compiled kernel contains."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def compile_if_needed(target: Path = FOLDER / LIBRARY) -> None:
    """Compile the kernel of this source tree, unless it is compiled already."""
    if not target.is_file() or source_hash().encode() not in target.read_bytes():
        compile_kernel(target)


def compile_kernel(target: Path, *flags: str) -> None:
    """Compile the kernel to the file `target`. Raises OSError or CalledProcessError."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="_kernel.") as folder:
        made = Path(folder) / target.name
        command = [*compiler(), *FLAGS, *flags, f'-DSOURCE="{source_hash()}"', str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(target)  # a process that has loaded the old file keeps it


def wheel_tag() -> str:
    """Return the tag of a wheel with the compiled kernel.

    It uses functions of the C library only that glibc 2.17 has, so that the wheel runs wherever torch does.
    """
    if platform.system() != "Linux":
        return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    target = subprocess.run([*compiler(), "-dumpmachine"], check=True, capture_output=True, text=True).stdout.strip()
    machine = target.split("-", maxsplit=1)[0]  # a cross compiler builds for another machine
    return f"py3-none-{'linux' if 'musl' in target else 'manylinux_2_17'}_{machine}"


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]  # hatchling may be absent
    """Adds the compiled kernel to a wheel, or to the source tree of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel. `version` is "standard" or "editable"."""
        self.temporary = tempfile.TemporaryDirectory()  # hatchling reads it after this method
        library = (FOLDER if version == "editable" else Path(self.temporary.name)) / LIBRARY
        try:
            compile_kernel(library)
            tag = wheel_tag()
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"{SOURCE.name} was not compiled; statistics will use torch operations: {error}")
            return
        if version != "editable":
            build_data.update(pure_python=False, tag=tag)
            build_data["force_include"][str(library)] = f"rankscope_exporter/measure/kernels/{LIBRARY}"


if __name__ == "__main__":
    compile_if_needed()
