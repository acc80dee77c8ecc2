"""Tests of the runner: exactly-once storage, recognition after a rotation, attempts, anomaly rules."""

from __future__ import annotations

import json
import math
import os

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_contract.rules.curve import SeriesEvaluator, evaluate
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_ingest.importers import (
    Faults,
    ImportedBlock,
    ImportedRecord,
    ImportedRun,
    find_importer,
    import_records,
    known_imports,
    run_name,
)
from rankscope_ingest.importers.common.importer import Detection
from rankscope_ingest.importers.common.log_identity import End, KnownImport
from rankscope_ingest.importers.common.numbering import Numbering
from rankscope_ingest.importers.common.rules import RuleEvaluator
from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import StoreError
from rankscope_storage.connection import connect


def rows(first, last, *, minute=0, rank=None, loss="2.5"):
    """Return Megatron rows of the steps from `first` to `last`, one per second."""
    prefix = "" if rank is None else f"[default{rank}]: "
    return "".join(
        f"{prefix}[2025-02-28 16:{minute:02d}:{step % 60:02d}] iteration {step}/ 1000 | "
        f"lm loss: {loss} | grad norm: 1.0 |\n"
        for step in range(first, last + 1)
    )


@pytest.fixture
def importing(tmp_path):
    """Return a function that imports a log as the command does, and one that queries the store."""
    with (
        Store.open(tmp_path / "store", create=True).claim(owner="test") as writer,
        connect(tmp_path / "store") as connection,
    ):

        def import_log(path, run="r", importer=None, **more):
            known = known_imports(connection, run)
            return import_records(path, writer, importer or find_importer(path), run=run, known=known, **more)

        def query(sql):
            return connection.query(sql).to_pylist()

        yield import_log, query


def losses(query):
    return [
        (row["attempt"], row["step"])
        for row in query("SELECT attempt, step FROM scalars WHERE name = 'loss' ORDER BY attempt, step")
    ]


def test_grown_log_adds_new_rows_and_an_unchanged_log_none(tmp_path, importing):
    """S0-06, contract 2."""
    import_log, query = importing
    log = tmp_path / "train.log"
    log.write_text(rows(1, 20))
    first = import_log(log)
    log.write_text(rows(1, 30))
    grown, unchanged = import_log(log), import_log(log)

    assert [(40, False), (20, True), (0, True)] == [
        (one.rows_stored, one.is_known) for one in (first, grown, unchanged)
    ]
    assert [(0, step) for step in range(1, 31)] == losses(query)
    assert [20, 30] == [
        json.loads(row["details"])["records"]
        for row in query("SELECT details FROM events WHERE type = 'import' ORDER BY ordinal")
    ]
    assert [{"last_step": 30, "state": "stopped"}] == query("SELECT last_step, state FROM runs")


@pytest.mark.parametrize("old_first", [True, False])
def test_rotated_log_is_recognized_and_the_new_log_continues_it(tmp_path, importing, old_first):
    """S0-06: train.log becomes train.log.1, and another log gets the name train.log."""
    import_log, query = importing
    log, old = tmp_path / "train.log", tmp_path / "train.log.1"
    log.write_text("launching\n" + rows(1, 20))
    import_log(log)
    log.rename(old)
    with old.open("a") as file:
        file.write(rows(21, 22))
    log.write_text("launching\n" + rows(23, 40, minute=1))
    files = (old, log) if old_first else (log, old)
    reports = {path: import_log(path) for path in files}

    assert (True, 4) == (reports[old].is_known, reports[old].rows_stored)
    assert (False, not old_first, 36) == (
        reports[log].is_known,
        reports[log].is_replacement,
        reports[log].rows_stored,
    )
    assert [(0, step) for step in range(1, 41)] == losses(query)
    assert [0, 0] == [import_log(path).rows_stored for path in files]


def test_log_rewritten_after_truncation_is_another_log(tmp_path, importing):
    """S0-06: copytruncate empties the file. Its new rows are stored although there are fewer of them."""
    import_log, query = importing
    log = tmp_path / "train.log"
    log.write_text("launching\n" + rows(1, 40))
    import_log(log)
    log.write_text("launching\n" + rows(41, 45, minute=1))
    replaced = import_log(log)
    log.write_text("launching\n" + rows(41, 60, minute=1))
    grown = import_log(log)

    assert (True, 10, 30) == (replaced.is_replacement, replaced.rows_stored, grown.rows_stored)
    assert [(0, step) for step in range(1, 61)] == losses(query)


