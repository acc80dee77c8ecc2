"""The runner: an interrupted import, the numbers of records, secrets, unchanged files, and anomaly rules."""

import json
import math
import os

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.rules.evaluation import evaluate
from tests.ingest.importers.conftest import Counting, Made

from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_contract.rules.curve import SeriesEvaluator
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import (
    Faults,
    ImportedBlock,
    ImportedRun,
    Options,
    find_importer,
    import_records,
    importers,
    replaceable,
    run_name,
)
from rankscope_ingest.importers.common.importer import block_of
from rankscope_ingest.importers.common.positions import Numbering
from rankscope_ingest.importers.common.rules import RuleEvaluator
from rankscope_storage.base.errors import StoreError


def rows(first, last):
    return "".join(f"iteration {step}/ 1000 | lm loss: 2.5 | grad norm: 1.0 |\n" for step in range(first, last + 1))


def lines(*steps):
    return "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in steps)


def test_interrupted_import_is_continued(logs, monkeypatch):
    """The store fails after the first batch. The next import stores the rest, and no row twice."""
    log = logs.write("train.log", rows(1, 500))
    monkeypatch.setattr("rankscope_ingest.importers.common.importer.BLOCK_ROWS", 100)
    monkeypatch.setattr("rankscope_ingest.importers.common.lines.BLOCK_BYTES", 2_000)
    monkeypatch.setattr("rankscope_ingest.importers.megatron._MOST_TOGETHER", 10)
    with pytest.raises(StoreError):
        import_records(log, Counting(logs.writer, fails_at=3), find_importer(log), run="r", known=[], batch_rows=200)
    report = import_records(log, logs.writer, find_importer(log), run="r", known=[], batch_rows=200)

    assert 0 < report.rows_stored < 1000
    assert [{"n": 1000, "seqs": 500}] == logs.query("SELECT count(*) AS n, count(DISTINCT seq) AS seqs FROM scalars")


def test_progress_rises_to_the_size_of_the_log(logs, monkeypatch):
    monkeypatch.setattr("rankscope_ingest.importers.common.importer.BLOCK_ROWS", 30)
    log, told = logs.write("train.log", rows(1, 200)), []
    import_records(log, logs.writer, find_importer(log), run="r", progress=told.append)

    assert told == sorted(told)
    assert len(told) > 5
    assert log.stat().st_size == told[-1]


def test_records_are_numbered_within_their_source(logs):
    """One stream of a folder may grow without changing the numbers of another."""
    columns = {"name": ["x", "x", "y"], "value": [1.0, 2.0, 3.0], "step": [5, 6, 6], "rank": [None, 3, 3]}
    table = pa.table({"record": pa.array([0, 1, 1], pa.int32()), **columns})
    block = ImportedBlock(records=2, source="b", tables={"scalars": table})
    row = {"name": "x", "value": 0.5, "step": 9, "micro_step": 4, "ts": 10**15, "ts_origin": "log"}
    record = block_of("scalars", [row], "a")
    facts = ImportedRun(state="completed", planned_steps=9, reason="done")
    report = import_records(logs.folder, logs.writer, Made(record, block, facts, record, block), run="r")
    again = import_records(logs.folder, logs.writer, Made(record, facts, block, record, block), run="r")
    found = logs.query("SELECT * FROM scalars ORDER BY step DESC, seq, name")

    assert (6, 8, 0) == (report.records, report.rows_stored, again.rows_stored)
    assert [(0, 9, 4, 0.5), (1, 9, 4, 0.5)] == [
        (row["seq"], row["step"], row["micro_step"], row["value"]) for row in found[:2]
    ]
    assert [(1, "x", 3), (1, "y", 3), (3, "x", 3), (3, "y", 3), (0, "x", None), (2, "x", None)] == [
        (row["seq"], row["name"], row["rank"]) for row in found[2:]
    ]
    assert 2 == len({row["incarnation"] for row in found})
    assert ["log", "log", None] == [row["ts_origin"] for row in found[:3]]
    assert [("completed", 9, "done")] == logs.tuples("SELECT state, planned_steps, reason FROM runs")
    assert "completed" == report.state


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("logs/train.log", "train"), ("logs/train.log.3", "train")),
        *(("runs/mistral/checkpoint-500/trainer_state.json", "mistral"), ("runs/mistral/checkpoint-500", "mistral")),
        *(("runs/mistral/trainer_state.json", "mistral"), ("runs/mistral", "mistral")),
        *(("a.b/metrics.jsonl", "metrics"), ("../..//x/..", None)),
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
    rules, count = (AnomalyNan(), AnomalyTurbulence(threshold=2.0, after_values=after_values)), len(values)
    table = pa.table(
        {
            "rank": pa.array([rank for rank, *_ in values], pa.int32()),
            "kind": ["grad_reduced"] * count,
            "tensor": ["w"] * count,
            "norm": pa.array([value for _, value, _ in values], pa.float32()),
            "nans": pa.array([nans for *_, nans in values], pa.int64()),
            "record": pa.array(range(count), pa.int32()),
            "step": pa.array(range(count), pa.int64()),
        }
    )
    judge, shown, fired = RuleEvaluator(rules), [], []
    for at in range(0, count, size):
        piece = ImportedBlock(records=size, tables={"tensor_stats": table.slice(at, size)})
        judged = judge.evaluate(Numbering(run="r", incarnation="i").block(piece))
        shown += judged["tensor_stats"].column("norm_baseline").to_pylist()
        fired += judged["events"].to_pylist() if "events" in judged else []

    for rank in range(2):
        mine = [(step, value) for step, (one, value, _) in enumerate(values) if one == rank]
        known = [(step, value) for step, value in mine if value is not None]
        firings = evaluate(rules, "grad_reduced", "norm", [value for _, value in known])
        expected = [(known[one.position][0], one.rule.name, one.value) for one in firings]
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


