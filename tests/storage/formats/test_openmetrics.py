"""OpenMetrics text, read by the strict parser of prometheus_client and by the real promtool."""

from __future__ import annotations

import datetime as dt
import math
import re
import subprocess

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.storage.formats.conftest import START, row, scalar, tensor

from rankscope_storage.base.errors import ExportError


def samples(target):
    """Return {(name, labels without the usual): [(time, value)]} as a strict reader has them."""
    found = {}
    for family in text_string_to_metric_families(target.read_text(encoding="utf-8")):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in {"run", "job", "instance"}}
            moment = sample.timestamp.sec + sample.timestamp.nsec / 1e9
            found.setdefault((sample.name, tuple(sorted(labels.items()))), []).append((moment, float(sample.value)))
    return found


NOON = START.timestamp()


def test_history_has_the_names_and_labels_of_live_data(shelf):
    shelf.put(
        scalars=[
            *(scalar(1, 2.5), scalar(2, 2.25), scalar(2, 0.5, "accuracy")),
            scalar(2, 0.1, "learning_rate", labels='{"group":"a"}'),
            scalar(2, 512.0, "tokens_total", unit="tokens"),
        ],
        tensor_stats=[tensor(2, norm=1.5, nans=0, norm_baseline=1.25)],
    )
    target, report = shelf.export("openmetrics")
    found = samples(target)
    rank, kind = ("rank", "0"), ("kind", "grad_reduced")
    of_tensor = (kind, ("op", "norm"), rank, ("tensor", "w"))
    expected = {
        ("rankscope_loss", (rank,)): [(NOON + 1, 2.5), (NOON + 2, 2.25)],
        ("rankscope_learning_rate", (("group", "a"), rank)): [(NOON + 2, 0.1)],
        ("rankscope_tokens_total", (rank,)): [(NOON + 2, 512.0)],
        ("rankscope_scalar", (("name", "accuracy"), rank)): [(NOON + 2, 0.5)],
        ("rankscope_tensor_value", of_tensor): [(NOON + 2, 1.5)],
        ("rankscope_tensor_baseline", of_tensor): [(NOON + 2, 1.25)],
        ("rankscope_step", (rank,)): [(NOON + 1, 1.0), (NOON + 2, 2.0)],
        ("rankscope_kind_step", (kind, rank)): [(NOON + 2, 2.0)],
    }

    assert expected.items() <= found.items()
    assert 'rankscope_loss{instance="r/0",job="rankscope",run="r",rank="0"} 2.5 1772366401\n' in target.read_text()
    assert {"tensor_stats": 1, "scalars": 5, "samples": 0} == report.rows


def test_openmetrics_format_is_valid(shelf):
    """Families in one piece with their TYPE first, a UNIT only where the name ends in it, `# EOF` last."""
    shelf.put(scalars=[scalar(step, 1.0, name) for step in (1, 2) for name in ("step_seconds", "tokens_total", "loss")])
    target, _ = shelf.export("openmetrics")
    text = target.read_text(encoding="utf-8")
    heads = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)

    assert text.endswith("\n# EOF\n")
    assert len(heads) == len(set(heads))
    assert "# TYPE rankscope_tokens counter\n# UNIT rankscope_tokens tokens\n" in text
    assert "# TYPE rankscope_step gauge\n# HELP" in text
    assert "# UNIT rankscope_step_seconds seconds\n" in text


def test_names_are_escaped_and_all_numbers_are_exported(shelf):
    odd = 'a"b\\c\nd{}, 学=1'
    values = [math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.1]
    shelf.put(scalars=[scalar(step, value, odd, run=odd) for step, value in enumerate(values, 1)])
    target, _ = shelf.export("openmetrics", run=odd)
    found = samples(target)

    assert repr(values) == repr([value for _, value in found["rankscope_scalar", (("name", odd), ("rank", "0"))]])
    assert "NaN" in target.read_text()
    assert " +Inf " in target.read_text()


