"""The `rankscope` command and its subcommands.

To add a subcommand, add a file to this folder with a function that has the name of the file. The subcommand has the
same name, without a trailing underscore: `import` is a Python keyword, so the file of this subcommand is `import_.py`.
Instead of a function, the file may have a `typer.Typer` with several commands, as `msprobe.py` has.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope.base.errors import FAILED, CommandError
from rankscope_contract import __version__

HELP = """Telemetry and time-series store for distributed PyTorch training.

[bold]Collect[/bold]: rankscope serve --store history
[bold]Train[/bold]:   RANKSCOPE_INGEST_URL=http://127.0.0.1:9470 torchrun … train.py
[bold]Query[/bold]:   rankscope summary --store history
         rankscope plot --store history
         rankscope sql --store history "select * from runs"

`rankscope demo` runs all of it in three minutes."""


def build() -> typer.Typer:
    """Return the typer application with all subcommands in this folder."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, command in _modules().items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _print_version(value: bool) -> None:
    if value:
        print(f"rankscope {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command `rankscope` itself.

    The subcommand `rankscope version` also prints the versions of the libraries.
    """


def subcommands() -> dict[str, Callable[..., None]]:
    """Return the functions of all subcommands, by name. The name of a command in a group is `<group> <command>`."""
    found: dict[str, Callable[..., None]] = {}
    for name, command in _modules().items():
        if isinstance(command, typer.Typer):
            found |= {f"{name} {own.name}": own.callback for own in command.registered_commands if own.callback}
        else:
            found[name] = command
    return found


def _modules() -> dict[str, Callable[..., None] | typer.Typer]:
    """Return the function of each file in this folder, or its group of commands, by name."""
    found = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        loaded = importlib.import_module(f"rankscope.commands.{module.name}")
        found[module.name.rstrip("_")] = getattr(loaded, module.name)
    return found


def _has_working_directory() -> bool:
    try:
        return bool(Path.cwd())
    except OSError:
        return False


@functools.cache
def command() -> Callable[..., Any]:
    """Return `build()` as a click command. To make it takes as long as many subcommands; a process makes it once."""
    return typer.main.get_command(build())


def main() -> None:
    """Run the `rankscope` command. An error is printed as one line on standard error, without a traceback."""
    try:
        command()(prog_name="rankscope")
    except CommandError as error:
        print(f"rankscope: {error}", file=sys.stderr)
        sys.exit(error.code)
    except (FileNotFoundError, PermissionError):
        if _has_working_directory():
            raise
        reason = (
            "the working directory was removed or cannot be read: change to another one, or give only absolute paths"
        )
        print(f"rankscope: {reason}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the pipe (head, less) has exited. Redirect stdout, or the interpreter reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