def test_beginning_of_an_imported_log_adds_nothing(tmp_path, importing):
    import_log, query = importing
    log = tmp_path / "train.log"
    log.write_text(rows(1, 200))
    import_log(log)
    log.write_text(rows(1, 100))

    assert 0 == import_log(log).rows_stored
    assert 200 == len(losses(query))


def test_restart_in_another_file_is_the_next_attempt(tmp_path, importing):
    """S0-09, S4-08: steps that begin again in a later log belong to another attempt of the same run."""
    import_log, query = importing
    for name, text in (("a.log", rows(1, 20)), ("b.log", rows(11, 30, minute=5)), ("c.log", rows(31, 35, minute=9))):
        (tmp_path / name).write_text(text)
        import_log(tmp_path / name)

    assert [(0, s) for s in range(1, 21)] + [(1, s) for s in range(11, 36)] == losses(query)
    assert [(0, 20), (1, 35)] == [
        (row["attempt"], row["last_step"]) for row in query("SELECT attempt, last_step FROM attempts ORDER BY attempt")
    ]
    assert [{"attempt": 1, "last_step": 35}] == query("SELECT attempt, last_step FROM runs")
    assert [0, 0, 0] == [import_log(tmp_path / name).rows_stored for name in ("b.log", "a.log", "c.log")]


def test_log_of_another_node_at_the_same_time_is_no_restart(tmp_path, importing):
    import_log, query = importing
    for node in ("node-0.log", "node-1.log"):
        (tmp_path / node).write_text(rows(1, 20))
        import_log(tmp_path / node)

    assert {0} == {attempt for attempt, _ in losses(query)}
    assert 40 == len(losses(query))


def test_log_of_another_rank_is_no_restart(tmp_path, importing):
    import_log, query = importing
    for rank in range(2):
        (tmp_path / f"rank{rank}.log").write_text(rows(1, 20, minute=rank, rank=rank))
        import_log(tmp_path / f"rank{rank}.log")

    assert {0} == {attempt for attempt, _ in losses(query)}


def test_interrupted_import_is_continued(tmp_path, monkeypatch):
    """The store fails after the first batch. The next import stores the rest, and no row twice."""
    log = tmp_path / "train.log"
    log.write_text(rows(1, 500))
    monkeypatch.setattr("rankscope_ingest.importers.common.runner.BATCH_ROWS", 200)
    monkeypatch.setattr("rankscope_ingest.importers.megatron.CHUNK_BYTES", 10_000)

    class Failing:
        def __init__(self, writer):
            self.writer, self.left = writer, 2

        def append(self, batch):
            if not self.left:
                raise StoreError("disk full")
            self.left -= 1
            return self.writer.append(batch)

        def watermark(self, incarnation):
            return self.writer.watermark(incarnation)

    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        with pytest.raises(StoreError):
            import_records(log, Failing(writer), find_importer(log), run="r", known=[])
        report = import_records(log, writer, find_importer(log), run="r", known=[])
    with connect(tmp_path / "store") as connection:
        found = connection.query("SELECT count(*) AS n, count(DISTINCT seq) AS seqs FROM scalars").to_pylist()

    assert 0 < report.rows_stored < 1000
    assert [{"n": 1000, "seqs": 500}] == found


def test_progress_rises_to_the_size_of_the_log(tmp_path, importing, monkeypatch):
    monkeypatch.setattr("rankscope_ingest.importers.megatron.CHUNK_BYTES", 2_000)
    import_log, _ = importing
    log = tmp_path / "train.log"
    log.write_text(rows(1, 200))
    told = []
    import_log(log, progress=told.append)

    assert told == sorted(told)
    assert len(told) > 5
    assert log.stat().st_size == told[-1]


class Made:
    """An importer that yields the given items."""

    name = "made"

    def __init__(self, *items):
        self.items = items

    def detect(self, path, head):
        return Detection(1.0, "made")

    def read(self, path, faults):
        yield from self.items


