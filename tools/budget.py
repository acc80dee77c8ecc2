"""The budget of the packages: their code lines, and the calls, functions and files of the actions of `call_paths`.

    python tools/budget.py [--lower]

Prints each number and its budget in `budget.json`. `--lower` writes the numbers that have fallen. To raise a budget,
edit the file in the commit that needs more, and give the reason in its message. Calls have room of 15 %, but not those
of the training thread: the numbers of polls, and of idle seconds, are not always the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent))

import call_paths
import structure

FILE: Final = Path(__file__).with_name("budget.json")
ROOM: Final = 1.15
NOTICEABLE: Final = 0.95
"""Below this share of its budget, a number should become the budget."""

Numbers = dict[str, int]  # by name, such as "step: files"


def code_lines() -> Numbers:
    """Return the code lines of each package, and of the templates, scripts and style sheets of the pages."""
    return {f"code lines: {name}": lines for name, lines in (structure.code_of() | structure.assets_of()).items()}


def paths(folder: Path) -> Numbers:
    """Return the calls, functions and files of each action. Its processes write to `folder`."""
    return {
        f"{action}: {what}": number
        for action, calls in call_paths.measure(folder).items()
        for what, number in call_paths.numbers(calls).items()
    }


def budget() -> Numbers:
    """Return the largest allowed numbers."""
    return dict(json.loads(FILE.read_text()))


def limit(name: str, allowed: int) -> int:
    """Return the largest number that is no error."""
    has_room = name.endswith(": calls") and not name.startswith(call_paths.TRAINING)
    return int(allowed * ROOM) if has_room else allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lower", action="store_true", help="write the numbers that have fallen")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = code_lines() | paths(Path(folder))
    allowed = budget() if FILE.exists() else found
    for name, number in found.items():
        print(f"{name:36} {number:6} of {allowed.get(name, number):6}")
    if given.lower:
        lowered = {name: min(number, allowed.get(name, number)) for name, number in found.items()}
        FILE.write_text(json.dumps(lowered, indent=2) + "\n")


if __name__ == "__main__":
    main()
