"""Large and truncated logs of JSON, JSON lines and OpenMetrics, and every number in them; `cases` has the dialects."""

import json
import math
import os
import subprocess
import time
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tests.properties import examples

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer, newer_log
from rankscope_ingest.importers.jsonl import JsonLines
from rankscope_ingest.importers.openmetrics import OpenMetrics
from rankscope_ingest.importers.trainer_state import TrainerState


def losses(logs):
    return [tuple(row.values()) for row in logs.query("SELECT step, value FROM scalars ORDER BY seq, name")]


@pytest.mark.parametrize("end", ["\n", ""])
def test_line_of_many_megabytes_is_skipped_and_counted(logs, end):
    body = b'{"step": 1, "loss": 1}\n{"step": 2, "x": "' + b"y" * (17 << 20) + b'"}\n{"step": 3, "loss": 3}'
    report = logs.import_log(logs.write("log.jsonl", body + end.encode()))

    assert [(1, 1.0), (3, 3.0)] == losses(logs)
    assert [2] == [fault.line for fault in report.faults]


def test_row_behind_megabytes_of_nul_bytes_is_read(logs):
    text = '{"step": 1, "loss": 1.0}\n{"step": 2, "lo' + "\0" * (20 << 20) + '{"step": 3, "loss": 3}\n'
    logs.import_log(logs.write("log.jsonl", text))

    assert [(1, 1.0), (3, 3.0)] == losses(logs)


def test_source_code_with_braces_is_not_detected(logs):
    code = "import json\n\ndef nothing():\n    return {}\n\nprint(f'{nothing()}', {'a': 1})\n"
    with pytest.raises(IngestError, match="unknown format"):
        find_importer(logs.write("program.py", code))


def test_file_without_line_feeds_may_be_longer_than_a_line(logs):
    logs.import_log(logs.write("a.jsonl", "".join(f'{{"step": {step}, "loss": 1.0}}\r' for step in range(3000))))

    assert 3000 == logs.value("SELECT count(*) FROM scalars")


def test_lines_longer_than_the_detection_window_are_recognized(logs):
    lines = [json.dumps({"step": step, "loss": 1, "note": "x" * 100_000}) for step in range(3)]
    report = logs.import_log(logs.write("log.jsonl", "\n".join(["launching", *lines, ""])))

    assert ("jsonl", 3) == (report.source_kind, report.records)


def test_number_of_thousands_of_digits_is_infinite(logs):
    logs.import_log(logs.write("log.jsonl", '{"step": 1, "loss": ' + "9" * 5000 + "}\n"))

    assert [(1, float("inf"))] == losses(logs)


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5).map(lambda name: f"my_{name}"),
            st.none() | st.booleans() | st.integers() | st.floats(),
            min_size=1,
            max_size=4,
        ),
        max_size=8,
    ),
    st.sampled_from([json.dumps, repr]),
)
def test_every_printed_number_is_restored(tmp_path_factory, documents, spelled):
    """The number is printed as JSON and as Python prints it."""
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    path.write_text("\n".join(map(spelled, documents)), encoding="utf-8")
    faults = Faults()
    found = [[] for _ in documents]
    for block in JsonLines().read(path, faults):
        if isinstance(block, ImportedBlock) and "scalars" in block.tables:
            for row in block.tables["scalars"].to_pylist():
                found[row["record"]].append((row["name"], repr(row["value"])))
    numbers = [
        [(name, value) for name, value in document.items() if type(value) in {int, float}] for document in documents
    ]

    assert (0, [[(name, repr(float(value))) for name, value in row] for row in numbers]) == (faults.count, found)


# The Trainer's state as an archive, truncation anywhere, and a newer log.

STATE = json.dumps({"global_step": 0, "log_history": [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 2.5}]})


def test_time_of_a_checkpoint_is_that_of_its_file(logs):
    """The time of the run is not the time of the import, although the entries have no time."""
    path = logs.write("trainer_state.json", STATE)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    logs.import_log(path)

    assert 1_700_000_000 == logs.value("SELECT epoch(ended_at) FROM runs")
    assert 0 == logs.value("SELECT count(ts) FROM scalars")


