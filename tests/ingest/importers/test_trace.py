"""Tests that a table under docs/ names an existing test for each numbered behaviour of the checklist about reading."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))

READING = {
    *(f"S0-{number:02d}" for number in (6, 7, 8, 9, 15, 17)),
    *(f"S1-{number:02d}" for number in (2, 8, 9, 10, 17, 18)),
    *(f"S3-{number:02d}" for number in (1, 2, 3, 4, 5, 8, 10, 11, 13, 15)),
    *(f"S4-{number:02d}" for number in (8, 9, 10)),
}
"""The numbers of behaviours of reading that a command, a page or a documented call provides.

The others are about command lines, figures, alerts and screens. S0-10 to S0-13, S0-16, S1-06 and S1-11 to S1-13 can be
computed from the store, but no command computes them yet.
"""

ROW = re.compile(r"^\| (?P<numbers>[^|]*\b(?:S\d-\d\d|contract \d)[^|]*) \|[^|]*\|(?P<tests>[^|]*)\|$", re.MULTILINE)
RANGE = re.compile(r"(S\d)-(\d\d) to S\d-(\d\d)")


def rows():
    return [(page, found["numbers"], found["tests"]) for page in PAGES for found in ROW.finditer(page.read_text())]


def numbers(text):
    ranged = {f"{seed}-{n:02d}" for seed, low, high in RANGE.findall(text) for n in range(int(low), int(high) + 1)}
    return ranged | set(re.findall(r"S\d-\d\d", text))


def test_every_checklist_number_has_a_row():
    traced = {number for _, text, _ in rows() for number in numbers(text)}

    assert set() == READING - traced


def test_every_row_names_an_existing_test():
    for page, text, tests in rows():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)

        assert named, f"{page.name}: {text}"
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page.name}: {file}::{test}"
