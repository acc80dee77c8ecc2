"""Tests that OpenMetrics text, pages and dumps become samples, and Rankscope metrics become rows of their datasets."""

from __future__ import annotations

import math
import random
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tests.properties import examples

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer
from rankscope_ingest.importers.openmetrics import OpenMetrics
from rankscope_ingest.importers.openmetrics.lines import LineError, parse_series, parse_value, split_series

SAMPLES = "SELECT epoch_us(ts) AS us, target, metric, labels, value FROM samples ORDER BY seq"


def parse(line):
    series, rest = split_series(line)
    value, ts = parse_value(rest)
    parsed = parse_series(series)
    return parsed.metric, parsed.labels, value, ts


def test_samples_keep_metric_labels_target_and_time(logs):
    text = (
        "# TYPE up gauge\n"
        'up{instance="a:1",job="node"} 1 1700000000.5\n'
        "# TYPE load unknown\n"
        "load 0.25 1700000001\n"
        'odd{a="x\\"y\\\\z\\n{}, #"} NaN 1700000002.000001\n'
        'low{instance="a:1"} -Inf 1700000003\n'
        "# EOF\n"
    )
    report = logs.import_log(logs.write("metrics.txt", text))

    assert [
        (1700000000500000, "a:1", "up", '{"job":"node"}', "1.0"),
        (1700000001000000, "", "load", None, "0.25"),
        (1700000002000001, "", "odd", '{"a":"x\\"y\\\\z\\n{}, #"}', "nan"),
        (1700000003000000, "a:1", "low", None, "-inf"),
    ] == [(row["us"], row["target"], row["metric"], row["labels"], repr(row["value"])) for row in logs.query(SAMPLES)]
    assert ("openmetrics", 4, 0) == (report.source_kind, report.records, report.malformed)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('up{a="b"} 1 1700000000', ("up", {"a": "b"}, 1.0, 1700000000000000)),
        ('up{a="b"} 1 1700000000000', ("up", {"a": "b"}, 1.0, 1700000000000000)),  # the older format's milliseconds
        ('{__name__="up", a="b"} 1 1700000000000', ("up", {"a": "b"}, 1.0, 1700000000000000)),  # promtool tsdb dump
        ('{"up.time",a="b"} 1', ("up.time", {"a": "b"}, 1.0, None)),  # Prometheus 3
        ('{"up",  "la bel" = "b",} 1', ("up", {"la bel": "b"}, 1.0, None)),
        ("up 1", ("up", {}, 1.0, None)),
        ("up\t1", ("up", {}, 1.0, None)),
        ("up{} +Inf", ("up", {}, math.inf, None)),
        ('a_bucket{le="1"} 3 # {trace="x}"} 0.5 1700000000', ("a_bucket", {"le": "1"}, 3.0, None)),
        (r'up{a="\t\u5b66\x41\q"} 1', ("up", {"a": "\t学A\\q"}, 1.0, None)),  # Go's escapes in dumps
        ("up 1e400", ("up", {}, math.inf, None)),
    ],
)
def test_lines_of_all_supported_writers_are_parsed(line, expected):
    assert expected == parse(line)


@pytest.mark.parametrize(
    "line",
    ["up", "up{", 'up{a="b"', 'up{a="b"}', "up{a=b} 1", "up one", "up 1_0", "up 1 2 3", 'up{a="1",a="2"} 1', "1up 1",
     'up{a="b"} 1 nan', 'up{a="b"} 1 1e30', "{} 1", '{a="b"} 1', 'up{"x"} 1', "up 0x10"],
)  # fmt: skip
def test_lines_that_are_no_samples_are_rejected(line):
    with pytest.raises(LineError):
        parse(line)


def test_bad_lines_are_counted_with_their_numbers(logs):
    report = logs.import_log(logs.write("m.prom", "# TYPE a gauge\na 1\nb{ 2\nc 3\n\xff\n# EOF\nd 4\n"))

    assert [3, 5, 7] == [fault.line for fault in report.faults]
    assert ["a", "c", "d"] == [row["metric"] for row in logs.query(SAMPLES)]


@pytest.mark.usual(2)
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_nul_bytes_within_a_label_are_kept_and_holes_are_skipped(logs, count):
    nuls = "\0" * count
    text = (
        f'up{{a="x{nuls}y"}} 1 1700000000\nup{{a="z{nuls}"}} 2 1700000001\n{nuls}low{{a="torn{nuls}low 3 1700000002\n'
    )
    report = logs.import_log(logs.write("metrics.txt", text))

    found = [(row["metric"], row["labels"], row["value"]) for row in logs.query(SAMPLES)]
    assert [
        ("up", canonical_labels({"a": f"x{nuls}y"}), 1.0),
        ("up", canonical_labels({"a": f"z{nuls}"}), 2.0),
        *[("low", None, 3.0)] * (count > 1),
    ] == found
    assert 1 == report.malformed


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
    import json

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


