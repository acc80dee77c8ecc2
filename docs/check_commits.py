"""Check the subjects of new commits: `python docs/check_commits.py`, part of `make lint`.

A subject is `area: imperative` with at most 72 characters; the area is a folder or `project`. Merge commits are not
checked, nor are the commits up to `BASE`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
BASE: Final = "61375647f282c07628763e0ba4ea921570e3803b"
SUBJECT: Final = re.compile(r"[a-z][a-z0-9_./-]*(?:, [a-z][a-z0-9_./-]*)*: [a-z0-9`\"].*[^.]")
MAX_CHARACTERS: Final = 72


def problem(subject: str) -> str | None:
    """Return the error in the subject of a commit, or None."""
    if len(subject) > MAX_CHARACTERS:
        return f"{len(subject)} characters, at most {MAX_CHARACTERS} are allowed"
    if SUBJECT.fullmatch(subject) is None:
        return "the form is 'area: imperative', without a capital letter after the colon and without a full stop"
    return None


def new_subjects(base: str = BASE) -> list[tuple[str, str]]:
    """Return hash and subject of each commit after `base`; an empty list if git cannot read the history."""
    listed = subprocess.run(  # noqa: S603 - fixed arguments
        ["git", "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"],  # noqa: S607 - git of the developer's PATH
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        print(f"commit subjects are not checked: {listed.stderr.strip()}")
        return []
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in listed.stdout.splitlines()]


def main() -> int:
    """Print each invalid subject with the reason, and return the exit status."""
    wrong = [(commit, subject, why) for commit, subject in new_subjects() if (why := problem(subject)) is not None]
    for commit, subject, why in wrong:
        print(f"{commit} {subject!r}: {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