def test_records_are_numbered_within_their_source(tmp_path):
    """One stream of a folder may grow without changing the numbers of another."""
    block = ImportedBlock(
        records=2,
        source="b",
        tables={
            "scalars": pa.table(
                {
                    "record": pa.array([0, 1, 1], pa.int32()),
                    "name": ["x", "x", "y"],
                    "value": [1.0, 2.0, 3.0],
                    "step": [5, 6, 6],
                    "rank": [None, 3, 3],
                }
            )
        },
    )
    record = ImportedRecord(
        rows={"scalars": [{"name": "x", "value": 0.5}]}, step=9, micro_step=4, ts=10**15, source="a"
    )
    facts = ImportedRun(state="completed", planned_steps=9, reason="done")
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        report = import_records(tmp_path, writer, Made(record, block, facts, record, block), run="r")
        again = import_records(tmp_path, writer, Made(record, facts, block, record, block), run="r")
    with connect(tmp_path / "store") as connection:
        found = connection.query("SELECT * FROM scalars ORDER BY step DESC, seq, name").to_pylist()
        runs = connection.query("SELECT state, planned_steps, reason FROM runs").to_pylist()

    assert (6, 8, 0) == (report.records, report.rows_stored, again.rows_stored)
    assert [(0, 9, 4, 0.5), (1, 9, 4, 0.5)] == [
        (row["seq"], row["step"], row["micro_step"], row["value"]) for row in found[:2]
    ]
    assert [(1, "x", 3), (1, "y", 3), (3, "x", 3), (3, "y", 3), (0, "x", None), (2, "x", None)] == [
        (row["seq"], row["name"], row["rank"]) for row in found[2:]
    ]
    assert 2 == len({row["incarnation"] for row in found})
    assert ["log", "log", None] == [row["ts_origin"] for row in found[:3]]
    assert [{"planned_steps": 9, "reason": "done", "state": "completed"}] == runs
    assert "completed" == report.state


def test_unknown_column_is_an_error():
    block = ImportedBlock(records=1, tables={"scalars": pa.table({"record": [0], "nmae": ["x"]})})

    with pytest.raises(KeyError, match="nmae"):
        Numbering(run="r", incarnation="i").block(block)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("logs/train.log", "train"),
        ("logs/train.log.3", "train"),
        ("runs/mistral/checkpoint-500/trainer_state.json", "mistral"),
        ("runs/mistral/checkpoint-500", "mistral"),
        ("runs/mistral/trainer_state.json", "mistral"),
        ("runs/mistral", "mistral"),
        ("a.b/metrics.jsonl", "metrics"),
        ("../..//x/..", None),
    ],
)
def test_run_is_named_after_its_log(tmp_path, monkeypatch, path, name):
    (tmp_path / "runs/mistral/checkpoint-500").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert (name or run_name(tmp_path / path)) == run_name(tmp_path / path)


@pytest.mark.parametrize("after_values", [0, 7])
@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.none() | st.floats(width=32, allow_nan=False), st.integers(0, 2)), max_size=40
    ),
    st.integers(1, 40),
)
def test_imported_tensors_get_the_events_of_the_reference_evaluator(after_values, values, size):
    """Baselines and firings of each rank's series equal those of the contract, for any size of the blocks."""
    rules = (AnomalyNan(), AnomalyTurbulence(threshold=2.0, after_values=after_values))
    table = pa.table(
        {
            "rank": pa.array([rank for rank, *_ in values], pa.int32()),
            "kind": ["grad_reduced"] * len(values),
            "tensor": ["w"] * len(values),
            "norm": pa.array([value for _, value, _ in values], pa.float32()),
            "nans": pa.array([nans for *_, nans in values], pa.int64()),
            "record": pa.array(range(len(values)), pa.int32()),
            "step": pa.array(range(len(values)), pa.int64()),
        }
    )
    judge, shown, fired = RuleEvaluator(rules), [], []
    for at in range(0, len(values), size):
        piece = table.slice(at, size)
        stamped = Numbering(run="r", incarnation="i").block(ImportedBlock(records=size, tables={"tensor_stats": piece}))
        judged = judge.evaluate(stamped) if stamped else {}
        shown += judged["tensor_stats"].column("norm_baseline").to_pylist() if stamped else []
        fired += judged["events"].to_pylist() if "events" in judged else []

    for rank in range(2):
        mine = [(step, value) for step, (one, value, _) in enumerate(values) if one == rank]
        given_values = [(step, value) for step, value in mine if value is not None]
        expected = [
            (given_values[firing.position][0], firing.rule.name, firing.value)
            for firing in evaluate(rules, "grad_reduced", "norm", [value for _, value in given_values])
        ]
        found = [(e["step"], e["rule"], e["value"]) for e in fired if e["rank"] == rank and e["op"] == "norm"]

        assert sorted(expected) == sorted(found)
        evaluator = SeriesEvaluator(rules, "grad_reduced", "norm")
        for step, value in mine:
            compared = evaluator.baseline
            if value is not None:
                evaluator.observe(value)
                compared = evaluator.compared
            assert (None if math.isnan(compared) else compared) == shown[step]
    assert sum(nans > 0 for *_, nans in values) == sum(event["op"] == "nans" for event in fired)


