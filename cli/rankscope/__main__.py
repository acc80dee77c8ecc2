"""Entry point of the `rankscope` command and of `python -m rankscope`.

An installation that is only for ranks lacks the libraries of this command. A missing library is therefore reported with
the command that installs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as a timer or a daemon may start a command.

    Otherwise a file of a store gets the number of the closed stream, and output is written into this file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open until the process exits
            os.set_inheritable(stream.fileno(), True)  # the processes that a command starts have the same streams
            setattr(sys, name, stream)


def main() -> None:
    """Run the `rankscope` command; if a library is missing, print the installation command and exit with status 1."""
    open_closed_streams()
    try:
        if sys.argv[1:2] == ["serve"]:
            from rankscope_ingest.base.memory import share_allocator

            share_allocator()
        from rankscope.commands import main as run

        run()
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("rankscope"):
            raise
        remedy = "run pip install '.[all]' in a checkout of Rankscope"
        message = f"rankscope: the command needs {missing.name}, which is not installed: {remedy}"
        print(message, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