LOGGED = ["loss", "grad_norm", "load_balancing_loss", "params_norm"]
LOGGED += ["memory_bytes", "tokens_per_second", "loss_scale", "learning_rate"]


def events_of(logs, steps, *rules, **changed):
    """Import a log with the value 1 of each of LOGGED, or that in `changed` at a step, and return its anomalies."""
    objects = [
        {"step": step, **{name: changed.get(name, {}).get(step, 1.0) for name in LOGGED}} for step in range(steps)
    ]
    log = logs.write("log.jsonl", "".join(f"{json.dumps(each)}\n" for each in objects))
    report = import_records(log, logs.writer, find_importer(log), run="r", rules=rules)
    found = logs.query("SELECT step, op, rule, threshold, baseline FROM events WHERE type = 'anomaly' ORDER BY ALL")

    assert len(found) == report.anomalies
    return found


LIMITED = {"grad_norm", "load_balancing_loss", "loss", "params_norm"}


@pytest.mark.parametrize(("value", "names"), [(1e12, LIMITED), (math.nan, {*LOGGED})])
def test_limit_applies_to_losses_and_norms_and_nan_is_reported_everywhere(logs, value, names):
    found = events_of(logs, 1, AnomalyNan(name="own", threshold=100.0), **{name: {0: value} for name in LOGGED})
    expected = {(name, "own", 100.0 if name in LIMITED else None) for name in names}

    assert expected == {(event["op"], event["rule"], event["threshold"]) for event in found}


def test_turbulence_judges_the_named_scalars_only(logs):
    rules = [AnomalyNan(), AnomalyTurbulence(threshold=4.0, scalars=["loss", "grad_norm"])]
    changed = {name: {9: 5.5, 12: math.nan} for name in LOGGED if name != "grad_norm"} | {"grad_norm": {10: 8.0}}
    found = events_of(logs, 20, *rules, **changed)
    turbulent = [(e["step"], e["op"], e["baseline"], e["threshold"]) for e in found if e["rule"] != "AnomalyNan"]

    assert [(9, "loss", 1.0, 4.0), (10, "grad_norm", 1.0, 4.0)] == turbulent
    assert len(LOGGED) - 1 == sum(event["rule"] == "AnomalyNan" for event in found)


def test_path_that_is_no_readable_log_is_an_error(logs):
    os.mkfifo(logs.folder / "pipe")
    logs.write("train.log", "nothing of any training\n")
    errors = {
        "pipe": "neither a file nor a folder",
        "train.log": r"unknown format; known formats: .*jsonl",
        "absent": "cannot be read",
    }

    for name, error in errors.items():
        with pytest.raises(IngestError, match=error):
            find_importer(logs.folder / name)


