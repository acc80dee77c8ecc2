"""Where the `rankscope` command and `python -m rankscope` begin. A rank's install lacks what the command needs."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; say what to install where a library is missing."""
    try:
        if sys.argv[1:2] == ["serve"]:
            from rankscope_ingest.allocator import share_allocator

            share_allocator()
        from rankscope.commands import main as run

        run()
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("rankscope"):
            raise
        message = f"rankscope: the command needs {missing.name}, which training does not: pip install 'rankscope[all]'"
        print(message, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