def test_metrics_of_a_rank_become_rows_of_their_datasets(logs):
    """A step that was scraped three times is one row; a decreasing step is another attempt."""
    first = 1700000000
    moments = [(first, 1, 2.5, 9.0), (first + 5, 1, 2.5, 9.0), (first + 10, 4, 2.0, 8.0), (first + 15, 2, 2.25, 7.0)]
    logs.import_log(logs.write("dump.txt", scrapes(*moments)))

    assert [(0, 1, 2.5), (0, 4, 2.0), (1, 2, 2.25)] == [
        tuple(row.values())
        for row in logs.query("SELECT attempt, step, value FROM scalars WHERE name = 'loss' AND rank = 3 ORDER BY seq")
    ]
    assert [(0, 1, "w", 9.0), (0, 4, "w", 8.0), (1, 2, "w", 7.0)] == [
        tuple(row.values())
        for row in logs.query(
            "SELECT attempt, step, tensor, norm FROM tensor_stats WHERE kind = 'exp_avg' ORDER BY seq"
        )
    ]
    assert [{"metric": "rankscope_rule_firing", "n": 4}] == logs.query(
        "SELECT metric, count(*) AS n FROM samples GROUP BY ALL"
    )


def test_page_of_a_rank_has_planned_steps_and_world_size(logs):
    text = (
        'rankscope_steps_planned{run="r",rank="0"} 500 1700000000\n'
        'rankscope_run_info{run="r",rank="0",world_size="8",host="h"} 1 1700000000\n'
        'rankscope_step{run="r",rank="0"} 7 1700000000\n'
        'rankscope_loss{run="r",rank="0"} 1.5 1700000000\n'
    )
    logs.import_log(logs.write("page.prom", text))

    assert [(500, 8, 7)] == [
        tuple(row.values()) for row in logs.query("SELECT planned_steps, world_size, last_step FROM runs")
    ]


def test_dump_of_several_runs_becomes_samples(logs):
    text = "".join(f'rankscope_loss{{run="{run}",rank="0"}} 1 1700000000\n' for run in "ab")
    logs.import_log(logs.write("dump.txt", text))

    assert (0, 2) == (logs.value("SELECT count(*) FROM scalars"), logs.value("SELECT count(*) FROM samples"))
    assert "metrics of 2 runs (a, b)" in logs.value("SELECT reason FROM runs")


def test_series_with_unknown_rankscope_labels_become_samples(logs):
    lines = [
        'rankscope_tensor_value{run="r",rank="0",kind="k",tensor="t",op="median"} 1',
        'rankscope_tensor_value{run="r",rank="zero",kind="k",tensor="t",op="norm"} 1',
        'rankscope_tensor_value{run="r",rank="0",kind="k",tensor="t",op="norm",index="99999999999"} 1',
        'rankscope_loss{run="r",rank="0",colour="red"} 1',
        "rankscope_loss 1",
    ]
    logs.import_log(logs.write("page.prom", "\n".join(lines)))

    assert 5 == logs.value("SELECT count(*) FROM samples")


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


@pytest.mark.parametrize("content", ["a 1\n".encode("utf-16"), b"\x1f\x8b" + bytes(100), bytes(500)])
def test_files_that_are_no_text_are_rejected_with_the_remedy(logs, content):
    with pytest.raises(IngestError, match=r"convert it first|unpack it first|binary file"):
        logs.import_log(logs.write("metrics.txt", content), kind="openmetrics")


def read(path):
    faults = Faults()
    blocks = list(OpenMetrics().read(path, faults))
    return sum(block.records for block in blocks if isinstance(block, ImportedBlock)), faults


@given(st.lists(st.text(alphabet=st.sampled_from('am_{}="\\,:# \t01.eE+-NaInf学\x00'), max_size=40), max_size=5))
def test_fuzzed_lines_never_crash_the_parser(lines):
    """Fuzz test with the tokens of the grammar."""
    for line in lines:
        try:
            parse(line)
        except LineError:
            continue


@pytest.mark.thorough
def test_mutated_files_never_crash_the_importer(tmp_path):
    """Fuzz test: a dump of a rank with bytes changed, removed and duplicated."""
    rng = random.Random(4)
    sound = scrapes((1700000000, 1, 2.5, 9.0), (1700000005, 2, 2.25, 8.0)).encode()
    path = tmp_path / "dump.txt"
    for _ in range(examples(60)):
        text = bytearray(sound)
        for _ in range(rng.randint(1, 12)):
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 4)] = rng.choice([rng.randbytes(2), b'"', b"{", b"\n", b"}", b"9" * 30])
        path.write_bytes(text.lstrip(b"\x1f\x28P"))
        try:
            read(path)
        except IngestError:
            continue


def test_unterminated_label_loses_one_line_without_delay(logs):
    long = 'a{b="' + "x" * 900_000 + "\n"
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
