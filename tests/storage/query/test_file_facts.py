"""Facts about losses per file are correct, and complete where they can be."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.query import file_facts
from rankscope_storage.query.file_facts import LossFacts, find_loss_facts

ROWS = st.fixed_dictionaries(
    {
        "run": st.sampled_from(["r", "r", "s"]),
        "name": st.sampled_from(["loss", "loss", "loss", "lr"]),
        "labels": st.sampled_from([None, "{}"]),
        "attempt": st.sampled_from([None, 0, 1]),
        "rank": st.sampled_from([None, 0, 1]),
        "micro_step": st.sampled_from([None, 0, 1]),
        "step": st.none() | st.integers(-5, 30),
        "value": st.sampled_from([None, 1.0, float("nan")]),
    }
)


@pytest.fixture
def facts_of(tmp_path, connection):
    """Return a function that finds the facts about files with the given rows."""

    def read(files: list[list[dict]], runs: set[str] | None) -> LossFacts:
        paths = []
        for rows in files:
            paths.append(str(tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"))
            table = pa.Table.from_pylist([{"name": "loss", "value": 1.0} | row for row in rows])
            columns = [name for name in dataset_schema("scalars").names if name in table.column_names]
            table = table.select(columns).cast(pa.schema([dataset_schema("scalars").field(name) for name in columns]))
            pq.write_table(table, paths[-1], row_group_size=4)
        return find_loss_facts(paths, runs, lambda question: connection.sql(question).to_arrow_table())

    return read


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(ROWS, min_size=1, max_size=12), max_size=3), st.sampled_from([None, {"r"}, {"r", "s"}, {"t"}]))
def test_losses_are_logged_once_without_repeated_rows_and_overlaps(facts_of, files, runs):
    said, ranges, attempts = Counter(), defaultdict(list), set()
    for rows in files:
        steps = defaultdict(list)
        for row in rows:
            counts = row["name"] == "loss" and row["step"] is not None and row["value"] is not None
            if counts and (runs is None or row["run"] in runs):
                series = row["run"], row["labels"], row["attempt"] or 0, row["rank"]
                said[*series, row["micro_step"], row["step"]] += 1
                steps[series].append(row["step"])
                attempts.add(row["attempt"] or 0)
        for series, own in steps.items():
            ranges[series].append((min(own), max(own)))
    meet = any(last >= first for own in ranges.values() for (_, last), (first, _) in pairwise(sorted(own)))
    expected = max(said.values(), default=1) == 1 and not meet

    assert LossFacts(are_logged_once=expected, are_of_attempt_0=attempts <= {0}) == facts_of(files, runs)


def test_range_inside_of_another_range_overlaps(facts_of):
    ranges = [(0, 100), (10, 20), (200, 300)]
    files = [[{"run": "r", "rank": 0, "step": step} for step in pair] for pair in ranges]

    assert not facts_of(files, None).are_logged_once
    assert facts_of([files[0], files[2]], None).are_logged_once


@pytest.mark.parametrize(("most_files", "most_bytes"), [(2, 1 << 30), (200, 1)])
def test_many_or_large_files_are_read_in_several_queries(facts_of, monkeypatch, most_files, most_bytes):
    monkeypatch.setattr(file_facts, "_BATCH_FILES", most_files)
    monkeypatch.setattr(file_facts, "_BATCH_BYTES", most_bytes)
    queries, read = [], file_facts.FileFact._read
    monkeypatch.setattr(
        file_facts.FileFact, "_read", lambda self, files, ask: queries.append(len(files)) or read(self, files, ask)
    )
    files = [[{"run": "r", "rank": 0, "step": step}] for step in range(5)]

    assert LossFacts(are_logged_once=True, are_of_attempt_0=True) == facts_of(files, None)
    assert queries == ([2, 2, 1] if most_files == 2 else [1] * 5)
    assert not facts_of([*files, files[0]], None).are_logged_once
