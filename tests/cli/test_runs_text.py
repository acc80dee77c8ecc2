"""The list of runs is one line per run at the usual widths of a terminal."""

import datetime as dt

import pyarrow as pa
import pytest

from rankscope.output.runs_text import run_lines, shortened

STARTED = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.UTC)


def row(**values):
    found = {"run": "gpt-7b-lr3e-4-seed1-2026-03-01T12-00-00", "state": "completed", "attempts": 3, "ranks": 1024}
    found |= {"last_step": 1_200_000, "planned_steps": 1_500_000, "started_at": STARTED, "seconds": 273_600.0}
    found |= {"source_kind": "live", "reason": "rank 1 of host-17 vanished: no heartbeat for 30 s"}
    return found | {"tags": '{"team": "ours"}', "note": "warm-up too short\nsee r2"} | values


@pytest.mark.parametrize("width", [80, 120, 160, 200])
def test_every_run_is_one_line_that_fits(width):
    lines = list(run_lines(pa.Table.from_pylist([row(), row(run="b", state="running")]), width))

    assert 3 == len(lines)
    assert max(map(len, lines)) <= width
    assert "1,200,000/1,500,000" in lines[1]
    assert "3 d 4 h" in lines[1]


def test_a_wider_terminal_shows_more_columns():
    table = pa.Table.from_pylist([row()])
    shown = [next(run_lines(table, width)).split() for width in (80, 130, None)]

    assert ["run", "state", "steps", "ranks", "started", "duration"] == shown[0]
    assert [*shown[0], "attempts"] == shown[1]
    assert [*shown[1], "reason", "tags", "note"] == shown[2]


def test_unknown_values_are_empty():
    unknown = dict.fromkeys(row()) | {"run": "r", "attempts": 0, "ranks": 0}
    lines = list(run_lines(pa.Table.from_pylist([unknown, row()])))

    assert ["r", "unknown"] == lines[1].split()


@pytest.mark.parametrize(("text", "most", "short"), [("abcdefgh", 8, "abcdefgh"), ("abcdefghi", 8, "abc…fghi")])
def test_a_long_name_keeps_both_ends(text, most, short):
    assert short == shortened(text, most)
