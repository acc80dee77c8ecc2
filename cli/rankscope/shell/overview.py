"""The help of `rankscope` itself, and the extras that each command needs, without any library.

Every installation prints this help in a fraction of the time that the import of the libraries takes.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HELP: Final = """Telemetry and time-series store for distributed PyTorch training.

Collect: rankscope serve --store history
Train:   RANKSCOPE_INGEST_URL=http://127.0.0.1:9470 torchrun … train.py
Query:   rankscope summary --store history
         rankscope plot --store history
         rankscope sql --store history "select * from runs"

`rankscope demo` runs all of it in three minutes."""

MODULES: Final = {
    "cli": ("typer", "rich"),
    "store": ("duckdb", "deltalake", "jinja2", "pytz"),
    "service": ("aiohttp", "apprise", "pydantic", "tenacity"),
    "plot": ("matplotlib",),
    "boards": ("grafana_client", "yaml"),
    "ssh": ("asyncssh",),
    "tensorboard": ("google",),
}
"""Modules that each extra installs."""

USUAL: Final = ("cli", "store", "service")
NEEDED: Final = {
    "compare": (*USUAL, "plot"),
    "dashboards": (*USUAL, "boards"),
    "plot": (*USUAL, "plot"),
    "version": ("cli",),
}
_OPTIONS: Final = {
    "--version": "Print the version and exit. `rankscope version` also prints those of the libraries.",
    "--install-completion": "Install the completion of commands for the current shell.",
    "--show-completion": "Print the completion for the current shell, to copy it.",
    "-h, --help": "Print this help and exit.",
}
_INDENT: Final = 24


@functools.cache
def command_files() -> dict[str, Path]:
    """Return the file of each command, by name. `import` is a keyword of Python: its file is `import_.py`."""
    files = sorted((Path(__file__).parents[1] / "commands").glob("[!_]*.py"))
    return {file.stem.rstrip("_"): file for file in files}


def missing_extras(command: str) -> list[str]:
    """Return the extras that `command` needs and that are not installed."""
    return [extra for extra in NEEDED.get(command, USUAL) if not all(map(importlib.util.find_spec, MODULES[extra]))]


def install_line(extras: Sequence[str]) -> str:
    """Return the command that installs `extras`."""
    names = ",".join(extras)
    return f"pip install 'rankscope[{names}]', or pip install '.[{names}]' in a checkout"


def need(command: str, module: str) -> str:
    """Return the error message for a `command` that needs a `module` which is not installed."""
    extras = missing_extras(command) or [extra for extra, names in MODULES.items() if module in names] or ["all"]
    return f"`rankscope {command}` needs {module}, which is not installed: {install_line(extras)}"


def overview() -> str:
    """Return the help of `rankscope`: its options, and each command with the extras that it needs but lacks."""
    lines = ["Usage: rankscope [OPTIONS] COMMAND [ARGS]...", "", HELP, "", "Options:"]
    lines += [_row(name, text) for name, text in _OPTIONS.items()]
    lines += ["", "Commands, each with the option --help:"]
    needed: dict[str, None] = {}
    for name, file in command_files().items():
        missing = missing_extras(name)
        needed |= dict.fromkeys(missing)
        lines.append(_row(name, _purpose(file) + (f" Needs {', '.join(missing)}." if missing else "")))
    if needed:
        lines += ["", f"To install the missing extras: {install_line(list(needed))}"]
    return "\n".join([*lines, ""])


def _purpose(file: Path) -> str:
    """Return the purpose of a command from the docstring of its file, "`rankscope NAME`: purpose."."""
    text = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return text.partition("`: ")[2]


def _row(name: str, text: str) -> str:
    width = max(shutil.get_terminal_size().columns, 60)
    return textwrap.fill(
        text, width, initial_indent=f"  {name}".ljust(_INDENT), subsequent_indent=" " * _INDENT, break_on_hyphens=False
    )