def test_steps_within_one_second_get_successive_milliseconds(shelf):
    """A log has times in whole seconds; Prometheus keeps one sample per millisecond and series."""
    later = START + dt.timedelta(milliseconds=1, microseconds=500)
    shelf.put(scalars=[scalar(step, float(step), ts=later if step == 4 else START) for step in (1, 2, 3, 4)])
    target, report = shelf.export("openmetrics")
    found = samples(target)["rankscope_loss", (("rank", "0"),)]

    assert [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)] == [(round((time - NOON) * 1000), value) for time, value in found]
    assert {} == report.omitted


def test_only_the_first_sample_of_a_time_is_written(shelf):
    shelf.put(scalars=[scalar(1, 1.0), scalar(1, 2.0)])
    target, report = shelf.export("openmetrics")

    assert [(NOON + 1, 1.0)] == samples(target)["rankscope_loss", (("rank", "0"),)]
    assert {"samples of one series at one time: only the first is written": 1} == report.omitted


def test_value_invalid_for_a_counter_is_a_gauge(shelf):
    shelf.put(scalars=[scalar(s, v, "tokens_total", unit="tokens") for s, v in enumerate([1, -1, math.nan], 1)])
    found = samples(shelf.export("openmetrics")[0])
    gauge = "rankscope_scalar", (("name", "tokens_total"), ("rank", "0"), ("unit", "tokens"))

    assert [(NOON + 1, 1.0)] == found["rankscope_tokens_total", (("rank", "0"),)]
    assert repr([(NOON + 2, -1.0), (NOON + 3, math.nan)]) == repr(found[gauge])


def test_rows_without_time_or_metric_are_counted(shelf):
    labels = '{"bad-name":"x"}'
    shelf.put(
        scalars=[scalar(1, 1.0, ts=None), scalar(1, 1.0)],
        events=[row(type="note")],
        samples=[
            row(target="t", metric="up", value=1.0, labels=labels),
            row(target="t", metric="no metric", value=1.0),
            row(target="t", metric="up", value=0.0, labels='{"a":"b"}'),
        ],
    )
    target, report = shelf.export("openmetrics")

    assert [(NOON + 1, 0.0)] == samples(target)["up", (("a", "b"),)]
    assert {
        "rows without a time": 1,
        "events: not a number over time": 1,
        "samples of 'no metric': not a valid metric name": 1,
        "samples whose labels cannot be written": 1,
    } == report.omitted


def test_log_without_times_and_a_folder_as_target_are_rejected(shelf):
    shelf.put(scalars=[scalar(1, 1.0, ts=None)])
    with pytest.raises(ExportError, match="logs without times"):
        shelf.export("openmetrics")
    shelf.put(scalars=[scalar(1, 1.0)])
    with pytest.raises(ExportError, match="is a folder: name a file"):
        shelf.export("openmetrics", "store")


def test_promtool_creates_blocks_from_the_file(shelf, require_server):
    """Every sample arrives in the millisecond it belongs to, with all its digits."""
    promtool = require_server("promtool", "prometheus")
    times = {step: START + dt.timedelta(milliseconds=1373 * step) for step in range(1, 500)}
    shelf.put(
        scalars=[scalar(step, 1 / 3 * step, ts=ts, rank=rank) for step, ts in times.items() for rank in (0, 1)],
        tensor_stats=[tensor(step, 'o"dd\n\\', ts=ts) for step, ts in times.items()],
    )
    target, _ = shelf.export("openmetrics")
    folder = shelf.folder / "tsdb"
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", target, folder]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == made.returncode, made.stderr
    (folder / "wal").mkdir()
    dumped = subprocess.run([promtool, "tsdb", "dump", folder], capture_output=True, text=True, check=True).stdout
    loss = re.findall(r'^\{__name__="rankscope_loss".*rank="1".*\} (\S+) (\d+)$', dumped, re.MULTILINE)

    assert [(1 / 3 * n, NOON * 1000 + 1373 * n) for n in times] == [(float(v), int(t)) for v, t in loss]
    assert 499 == dumped.count(r'__name__="rankscope_tensor_value"')