def test_recorded_checkpoints_of_one_run_repeat_each_other(logs, data):
    """Four checkpoints, 1,200 entries in all, one history of 700."""
    for number in (500, 1500, 3000, 7000):
        source = data / "trainer_state" / f"sygoat_mistral-translator_checkpoint-{number}.json"
        logs.write(f"out/checkpoint-{number}/trainer_state.json", source.read_bytes())
    report = logs.import_log(logs.folder / "out")

    assert (700, 7000) == (report.records, report.last_step)
    assert 700 == logs.value("SELECT count(*) FROM scalars WHERE name = 'loss'")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_archive_of_a_checkpoint_is_read(logs, compression):
    """S1-09. Without compression, the text of another file is at the beginning, as if the archive were a log."""
    path = logs.folder / "run.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("train.log", "".join(f" iteration {n:8}/ 99 | lm loss: 2.0E+00 |\n" for n in range(1, 99)))
        archive.writestr("run/checkpoint-2/trainer_state.json", STATE)
        archive.writestr("../../evil.txt", "never written anywhere")
    logs.import_log(path)

    assert [1.5, 2.5] == logs.value("SELECT list(value ORDER BY step) FROM scalars WHERE name = 'loss'")
    assert not (logs.folder.parent / "evil.txt").exists()


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_file_truncated_anywhere_gives_a_prefix_of_the_history(tmp_path_factory, data):
    """The entries are a prefix of the history and never a wrong value; the complete file gives all of them."""
    entries = [{"step": n, "loss": n * 1.25, "é": "ü\n"} for n in range(5)]
    text = json.dumps({"a": [1, {"b": 2}], "log_history": entries, "z": 1}, ensure_ascii=False).encode()
    cut = data.draw(st.integers(2, len(text)))
    path = tmp_path_factory.getbasetemp() / "trainer_state.json"
    path.write_bytes(text[:cut])
    blocks = [item for item in TrainerState().read(path, Faults()) if isinstance(item, ImportedBlock)]
    rows = [row for block in blocks for row in block.tables["scalars"].to_pylist()]
    losses = [row["value"] for row in rows if row["name"] == "loss"]

    assert [n * 1.25 for n in range(5)][: len(losses)] == losses
    assert cut < len(text) or len(losses) == 5


@pytest.mark.parametrize("text", ["[" * 100_000, '{"log_history": [' + '{"a":' * 100_000, '{"' + "x" * 200_000])
def test_deep_nesting_and_long_text_are_counted_as_faults(logs, text):
    report = logs.import_log(logs.write("trainer_state.json", text), kind="trainer_state")

    assert (0, True) == (report.records, report.malformed > 0)


def test_folder_without_states_is_not_detected(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(IngestError):
        find_importer(tmp_path)


@pytest.mark.parametrize("folder", ["run", "run/checkpoint-10"])
def test_newer_log_next_to_checkpoints_is_found(logs, folder):
    """Only a log with later steps than the checkpoints."""
    entries = [{"step": step, "loss": 1.0} for step in (1, 10)]
    path = logs.write("run/checkpoint-10/trainer_state.json", json.dumps({"log_history": entries}))
    log = logs.write("run/logging.jsonl", "".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(1, 16)))
    other = logs.write("run/predictions.jsonl", '{"prompt": "x"}\n')
    os.utime(other, (path.stat().st_mtime + 20,) * 2)
    older, newer = path.stat().st_mtime - 10, path.stat().st_mtime + 10
    found = []
    for moment in (older, newer):
        os.utime(log, (moment, moment))
        found.append(newer_log(logs.folder / folder))
    log.write_text('{"step": 10, "loss": 1}\n')
    os.utime(log, (newer, newer))

    assert [None, log, None] == [*found, newer_log(logs.folder / folder)]


# Pages and dumps of real programs, grown dumps and large lines.


def test_prometheus_client_pages_are_read_in_both_formats(logs):
    registry = CollectorRegistry()
    gauge = Gauge("temperature", "In degrees.", ["place"], registry=registry)
    for place, value in (('ki"tch\\en\n', 21.5), ("hall", math.nan)):
        gauge.labels(place).set(value)
    pages = [generate_latest(registry), generate_openmetrics(registry)]
    for number, page in enumerate(pages):
        path = logs.write(f"page{number}.txt", page)
        assert "openmetrics" == find_importer(path).name
        logs.import_log(path, run=f"run{number}")
    expected = {
        (sample.labels["place"], repr(sample.value))
        for family in text_string_to_metric_families(pages[0].decode())
        for sample in family.samples
    }
    for number in range(2):
        rows = logs.query("SELECT labels, value FROM samples WHERE run = $run", run=f"run{number}")
        assert expected == {(json.loads(row["labels"])["place"], repr(row["value"])) for row in rows}


