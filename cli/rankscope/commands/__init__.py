"""The `rankscope` command and its subcommands.

To add a subcommand, add a file to this folder with a function that has the name of the file. The subcommand has the
same name, without a trailing underscore: `import` is a Python keyword, so the file of this subcommand is `import_.py`.
Instead of a function, the file may have a `typer.Typer` with several commands, as `msprobe.py` has.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from rankscope.shell.errors import FAILED, CommandError
from rankscope.shell.overview import HELP, command_files
from rankscope_contract.model.redaction import MAX_DOCUMENT, redacted_text

_UsageError: Any = typer.BadParameter.__base__  # of click, or of its copy in typer


class _Group(typer.core.TyperGroup):
    """The `rankscope` command. Secrets in the arguments that a usage error quotes are masked."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand of `ctx`."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.message = redacted_text(error.message, MAX_DOCUMENT)
            raise


def build(*names: str) -> typer.Typer:
    """Return the typer application with the subcommands `names`, or without names with all in this folder."""
    app = typer.Typer(
        cls=_Group,
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # an application with one command remains a group
    for name, command in _modules(names or command_files()).items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            # Only [bold] is markup; rich would remove the names of sections of configuration files, such as [notify].
            app.command(name, help=re.sub(r"\[(?!/?bold\])", r"\\[", inspect.getdoc(command) or ""))(command)
    return app


def subcommands() -> dict[str, Callable[..., None]]:
    """Return the functions of all subcommands, by name. The name of a command in a group is `<group> <command>`."""
    found: dict[str, Callable[..., None]] = {}
    for name, command in _modules(command_files()).items():
        if isinstance(command, typer.Typer):
            found |= {f"{name} {own.name}": own.callback for own in command.registered_commands if own.callback}
        else:
            found[name] = command
    return found


def _modules(names: Iterable[str]) -> dict[str, Callable[..., None] | typer.Typer]:
    """Return the function of each command in `names`, or its group of commands, by name."""
    found = {}
    for name in names:
        stem = command_files()[name].stem
        found[name] = getattr(importlib.import_module(f"rankscope.commands.{stem}"), stem)
    return found


@functools.cache
def command(*names: str) -> Callable[..., Any]:
    """Return `build(*names)` as a click command, which a process makes once."""
    return typer.main.get_command(build(*names))


def main() -> None:
    """Run the `rankscope` command. An error is printed as one line on standard error, without a traceback."""
    try:
        try:
            # The import of all subcommands takes longer than most of them: only the named one is imported.
            command(*command_files().keys() & sys.argv[1:2])(prog_name="rankscope")
        finally:
            sys.stdout.flush()
    except CommandError as error:
        print(f"rankscope: {error}", file=sys.stderr)
        sys.exit(error.code)
    except (FileNotFoundError, PermissionError):
        try:
            Path.cwd()
        except OSError:
            remedy = "change to another one, or give only absolute paths"
            print(f"rankscope: the working directory was removed or cannot be read: {remedy}", file=sys.stderr)
            sys.exit(FAILED)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename:
            raise
        # The reader of the pipe (head, less) has exited, or the disk is full. Redirect stdout, or the interpreter
        # reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            sys.exit(141)
        print(f"rankscope: cannot write standard output: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)
