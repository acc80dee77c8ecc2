"""What is known of losses by their files is true, and is found out where it can be."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.query import file_facts
from rankscope_storage.query.loss_facts import LossFacts, find_loss_facts

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
def looked_at(tmp_path, connection):
    """Look at files with such rows."""

    def look(files: list[list[dict]], runs: set[str] | None) -> LossFacts:
        paths = []
        for rows in files:
            paths.append(str(tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"))
            table = pa.Table.from_pylist([{"name": "loss", "value": 1.0} | row for row in rows])
            columns = [name for name in dataset_schema("scalars").names if name in table.column_names]
            table = table.select(columns).cast(pa.schema([dataset_schema("scalars").field(name) for name in columns]))
            pq.write_table(table, paths[-1], row_group_size=4)
        return find_loss_facts(paths, runs, lambda question: connection.sql(question).to_arrow_table())

    return look


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(ROWS, min_size=1, max_size=12), max_size=3), st.sampled_from([None, {"r"}, {"r", "s"}, {"t"}]))
def test_losses_are_said_once_if_no_row_is_there_twice_and_no_two_files_meet(looked_at, files, runs):
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

    assert LossFacts(are_said_once=expected, are_of_attempt_0=attempts <= {0}) == looked_at(files, runs)


def test_a_range_within_a_range_is_seen_also_behind_another(looked_at):
    ranges = [(0, 100), (10, 20), (200, 300)]
    files = [[{"run": "r", "rank": 0, "step": step} for step in pair] for pair in ranges]

    assert not looked_at(files, None).are_said_once
    assert looked_at([files[0], files[2]], None).are_said_once


@pytest.mark.parametrize(("most_files", "most_bytes"), [(2, 1 << 30), (200, 1)])
def test_many_or_large_files_are_looked_at_in_several_goes(looked_at, monkeypatch, most_files, most_bytes):
    monkeypatch.setattr(file_facts, "_BATCH_FILES", most_files)
    monkeypatch.setattr(file_facts, "_BATCH_BYTES", most_bytes)
    goes, look = [], file_facts.ByFile._look_through
    monkeypatch.setattr(
        file_facts.ByFile, "_look_through", lambda self, files, ask: goes.append(len(files)) or look(self, files, ask)
    )
    files = [[{"run": "r", "rank": 0, "step": step}] for step in range(5)]

    assert LossFacts(are_said_once=True, are_of_attempt_0=True) == looked_at(files, None)
    assert goes == ([2, 2, 1] if most_files == 2 else [1] * 5)
    assert not looked_at([*files, files[0]], None).are_said_once
