"""Many small logs that are stored with few commits, each as if it were imported alone."""

from __future__ import annotations

import json

import pytest
from tests.ingest.importers.test_msprobe import SINGLE

from rankscope_ingest import importers
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.importers import LogGroup, find_importer, import_records
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.errors import StoreError
from rankscope_storage.connection import connect

CONTENT = """\
SELECT run, attempt, name, step, count(*) AS n, min(value) AS value FROM scalars
WHERE run IN ('text', 'state', 'lines') GROUP BY ALL ORDER BY ALL"""


class Counting:
    """A writer that counts appends and refreshes, and fails from the append with the number `fails_at` on."""

    def __init__(self, writer, fails_at=None):
        self.writer, self.fails_at, self.appends = writer, fails_at, 0
        self.refreshes = 0

    def append(self, batch):
        self.appends += 1
        if self.fails_at is not None and self.appends >= self.fails_at:
            raise StoreError("disk full")
        return self.writer.append(batch)

    def watermark(self, incarnation, *, refresh=True):
        self.refreshes += refresh
        return self.writer.watermark(incarnation, refresh=refresh)


@pytest.fixture
def store(tmp_path):
    with (
        Store.open(tmp_path / "store", create=True).claim(owner="test") as writer,
        connect(tmp_path / "store") as connection,
    ):
        yield writer, connection


def lines(first, last, loss=0.0):
    return "".join(json.dumps({"step": step, "loss": loss + 1 / step}) + "\n" for step in range(first, last + 1))


def state(*losses):
    history = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    return json.dumps({"global_step": len(losses), "log_history": history})


def import_all(group, logs):
    """Import pairs of a path and a run as one group, and return the reports."""
    group.begin({run for _, run in logs})
    reports = [
        import_records(
            path,
            group,
            find_importer(path),
            run=run,
            known=group.known(run),
            is_live=group.is_live(run),
            stored=group.stored(run),
        )
        for path, run in logs
    ]
    group.flush()
    return reports


@pytest.fixture
def mixed(tmp_path):
    """Return logs of all kinds, of which several concern the same run."""
    texts = {
        "text/a.log": "".join(f" iteration {step}/ 40 | lm loss: 2.5 | grad norm: 1.0 |\n" for step in range(1, 6)),
        "text/b.log": "".join(f" iteration {step}/ 40 | lm loss: 2.0 | grad norm: 1.0 |\n" for step in range(1, 4)),
        "v0/trainer_state.json": state(3.0, 2.0, 1.0),
        "v1/trainer_state.json": state(3.0, 2.0, 1.5, 1.0),
        "v2/trainer_state.json": state(3.0, 2.0, 1.5, 1.0, 0.5),
        "a/lines.jsonl": lines(1, 5),
        "b/lines.jsonl": lines(1, 7),
        "c/lines.jsonl": lines(1, 5),
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    runs = {"text": "text", "v0": "state", "v1": "state", "v2": "state"}
    return [*((tmp_path / name, runs.get(name.partition("/")[0], "lines")) for name in texts), (SINGLE, "csv")]


def test_group_stores_the_same_as_single_imports(tmp_path, store, mixed):
    """Also the attempts, branches and copies that are recognized by the earlier logs of the same group."""
    writer, connection = store
    counting = Counting(writer)
    together = import_all(LogGroup(counting, connection), mixed)
    with Store.open(tmp_path / "alone", create=True).claim(owner="test") as other, connect(tmp_path / "alone") as alone:
        group = LogGroup(other, alone)
        single = [report for log in mixed for report in import_all(group, [log])]
        expected = alone.query(CONTENT).to_pylist()

    assert expected == connection.query(CONTENT).to_pylist()
    assert single == together
    assert {"text", "state", "lines", "csv"} == {row["run"] for row in connection.query("FROM runs").to_pylist()}
    assert (1, 1) == (counting.appends, counting.refreshes)


def test_rows_that_another_process_stores_meanwhile_are_not_stored_twice(tmp_path, store):
    """The group does not read the watermarks of the store again before its commit."""
    writer, connection = store
    (tmp_path / "a.jsonl").write_text(lines(1, 5))
    (tmp_path / "b.jsonl").write_text(lines(1, 5))
    logs = [(tmp_path / "a.jsonl", "a"), (tmp_path / "b.jsonl", "b")]
    group = LogGroup(writer, connection)
    group.begin({"a", "b"})
    with Store.open(tmp_path / "store").claim("1/2", owner="another import") as other:
        for number, (path, run) in enumerate(logs):
            import_records(path, group, find_importer(path), run=run, known=group.known(run))
            if number == 0:
                import_all(LogGroup(other, connection), logs)
        group.flush()

    assert [("a", 5), ("b", 5)] == [
        tuple(row.values())
        for row in connection.query("SELECT run, count(*) AS n FROM scalars GROUP BY 1 ORDER BY 1").to_pylist()
    ]


def test_failed_commit_neither_loses_nor_doubles_rows(tmp_path, store, monkeypatch):
    """The store fails between two logs. The next import stores the logs of which nothing is stored."""
    monkeypatch.setattr(importers, "GROUP_ROWS", 12)
    writer, connection = store
    logs = [(tmp_path / f"run{number}.jsonl", f"run{number}") for number in range(6)]
    for number, (path, _) in enumerate(logs):
        path.write_text(lines(1, 5, loss=number))
    with pytest.raises(StoreError):
        import_all(LogGroup(Counting(writer, fails_at=2), connection), logs)
    first = connection.query("SELECT run, count(*) AS n FROM scalars GROUP BY 1 ORDER BY 1").to_pylist()
    reports = import_all(LogGroup(writer, connection), logs)
    rows = connection.query(
        "SELECT run, count(*) AS n, count(DISTINCT seq) AS seqs FROM scalars GROUP BY 1"
    ).to_pylist()
    events = connection.query("SELECT run, count(*) AS n FROM events WHERE type = 'import' GROUP BY 1").to_pylist()

    assert [{"run": run, "n": 5} for _, run in logs[:2]] == first
    assert [0, 0, 5, 5, 5, 5] == [report.rows_stored for report in reports]
    assert {(run, 5, 5) for _, run in logs} == {tuple(row.values()) for row in rows}
    assert {(run, 1) for _, run in logs} == {tuple(row.values()) for row in events}


def test_rows_that_the_store_refuses_do_not_stop_other_logs(tmp_path, store):
    writer, connection = store
    (tmp_path / "good.jsonl").write_text(lines(1, 5))
    group = LogGroup(writer, connection)
    group.begin({"good", "bad"})
    unnamed = rows_table("scalars", [{"run": "bad", "attempt": 0, "incarnation": "i", "seq": 0, "value": 1.0}])
    with pytest.raises(IngestError, match=r"scalars.name is null in 1 rows"):
        group.append(Batch(tables={"scalars": unnamed}, watermarks={"i": 0}))
    import_all(group, [(tmp_path / "good.jsonl", "good")])

    assert [{"run": "good"}] == connection.query("SELECT DISTINCT run FROM scalars").to_pylist()
