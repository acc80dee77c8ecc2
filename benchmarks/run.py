"""Run every benchmark (or those named) in one go and print one table each.

    python benchmarks/run.py [NAME …]

A benchmark is a module of this folder with a docstring and a function `run() -> list[Row]`.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

from _rows import machine, print_rows

HERE = Path(__file__).parent


def main() -> int:
    known = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "run" and not path.stem.startswith("_"))
    chosen = sys.argv[1:] or known
    unknown = [name for name in chosen if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}: there are {', '.join(known)}", file=sys.stderr)
        return 2
    print(f"Machine: {machine()}")
    with tempfile.TemporaryDirectory(prefix="rankscope-records-") as folder:
        os.environ.setdefault("RANKSCOPE_SPOOL_DIR", folder)  # the default is a folder in the working directory
        for name in chosen:
            module = importlib.import_module(name)
            print_rows((module.__doc__ or name).splitlines()[0], module.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
