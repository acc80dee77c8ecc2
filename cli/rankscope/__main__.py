"""Entry point of the `rankscope` command and of `python -m rankscope`.

An installation for ranks only lacks the libraries of the command, so a missing library is reported with its remedy.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; if a library is missing, print the installation command and exit with 1."""
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
