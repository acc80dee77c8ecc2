"""Entry point of the `rankscope` command and of `python -m rankscope`.

An installation that is only for ranks lacks the libraries of this command. The help and the version are printed
without them, and a missing library is reported with the command that installs it.
"""

from __future__ import annotations

import os
import sys

from rankscope.shell.overview import need, overview
from rankscope.shell.streams import prepare_streams
from rankscope_contract import __version__


def main() -> None:
    """Run the `rankscope` command; if a library is missing, print the installation command and exit with status 1."""
    arguments = sys.argv[1:]
    prepare_streams(is_service=arguments[:1] in (["serve"], ["up"], ["view"], ["watch"]))
    if arguments in ([], ["--help"], ["-h"], ["--version"]) and "_RANKSCOPE_COMPLETE" not in os.environ:
        try:
            print(f"rankscope {__version__}" if arguments == ["--version"] else overview()[:-1], flush=True)
        except BrokenPipeError:  # the interpreter would report it again at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        if arguments[:1] == ["serve"]:
            from rankscope_ingest.base.memory import share_allocator

            share_allocator()
        from rankscope.commands import main as run

        run()
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("rankscope"):
            raise
        print(f"rankscope: {need(arguments[0], missing.name.partition('.')[0])}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
