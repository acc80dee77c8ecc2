"""Large text logs, pairs in any line, tables of numbers, and many small logs; `cases` has the dialects."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.importers.conftest import Counting
from tests.ingest.importers.field_logs import read
from tests.ingest.importers.test_msprobe import SINGLE
from tests.properties import examples

from rankscope_ingest import importers
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.importers import Faults, LogGroup, find_importer, import_records
from rankscope_ingest.importers.columns import Columns
from rankscope_ingest.importers.common.bars import Bars, states
from rankscope_ingest.importers.common.failures import FailureLines
from rankscope_ingest.importers.common.pairs import parse
from rankscope_ingest.importers.textlog import TextLog
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.errors import StoreError
from rankscope_storage.connection import connect

NAMES = st.from_regex(r"[a-z]{3,8}([_/-][a-z]{2,6}){0,2}", fullmatch=True).filter(
    lambda name: not re.search("step|iter|update|epoch|batch|loss|val|test|rank|time|norm|nan|inf|is|s_it", name)
)
NUMBERS = st.floats(-1e6, 1e6).map(repr) | st.integers(0, 10**6).map(str) | st.sampled_from(["nan", "1,234,567.5"])
HEADS = ["", "2026-01-01 00:00:00 | INFO | ", "[rank3]: 2026-01-01 00:00:00,123 - root - INFO - ", "(T pid=12) "]


@given(
    prefix=st.sampled_from(HEADS),
    separator=st.sampled_from([" | ", ", ", "  ", " - ", "\t"]),
    mark=st.sampled_from([": ", ":", "=", " ", " = "]),
    pairs=st.dictionaries(NAMES, NUMBERS, min_size=1, max_size=6),
    place=st.integers(0, 6),
)
@settings(deadline=None, max_examples=examples(300))
def test_every_value_of_a_pair_is_stored_or_counted(prefix, separator, mark, pairs, place):
    """The counter may be before, between or behind the pairs."""
    parts = [f"{name}{mark}{value}" for name, value in pairs.items()]
    line = parse(prefix + separator.join([*parts[:place], f"step{mark}5/100", *parts[place:]]))

    assert {"step": "5/100"} == line.counters
    assert len(pairs) == len(line.pairs) + len(line.rest)


def test_source_code_before_the_rows_does_not_hide_them(logs):
    """Logs of modded-nanogpt begin with the source code of the program, which is longer than the sampled beginning."""
    text = "import torch  # loss = 3\n" * 8000 + "step:1/9 train_loss:2 train_time:10ms\n" * 4000

    assert "textlog" == find_importer(logs.write("log.txt", text)).name


def test_recorded_nanogpt_logs_have_the_expected_counts(logs, data):
    """The counts are computed with one regular expression per quantity."""
    files = {"llmc": "modded-nanogpt_llmc_main.log", "muon": "modded-nanogpt_muon_steps.txt"}
    marks = {
        "llmc": {"loss": "trl:", "eval_loss": "tel:", "grad_norm": "norm:"},
        "muon": {"loss": "train_loss:", "eval_loss": "val_loss:", "step_avg": r"step_avg:\d"},
    }
    expected = {}
    for run, file in files.items():
        logs.import_log(data / "textlog" / file, run=run)
        text = (data / "textlog" / file).read_text()
        expected |= {(run, name): len(re.findall(mark, text)) for name, mark in marks[run].items()}
    rows = logs.query("SELECT run, name, count(*) AS n FROM scalars GROUP BY 1, 2")
    found = {(row["run"], row["name"]): row["n"] for row in rows}

    assert expected == {key: found.get(key, 0) for key in expected}
    assert 1 == logs.value("SELECT count(DISTINCT attempt) FROM scalars WHERE run = 'llmc'")


def test_recorded_two_column_table_is_read(logs, data):
    path = data / "textlog" / "torchtitan_llama3_cuda_losses.txt"
    report = logs.import_log(path)
    rows = logs.query("SELECT step, name, value FROM scalars ORDER BY seq")

    assert [(int(step), "loss", float(loss)) for step, loss in map(str.split, path.read_text().splitlines())] == [
        tuple(row.values()) for row in rows
    ]
    assert "columns" == report.source_kind


@pytest.mark.parametrize(
    "text",
    ["hello world\n" * 10, "name,step,max,min\nw,1,2,3\n", "1 2\n1 2\n1 2\n", "3.5 2\n4.5 2\n", "key: value\n", ""],
)
def test_table_without_training_values_is_not_detected(tmp_path, text):
    path = tmp_path / "some.txt"
    path.write_text(text)

    assert [0.0, 0.0] == [importer.detect(path, text.encode()).confidence for importer in (Columns(), TextLog())]


@pytest.mark.usual(2)
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["step:1 " + "a " * 4000, "step:1 " + "a" * 8000, "step:1 " + "1" * 8000, "a (b) " * 1300]
)
def test_long_lines_are_parsed_without_backtracking(tmp_path, text):
    """Patterns with backtracking would need seconds for these lines."""
    path = tmp_path / "train.log"
    path.write_text(f"{text}\n" * 50)
    list(TextLog().read(path, Faults()))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    ["x" + " " * 200_000 + "| it/s", "|[it/s" * 33_000, "1%||" + " " * 200_000 + "it/s", "1%|| 1/2 [0,1it/s, " * 10_000,
     "ProcessGroupNCCL error " * 9_000, ("\r" + " " * 240) * 800 + "| it/s"],
)  # fmt: skip
def test_long_lines_with_bars_are_read_without_backtracking(text):
    """These lines have 200,000 characters. A pattern that matches them in two ways needs hours."""
    bars = Bars()

    assert not bars.see(text)
    assert [text] == states(text)
    FailureLines.found_in(text, {})


def test_bar_behind_blanks_or_another_bar_is_read():
    bars = Bars()
    text = "\r" + " " * 240 + "\rEval:  50%|█ | 1/2 [0,1it/s]Epoch 3:   5%|▌ | 7/20 [00:10<01:30,  1.00s/it, loss=2.5]"

    assert bars.see(text)
    assert {"loss": 1.0, "bar_step": "7/20"} == bars.with_step({"loss": 1.0})
    assert ["epoch 3 bar_step 7 loss=2.5"] == states(text.replace("Eval:  50%|█ | 1/2 [0,1it/s]", ""))


TEXT = b"step 1 loss 2.5\n" * 5_000


@pytest.mark.parametrize(
    "content",
    [b"step 1 loss 2.5\0\n" * 100, b"step 1 loss 2.5 \x01\x02\x03\n" * 9, TEXT + b"\0a\n" * 20, TEXT + b"\0a" * 99],
)
def test_binary_file_is_refused_wherever_its_bytes_are(logs, content):
    with pytest.raises(IngestError, match="binary file"):
        logs.import_log(logs.write("train.log", content), kind="textlog")


def test_holes_that_a_crash_left_hide_no_line(logs):
    """The file system fills the blocks that it lost with NUL bytes."""
    rows, hole = [b"step %d loss 2.5\n" % step for step in range(8_000)], b"\0" * 5_000
    content = b"".join([rows[0], hole, *rows[1:6_000], rows[6_000][:-4], hole, *rows[6_001:], hole])
    report = logs.import_log(logs.write("train.log", content))

    assert (7_999, 7_999) == (report.last_step, report.records)


ROWS = [{"epoch": e, "iter": i, "step": 3 * e + i, "total_loss": 2.5} for e in range(2) for i in (1, 2, 3)]


@pytest.mark.parametrize(
    "before",
    [
        "host:1:2 [0] NCCL INFO Channel 00/02 : 0 1 2 3\n" * 2_500,
        ("No space left on device " * 30 + "\n") * 1_600,
        '{"event": "data_loaded", "step": 0}\n' * 20_100,
    ],
    ids=["lines", "bytes", "events"],
)
def test_text_before_the_first_record_does_not_decide_the_step(logs, before):
    """The step is decided over records: here `iter` begins again with each epoch."""
    as_text = json.dumps if before.startswith("{") else lambda row: " ".join(f"{name} {row[name]}" for name in row)
    rows, faults = read(logs.write("train.log", before + "".join(f"{as_text(row)}\n" for row in ROWS)))

    assert [1, 2, 3, 4, 5, 6] == [row["step"] for row in rows if row["name"] == "loss"]
    assert ["loss is total_loss"] == faults.notes


def test_names_beyond_a_thousand_are_counted(logs):
    row = {"step": 1, "loss": 2.5} | {f"layer_{number}": 1.0 for number in range(1010)}
    report = logs.import_log(logs.write("wide.jsonl", json.dumps(row) + "\n"))

    assert (1000, 11) == (report.rows_stored, len(report.unkept))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\n\nloss: 3.5\n", "line 3 has a loss and no step"),
        ("Epoch 1/3\nsaved\n", "line 1 has an epoch and no number"),
    ],
)
def test_refusal_names_the_nearest_miss(logs, text, said):
    with pytest.raises(IngestError, match=said):
        find_importer(logs.write("notes.txt", text))


# Many small logs that are stored with few commits, each as if it were imported alone.

CONTENT = """\
SELECT run, attempt, name, step, count(*) AS n, min(value) AS value FROM scalars
WHERE run IN ('text', 'state', 'lines') GROUP BY ALL ORDER BY ALL"""


def lines(first, last, loss=0.0):
    return "".join(json.dumps({"step": step, "loss": loss + 1 / step}) + "\n" for step in range(first, last + 1))


def state(*losses):
    history = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    return json.dumps({"global_step": len(losses), "log_history": history})


def import_all(group, logs):
    group.begin({run for _, run in logs})
    reports = []
    for path, run in logs:
        facts = {"known": group.known(run), "is_live": group.is_live(run), "stored": group.stored(run)}
        reports.append(import_records(path, group, find_importer(path), run=run, **facts))
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


def test_group_stores_the_same_as_single_imports(tmp_path, opened, mixed):
    """Also the attempts, branches and copies that are recognized by the earlier logs of the same group."""
    writer, connection = opened
    counting = Counting(writer)
    together = import_all(LogGroup(counting, lambda: connection), mixed)
    with Store.open(tmp_path / "alone", create=True).claim(owner="test") as other, connect(tmp_path / "alone") as alone:
        group = LogGroup(other, lambda: alone)
        single = [report for log in mixed for report in import_all(group, [log])]
        expected = alone.query(CONTENT).to_pylist()

    assert expected == connection.query(CONTENT).to_pylist()
    assert single == together
    assert {"text", "state", "lines", "csv"} == {row["run"] for row in connection.query("FROM runs").to_pylist()}
    assert (1, 1) == (counting.appends, counting.refreshes)


def test_rows_that_another_process_stores_meanwhile_are_not_stored_twice(tmp_path, opened):
    """The group does not read the watermarks of the store again before its commit."""
    writer, connection = opened
    (tmp_path / "a.jsonl").write_text(lines(1, 5))
    (tmp_path / "b.jsonl").write_text(lines(1, 5))
    logs = [(tmp_path / "a.jsonl", "a"), (tmp_path / "b.jsonl", "b")]
    group = LogGroup(writer, lambda: connection)
    group.begin({"a", "b"})
    with Store.open(tmp_path / "store").claim("1/2", owner="another import") as other:
        for number, (path, run) in enumerate(logs):
            import_records(path, group, find_importer(path), run=run, known=group.known(run))
            if number == 0:
                import_all(LogGroup(other, lambda: connection), logs)
        group.flush()

    assert [("a", 5), ("b", 5)] == [
        tuple(row.values())
        for row in connection.query("SELECT run, count(*) AS n FROM scalars GROUP BY 1 ORDER BY 1").to_pylist()
    ]


def test_failed_commit_neither_loses_nor_doubles_rows(tmp_path, opened, monkeypatch):
    """The store fails between two logs. The next import stores the logs of which nothing is stored."""
    monkeypatch.setattr(importers, "GROUP_ROWS", 12)
    writer, connection = opened
    logs = [(tmp_path / f"run{number}.jsonl", f"run{number}") for number in range(6)]
    for number, (path, _) in enumerate(logs):
        path.write_text(lines(1, 5, loss=number))
    with pytest.raises(StoreError):
        import_all(LogGroup(Counting(writer, fails_at=2), lambda: connection), logs)
    first = connection.query("SELECT run, count(*) AS n FROM scalars GROUP BY 1 ORDER BY 1").to_pylist()
    reports = import_all(LogGroup(writer, lambda: connection), logs)
    rows = connection.query(
        "SELECT run, count(*) AS n, count(DISTINCT seq) AS seqs FROM scalars GROUP BY 1"
    ).to_pylist()
    events = connection.query("SELECT run, count(*) AS n FROM events WHERE type = 'import' GROUP BY 1").to_pylist()

    assert [{"run": run, "n": 5} for _, run in logs[:2]] == first
    assert [0, 0, 5, 5, 5, 5] == [report.rows_stored for report in reports]
    assert {(run, 5, 5) for _, run in logs} == {tuple(row.values()) for row in rows}
    assert {(run, 1) for _, run in logs} == {tuple(row.values()) for row in events}


def test_rows_that_the_store_refuses_do_not_stop_other_logs(tmp_path, opened):
    writer, connection = opened
    (tmp_path / "good.jsonl").write_text(lines(1, 5))
    group = LogGroup(writer, lambda: connection)
    group.begin({"good", "bad"})
    unnamed = rows_table("scalars", [{"run": "bad", "attempt": 0, "incarnation": "i", "seq": 0, "value": 1.0}])
    with pytest.raises(IngestError, match=r"scalars.name is null in 1 rows"):
        group.append(Batch(tables={"scalars": unnamed}, watermarks={"i": 0}))
    import_all(group, [(tmp_path / "good.jsonl", "good")])

    assert [{"run": "good"}] == connection.query("SELECT DISTINCT run FROM scalars").to_pylist()
