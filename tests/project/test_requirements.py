"""Each number of the checklist has one row in `docs/requirements.md`, and each test that a page names exists."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "docs" / "requirements.md"
TRACED = (TRACE, ROOT / "docs" / "importing.md", ROOT / "docs" / "importing-training-logs.md")
LAST = {"S0": 18, "S1": 18, "S2": 14, "S3": 15, "S4": 15}  # Number of the last behaviour of each earlier tool

ROW = re.compile(r"^\| (?P<numbers>[^|]*\b(?:S\d-\d\d|contract \d)[^|]*) \|[^|]*\|(?P<tests>[^|]*)\|$", re.MULTILINE)


@cache
def source(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_each_requirement_has_one_row():
    numbers = Counter(found["numbers"] for found in ROW.finditer(TRACE.read_text(encoding="utf-8")))

    assert {f"{tool}-{number:02d}": 1 for tool, last in LAST.items() for number in range(1, last + 1)} == numbers


def test_number_of_behaviours_on_the_page_is_that_of_its_rows():
    assert f"Each of the {sum(LAST.values())} behaviours has a test." in TRACE.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", TRACED, ids=lambda page: page.stem)
def test_each_row_names_existing_tests(page):
    for found in ROW.finditer(page.read_text(encoding="utf-8")):
        named = re.findall(r"`(tests/[\w/]+\.(?:py|txt))::([^`]+)`", found["tests"])
        texts = {(file, name): f"def {name}(" if file.endswith(".py") else f"%% {name}" for file, name in named}

        assert named, found["numbers"]
        assert [] == [one for one, text in texts.items() if text not in source(one[0])], found["numbers"]
