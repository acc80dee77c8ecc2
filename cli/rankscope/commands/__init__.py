"""The `rankscope` command. A subcommand is added by adding a file to `commands/`.

The file holds one function of the file's own name (a trailing underscore is left out, since `import` is a Python word).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable

import typer

from rankscope.base.errors import CommandError

HELP = """Telemetry and time-series store for distributed PyTorch training.

[bold]Collect[/bold]: rankscope serve --store history
[bold]Train[/bold]:   RANKSCOPE_INGEST_URL=http://127.0.0.1:9470 torchrun … train.py
[bold]Ask[/bold]:     rankscope summary --store history
         rankscope sql --store history "select * from runs"

`rankscope demo` shows all of it in three minutes."""


def build() -> typer.Typer:
    """Return the command with every subcommand found in `rankscope.commands`."""
    app = typer.Typer(
        help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )
    app.callback()(lambda: None)  # keeps a lone subcommand a subcommand
    for name, function in subcommands().items():
        app.command(name)(function)
    return app


def subcommands() -> dict[str, Callable[..., None]]:
    """Return the function behind every subcommand by its name."""
    found = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        loaded = importlib.import_module(f"rankscope.commands.{module.name}")
        found[module.name.rstrip("_")] = getattr(loaded, module.name)
    return found


def main() -> None:
    """Run the command; what goes wrong is one line on standard error, never a traceback."""
    try:
        build()(prog_name="rankscope")
    except CommandError as error:
        print(f"rankscope: {error}", file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has left: nothing more to say, and no complaint at interpreter exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