def test_scalars_that_are_not_finite_are_anomalies(tmp_path, importing):
    import_log, query = importing
    log = tmp_path / "train.log"
    log.write_text(rows(1, 5) + rows(6, 7, loss="nan") + rows(8, 8, loss="-inf"))
    report = import_log(log)
    found = query("SELECT step, rule, severity, op, value, message FROM events WHERE type = 'anomaly' ORDER BY step")

    assert 3 == report.anomalies
    assert [
        (6, "AnomalyNan", "critical", "loss"),
        (7, "AnomalyNan", "critical", "loss"),
        (8, "AnomalyNan", "critical", "loss"),
    ] == [(row["step"], row["rule"], row["severity"], row["op"]) for row in found]
    assert "AnomalyNan: loss is nan" == found[0]["message"]
    assert -math.inf == found[2]["value"]


def test_import_applies_the_given_rules(tmp_path, importing):
    import_log, query = importing
    log = tmp_path / "train.log"
    log.write_text(rows(1, 5) + rows(6, 6, loss="9.0"))
    report = import_log(log, rules=[AnomalyNan(name="too-high", threshold=8.0)])

    assert 1 == report.anomalies
    assert [{"rule": "too-high", "step": 6, "threshold": 8.0}] == query(
        "SELECT rule, step, threshold FROM events WHERE type = 'anomaly'"
    )


LOGGED = ["loss", "grad_norm", "load_balancing_loss", "params_norm"]
LOGGED += ["memory_bytes", "tokens_per_second", "loss_scale", "learning_rate"]


def scalars(size, **changed):
    """Return a block with a row of each scalar in LOGGED at each step. `changed` has other values at some steps."""
    values = [(step, name, changed.get(name, {}).get(step, 1.0)) for step in range(size) for name in LOGGED]
    table = {
        "record": pa.array([step for step, *_ in values], pa.int32()),
        "step": pa.array([step for step, *_ in values], pa.int64()),
        "rank": pa.array([0] * len(values), pa.int32()),
        "name": pa.array([name for _, name, _ in values]),
        "value": pa.array([value for *_, value in values], pa.float64()),
    }
    return ImportedBlock(records=size, tables={"scalars": pa.table(table)})


def events_of(block, *rules):
    judged = RuleEvaluator(rules).evaluate(Numbering(run="r", incarnation="i").block(block))
    return judged["events"].to_pylist() if "events" in judged else []


def test_limit_applies_to_losses_and_norms_only():
    found = events_of(scalars(1, **{name: {0: 1e12} for name in LOGGED}), AnomalyNan(threshold=100.0))

    assert ["grad_norm", "load_balancing_loss", "loss", "params_norm"] == sorted(event["op"] for event in found)


def test_rule_with_a_limit_reports_nan_in_every_scalar():
    found = events_of(scalars(1, **{name: {0: math.nan} for name in LOGGED}), AnomalyNan(threshold=100.0))

    assert sorted(LOGGED) == sorted(event["op"] for event in found)
    assert {("loss", 100.0), ("memory_bytes", None)} <= {(event["op"], event["threshold"]) for event in found}


def test_turbulence_judges_the_named_scalars_only():
    rules = [AnomalyNan(), AnomalyTurbulence(threshold=4.0, scalars=["loss", "grad_norm"])]
    changed = {name: {9: 5.5, 12: math.nan} for name in LOGGED if name != "grad_norm"} | {"grad_norm": {10: 8.0}}
    found = events_of(scalars(20, **changed), *rules)
    turbulent = [(e["step"], e["op"], e["baseline"], e["threshold"]) for e in found if e["rule"] != "AnomalyNan"]

    assert [(9, "loss", 1.0, 4.0), (10, "grad_norm", 1.0, 4.0)] == sorted(turbulent)
    assert len(LOGGED) - 1 == sum(event["rule"] == "AnomalyNan" for event in found)


def test_known_import_survives_its_json():
    known = KnownImport(
        incarnation="i",
        path="/x/y",
        kind="megatron",
        marks=((256, "a"), (300, "b")),
        records=4,
        malformed=1,
        attempt=2,
        ends={None: End(2, 9, 10**15), 3: End(1, None, None)},
    )

    assert known == KnownImport.from_json(known.to_json())
    for text in ("", "{}", "[]", '{"ends": 5}', '{"ends": [[1]], "marks": []}'):
        with pytest.raises(ValueError):
            KnownImport.from_json(text)


def test_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(Exception, match="neither a file nor a folder"):
        find_importer(tmp_path / "pipe")


def test_faults_keep_the_first_20_and_count_all():
    faults = Faults()
    for line in range(1, 101):
        faults.add(line, "x")

    assert (100, 20, 20) == (faults.count, len(faults.first), faults.first[-1].line)