def scrapes(*moments):
    """Return a dump of a rank with the scraped (second, step, loss, norm)."""
    common = 'run="live", rank="3", job="rankscope", instance="live/3"'
    series = {
        f'{{__name__="rankscope_loss", {common}}}': 2,
        f'{{__name__="rankscope_step", {common}}}': 1,
        f'{{__name__="rankscope_kind_step", kind="exp_avg", {common}}}': 1,
        f'{{__name__="rankscope_tensor_value", kind="exp_avg", tensor="w", op="norm", {common}}}': 3,
        f'{{__name__="rankscope_rule_firing", rule="x", kind="exp_avg", {common}}}': 1,
    }
    return "".join(f"{name} {row[place]} {row[0] * 1000}\n" for name, place in series.items() for row in moments)


def test_dump_of_several_runs_becomes_samples(logs):
    series = [f'rankscope_loss{{run="{run}",rank="0",instance="h:1"}}' for run in "ab"]
    logs.import_log(logs.write("dump.txt", "".join(f"{name} 1 1700000000\n" for name in series)))
    samples = [("h:1", "rankscope_loss", f'{{"rank":"0","run":"{run}"}}') for run in "ab"]

    assert 0 == logs.value("SELECT count(*) FROM scalars")
    assert samples == [(*row.values(),) for row in logs.query("SELECT target, metric, labels FROM samples ORDER BY 3")]
    assert "metrics of 2 runs (a, b)" in logs.value("SELECT reason FROM runs")


def test_grown_dump_adds_only_new_rows(logs):
    """A later dump has more samples after each series, not only at its end."""
    moments = [(1700000000 + 5 * step, step, 1.0 / step, 1.0) for step in range(1, 9)]
    counts = [logs.import_log(logs.write("dump.txt", scrapes(*moments[:end]))).rows_stored for end in (4, 6, 8, 8)]

    assert 8 == logs.value("SELECT count(*) FROM tensor_stats") == logs.value("SELECT count(*) FROM scalars")
    assert 0 == counts[-1]
    assert list(range(1, 9)) == [row["step"] for row in logs.query("SELECT step FROM scalars ORDER BY step")]


def test_dump_of_a_real_prometheus_is_imported(logs, require_server):
    promtool = require_server("promtool", "prometheus")
    values = [1.5, math.nan, math.inf, -math.inf, 1e-300, 0.1]
    texts = [{"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value)) for value in values]
    lines = [f'm{{a="q\\"u\\\\o\\nte",b="学"}} {value} {1700000000 + 15 * i}' for i, value in enumerate(texts)]
    source = logs.write("in.txt", "# TYPE m gauge\n" + "\n".join(lines) + "\n# EOF\n")
    folder = logs.folder / "tsdb"
    subprocess.run([promtool, "tsdb", "create-blocks-from", "openmetrics", source, folder], check=True, stdout=-3)
    (folder / "wal").mkdir()
    dumped = subprocess.run([promtool, "tsdb", "dump", folder], check=True, capture_output=True).stdout
    logs.import_log(logs.write("dump.txt", dumped), run="dumped")
    logs.import_log(source, run="direct")
    told = (
        "SELECT epoch_us(ts) AS us, metric, labels, value::VARCHAR AS value FROM samples WHERE run = $run ORDER BY ts"
    )

    assert logs.query(told, run="direct") == logs.query(told, run="dumped")
    assert 6 == len(logs.query(told, run="dumped"))


def test_unterminated_label_loses_one_line_without_delay(logs):
    long = 'a{b="' + "x" * 300_000 + "\n"
    began = time.monotonic()
    report = logs.import_log(logs.write("m.prom", "# TYPE a gauge\n" + long * 5 + "c 1\n"))

    assert (5, 1) == (report.malformed, report.records)
    assert time.monotonic() - began < 20


def test_labels_with_other_line_separators_hide_no_sample(tmp_path):
    """Form feeds, group separators and similar characters are text in a label; a file may have CRLF line ends."""
    odd = "".join(
        f'norm{{tensor="a{mark}b{mark}c"}} {number}\n' for number, mark in enumerate("\x0b\x0c\x1c\x1d\x85\u2028")
    )
    for text in (odd, odd.replace("\n", "\r\n")):
        assert OpenMetrics().detect(tmp_path / "x", text.encode()).confidence > 0.8
