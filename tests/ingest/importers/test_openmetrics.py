"""Tests of pages and dumps of real programs, of grown dumps and large lines; `cases` has the forms of lines."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from rankscope_ingest.importers import find_importer
from rankscope_ingest.importers.openmetrics import OpenMetrics
from rankscope_ingest.importers.openmetrics.lines import LineError, parse_series, parse_value, split_series


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
    text = "".join(f'rankscope_loss{{run="{run}",rank="0"}} 1 1700000000\n' for run in "ab")
    logs.import_log(logs.write("dump.txt", text))

    assert (0, 2) == (logs.value("SELECT count(*) FROM scalars"), logs.value("SELECT count(*) FROM samples"))
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
    lines = [f'm{{a="q\\"u\\\\o\\nte",b="学"}} {_om(value)} {1700000000 + 15 * i}' for i, value in enumerate(values)]
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


def _om(value):
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("# TYPE a gauge\na 1\n# EOF\n", 0.95),
        ("a 1\nb 2\n", 0.85),
        ('{__name__="up", job="x"} 1 1700000000000\n', 0.85),
        ('{"step": 1, "loss": 2.5}\n', 0.0),
        ("step 1 loss 2.5\nstep 2 loss 2.4\n", 0.0),
        (" iteration 1/ 10 | lm loss: 1.0 |\n", 0.0),
        ("", 0.0),
        ("# a comment\n", 0.0),
    ],
)
def test_detection_by_content(tmp_path, text, confidence):
    assert confidence == OpenMetrics().detect(tmp_path / "x", text.encode()).confidence


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


@given(st.lists(st.text(alphabet=st.sampled_from('am_{}="\\,:# \t01.eE+-NaInf学\x00'), max_size=40), max_size=5))
def test_fuzzed_lines_never_crash_the_parser(lines):
    """Fuzz test with the tokens of the grammar."""
    for line in lines:
        with contextlib.suppress(LineError):
            series, rest = split_series(line)
            parse_value(rest), parse_series(series)
