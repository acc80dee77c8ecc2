"""Each log of the table in `cases` becomes exactly the rows that are written there."""

from __future__ import annotations

import functools

import pytest
from tests.ingest.importers.cases import cases, results

CASES = cases()


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return a function that imports all logs of a format together, and returns their results by name."""

    @functools.cache
    def of(kind):
        return results([case for case in CASES if case.kind == kind], tmp_path_factory.mktemp(kind))

    return of


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_log_becomes_the_rows_of_its_case(imported, case):
    assert case.expected == imported(case.kind)[case.name]


def test_names_of_cases_are_unique():
    assert len(CASES) == len({case.name for case in CASES})
