"""Entry point of the `rankscope` command and of `python -m rankscope`.

An installation that is only for ranks lacks the libraries of this command. A missing library is therefore reported with
the command that installs it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `rankscope` command; if a library is missing, print the installation command and exit with status 1."""
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