def test_log_without_records_creates_no_run(tmp_path, importing):
    """S3-05: an import without records reports 0 records and stores no run."""
    import_log, query = importing
    log = tmp_path / "train.log"
    log.write_text("iteration 50/ 1000 | consumed samples: 200 | learning rate:\n" * 3)
    report = import_log(log)

    assert (0, 0, 3) == (report.records, report.rows_stored, report.malformed)
    assert [] == query("SELECT * FROM runs")


def test_secret_in_the_name_of_a_log_is_masked_and_the_log_is_known(importing, tmp_path):
    import_log, query = importing
    path = tmp_path / "run-password=correct-horse.log"
    path.write_text(rows(1, 3))
    import_log(path)
    again = import_log(path)
    path.write_text(rows(1, 5))
    import_log(path)
    events = query("SELECT message, details FROM events WHERE type = 'import' ORDER BY ordinal")

    assert (0, True) == (again.rows_stored, again.is_known)
    assert 2 * ["records of run-password=***"] == [one["message"] for one in events]
    assert "horse" not in json.dumps(events)
    assert [{"n": 5}] == query("SELECT count(*) AS n FROM scalars WHERE name = 'loss'")


def test_no_secret_of_a_log_reaches_the_store(importing, tmp_path):
    """A log repeats the settings that training was started with, including secrets."""
    import_log, query = importing
    secret = "correct-horse"
    settings = {"config": {"lr": 3, "wandb": {"api_key": secret}, "command": f"train.py --x token={secret}"}}
    lines = [settings, *({"step": step, "loss": 1.0} for step in range(3))]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    import_log(path)

    (config,) = query("SELECT config FROM runs")[0].values()
    assert secret not in config
    assert '"lr": 3' in json.dumps(json.loads(config))
    stored = [file.read_bytes() for file in (tmp_path / "store").rglob("*.parquet")]
    assert stored
    assert not any(secret.encode() in content for content in stored)


class Counted:
    """An importer that counts how often it reads a log."""

    def __init__(self, importer):
        self.importer, self.name, self.reads = importer, importer.name, 0

    def detect(self, path, head):
        return self.importer.detect(path, head)

    def read(self, path, faults):
        self.reads += 1
        yield from self.importer.read(path, faults)


def test_unchanged_file_is_not_read_again(tmp_path, importing):
    """A file with the size, time and edges of its last import is unchanged; any other file is read."""
    import_log, _ = importing
    log = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 31)]
    counted = Counted(find_importer_of_lines(log, lines[:10]))
    reports = [import_log(log, importer=counted) for _ in range(3)]

    assert (1, [False, True, True]) == (counted.reads, [one.is_unchanged for one in reports])
    assert {(10, 10)} == {(one.records, one.last_step) for one in reports}
    log.write_text("".join(lines))
    assert (20, 2) == (import_log(log, importer=counted).rows_stored, counted.reads)
    found = log.stat()
    log.write_text("".join(lines).replace("30", "31"))
    os.utime(log, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert not import_log(log, importer=counted).is_unchanged
    os.utime(log, ns=(1, 1))
    assert 0 == import_log(log, importer=counted).rows_stored
    assert 4 == counted.reads
    assert import_log(log, importer=counted).is_unchanged


def test_file_that_may_grow_later_is_read_again(tmp_path, importing):
    class Aging(Counted):
        is_old = False

        def is_settled(self, path):
            return self.is_old

    import_log, _ = importing
    log = tmp_path / "metrics.jsonl"
    aging = Aging(find_importer_of_lines(log, ['{"step": 1, "loss": 1.0}\n']))
    import_log(log, importer=aging)
    aging.is_old = True
    reports = [import_log(log, importer=aging) for _ in range(2)]

    assert [False, True] == [one.is_unchanged for one in reports]
    assert 2 == aging.reads


def find_importer_of_lines(log, lines):
    log.write_text("".join(lines))
    return find_importer(log)


def test_logs_with_the_same_steps_and_times_are_reported(tmp_path, importing):
    import_log, _ = importing
    reports = []
    for name, text in (("a.log", rows(1, 20)), ("b.log", rows(11, 30)), ("c.log", rows(25, 40, minute=5))):
        (tmp_path / name).write_text(text)
        reports.append(import_log(tmp_path / name))

    assert [0, 1, 0] == [len(report.notes) for report in reports]
    assert f"as {tmp_path / 'a.log'}, so both are one attempt" in reports[1].notes[0]
    assert 1 == reports[2].attempt
