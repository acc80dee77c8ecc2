"""Import of logs into runs of which ranks have reported: nothing of the live data changes."""

import datetime as dt
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.ingest.importers.conftest import Made
from tests.properties import few

from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.importers import (
    ImportReport,
    find_importer,
    import_records,
    is_live,
    known_imports,
    replaceable,
)
from rankscope_ingest.importers.common.importer import block_of
from rankscope_storage.api import summaries
from rankscope_storage.api.store import Batch
from rankscope_storage.connection import Connection
from rankscope_storage.writer.writer import Writer

START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
IMPORTED = {"imported_from": "logs/metrics.jsonl"}
ENDED = {"state": "completed", "reason": "exit 0", "started_at": START, "ended_at": START + dt.timedelta(minutes=5)}
PLAN = {"planned_steps": 20, "last_step": 20, "world_size": 2, "config": '{"lr": 0.1}'}
RUN = {"run": "r", "attempt": 0, "source_kind": "live", "ts": START, **ENDED, **PLAN}


class LiveStore:
    """A store with one live run of two ranks, whose loss is the step, and the methods of the command `import`."""

    def __init__(self, folder: Path, writer: Writer, connection: Connection) -> None:
        self.folder, self.writer, self.connection = folder, writer, connection

    def report(self, attempt: int = 0) -> None:
        """Store the run, and 20 steps of both ranks in `attempt`."""
        scalars = [
            {"run": "r", "attempt": attempt, "rank": rank, "incarnation": f"process-{attempt}-{rank}", "seq": step}
            | {"step": step, "ts": START + dt.timedelta(seconds=step), "name": name, "value": value}
            for rank in range(2)
            for step in range(1, 21)
            for name, value in (("loss", float(step)), ("step_seconds", 1.0), ("tokens_per_second", 100.0))
        ]
        tables = {
            name: rows_table(name, [RUN | {"attempt": attempt, "ordinal": attempt}]) for name in ("runs", "attempts")
        }
        marks = {f"process-{attempt}-{rank}": 20 for rank in range(2)}
        self.writer.append(Batch(tables={**tables, "scalars": rows_table("scalars", scalars)}, watermarks=marks))

    def log(self, first: int, last: int) -> Path:
        """Write a log with loss 100 and further facts about the run."""
        path = self.folder / "logs" / "metrics.jsonl"
        path.parent.mkdir(exist_ok=True)
        row = {"loss": 100.0, "tokens_per_second": 1.0, "total_steps": 999, "timer/io": 0.5}
        rows = [{"step": step, **row} for step in range(first, last + 1)]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    def import_log(self, path: Path, importer: Any = None) -> ImportReport:
        known, live = known_imports(self.connection, "r"), is_live(self.connection, "r")
        importer = importer or find_importer(path)
        return import_records(path, self.writer, importer, run="r", known=known, is_live=live)

    def query(self, query: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.connection.query(query).to_pylist()
        return rows

    def facts(self) -> dict[str, Any]:
        """Return everything that commands and views report about the run, apart from the stored rows."""
        summary = asdict(summaries.summary(self.connection, "r"))
        return {name: value for name, value in summary.items() if name not in ("rows", "bytes_on_disk")} | {
            "list": [row | {"last_seen_at": 0} for row in summaries.runs(self.connection).to_pylist()],
            "runs": self.query("FROM runs"),
            "attempts": self.query("FROM attempts ORDER BY attempt"),
            "curve": self.query("FROM loss_curve ORDER BY step"),
            "default": self.query("FROM scalar_curve('r') ORDER BY step"),
            "eta": self.query("FROM run_eta"),
            "goodput": self.query("FROM goodput"),
        }


@pytest.fixture
def store(tmp_path: Path, opened: tuple[Writer, Connection]) -> LiveStore:
    return LiveStore(tmp_path, *opened)


@pytest.mark.usual(1)
@pytest.mark.parametrize("steps", few(1, [[10, 500], [1, 20], [1, 3]]))
@pytest.mark.parametrize("attempts", [1, 2])
def test_log_changes_no_fact_about_a_live_run(store: LiveStore, steps: list[int], attempts: int) -> None:
    for attempt in range(attempts):
        store.report(attempt)
    before = store.facts()
    report = store.import_log(store.log(*steps))

    assert before == store.facts()
    assert "completed" == before["state"]
    assert report.rows_stored > 0


def test_log_of_a_live_run_is_a_source_of_its_own(store: LiveStore) -> None:
    store.report()
    report = store.import_log(store.log(1, 20))
    labels = json.dumps(IMPORTED, separators=(",", ":"))
    found = store.query("SELECT labels, avg(value) AS mean FROM scalar_history WHERE name = 'loss' GROUP BY labels")
    drawn = store.query(f"SELECT avg(mean) AS mean FROM scalar_curve('r', of_labels := '{labels}')")

    assert {None: 10.5, labels: 100.0} == {row["labels"]: row["mean"] for row in found}
    assert [{"mean": 100.0}] == drawn
    assert IMPORTED["imported_from"] == report.imported_from


def test_grown_and_moved_log_of_a_live_run_keeps_its_label(store: LiveStore) -> None:
    store.report()
    store.import_log(store.log(1, 10))
    moved = store.log(1, 20).rename(store.folder / "metrics.1.jsonl")
    report = store.import_log(moved)

    assert (True, IMPORTED["imported_from"]) == (report.is_known, report.imported_from)
    assert [{"steps": 20}] == store.query("SELECT count(*) AS steps FROM scalars WHERE name = 'loss' AND value = 100")


def test_tensor_statistics_of_a_log_do_not_enter_a_live_run(store: LiveStore) -> None:
    blocks = (
        block_of("tensor_stats", [{"step": 1, "kind": "grad_reduced", "tensor": "w", "norm": 1.0}]),
        block_of("scalars", [{"step": 1, "name": "x", "value": 1.0}]),
    )
    store.report()
    report = store.import_log(store.log(1, 1), Made(*blocks))

    assert (1, 1) == (report.left_out, report.rows_stored)
    assert [] == store.query("FROM tensor_stats")


def test_run_of_logs_only_is_not_live(store: LiveStore) -> None:
    store.import_log(store.log(1, 20))
    report = store.import_log(store.log(1, 25))

    assert report.imported_from is None
    assert [{"state": "stopped", "last_step": 25}] == store.query("SELECT state, last_step FROM runs")


@pytest.mark.parametrize("is_first", [True, False])
def test_new_import_of_a_log_replaces_no_row_of_a_live_run(store: LiveStore, is_first: bool) -> None:
    """Also if the log was imported before the ranks reported."""
    path = store.log(1, 20)
    if is_first:
        store.import_log(path)
    store.report()
    if not is_first:
        store.import_log(path)
    known = known_imports(store.connection, "r")
    rows = replaceable(path, "r", find_importer(path), known, None, is_live=is_live(store.connection, "r"))

    assert frozenset({known[0].incarnation}) == rows.incarnations
    assert frozenset() == rows.attempts