@pytest.mark.parametrize("name", ["megatron", "msprobe", "openmetrics", "tensorboard", "trainer_state"])
def test_choice_of_the_loss_in_another_format_is_an_error(logs, name):
    path, options = logs.write("log.jsonl", lines(1)), Options(loss="avr_loss")

    with pytest.raises(IngestError, match="--loss does not apply"):
        import_records(path, None, importers()[name], run="r", options=options)
    with pytest.raises(IngestError, match="--loss does not apply"):
        replaceable(path, "r", importers()[name], [], None, is_live=False, options=options)


def test_faults_keep_the_first_20_and_count_all():
    faults = Faults()
    for line in range(1, 101):
        faults.add(line, "x")

    assert (100, 20, 20) == (faults.count, len(faults.first), faults.first[-1].line)


def test_secret_in_the_name_of_a_log_is_masked_and_the_log_is_known(logs):
    name = "run-password=correct-horse.log"
    logs.import_again(logs.write(name, rows(1, 3)))
    again = logs.import_again(logs.folder / name)
    logs.import_again(logs.write(name, rows(1, 5)))
    events = logs.query("SELECT message, details FROM events WHERE type = 'import' ORDER BY ordinal")

    assert (0, True) == (again.rows_stored, again.is_known)
    assert 2 * ["records of run-password=***"] == [one["message"] for one in events]
    assert "horse" not in json.dumps(events)
    assert 5 == logs.value("SELECT count(*) FROM scalars WHERE name = 'loss'")


def test_no_secret_of_a_log_reaches_the_store(logs):
    """A log repeats the settings that training was started with, including secrets."""
    secret = "correct-horse"
    settings = {"config": {"lr": 3, "wandb": {"api_key": secret}, "command": f"train.py --x token={secret}"}}
    logs.import_log(logs.write("log.jsonl", f"{json.dumps(settings)}\n{lines(0, 1, 2)}"))
    config = logs.value("SELECT config FROM runs")
    stored = [file.read_bytes() for file in (logs.folder / "store").rglob("*.parquet")]

    assert secret not in config
    assert '"lr": 3' in json.dumps(json.loads(config))
    assert stored
    assert not any(secret.encode() in content for content in stored)


class Counted:
    """An importer that counts how often it reads a log, which may grow later unless `is_old`."""

    def __init__(self, importer, *, is_old=True):
        self.importer, self.name, self.reads, self.is_old = importer, importer.name, 0, is_old

    def is_settled(self, path):
        return self.is_old

    def read(self, path, faults):
        self.reads += 1
        yield from self.importer.read(path, faults)


def test_unchanged_file_is_not_read_again(logs):
    """A file with the size and edges of its last import is unchanged; any other file is read."""
    log = logs.write("metrics.jsonl", lines(*range(1, 11)))
    counted = Counted(find_importer(log))
    reports = [logs.import_again(log, importer=counted) for _ in range(3)]

    assert (1, [False, True, True]) == (counted.reads, [one.is_unchanged for one in reports])
    assert {(10, 10)} == {(one.records, one.last_step) for one in reports}
    log.write_text(lines(*range(1, 31)))
    assert (20, 2) == (logs.import_again(log, importer=counted).rows_stored, counted.reads)
    found = log.stat()
    log.write_text(lines(*range(1, 31)).replace("30", "31"))
    os.utime(log, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert not logs.import_again(log, importer=counted).is_unchanged
    os.utime(log, ns=(1, 1))
    assert (True, 3) == (logs.import_again(log, importer=counted).is_unchanged, counted.reads)


def test_file_that_may_grow_later_is_read_again(logs):
    log = logs.write("metrics.jsonl", lines(1))
    aging = Counted(find_importer(log), is_old=False)
    logs.import_again(log, importer=aging)
    aging.is_old = True
    reports = [logs.import_again(log, importer=aging) for _ in range(2)]

    assert [False, True] == [one.is_unchanged for one in reports]
    assert 2 == aging.reads
