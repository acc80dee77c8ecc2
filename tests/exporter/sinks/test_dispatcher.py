"""Tests of a failing sink: its records are lost and counted, it is reported once, and everything else continues."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from tests.exporter.sinks.records import FINITE, entry, identity, record

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sinks.base import LONGEST_PAUSE, Sink, Sinks
from rankscope_exporter.sinks.csv_msprobe import Csv, CsvOptions


@dataclass(frozen=True)
class NoOptions:
    """Options without a setting."""


class Failing(Sink):
    """A sink that fails while `ill` is true and records the steps that it receives."""

    name = "failing"
    options_class = NoOptions

    def __init__(self, name: str = "failing", *, ill: bool = True) -> None:
        self.name = name
        self.offered: list[int | None] = []
        self.closed = 0
        self.ill = ill

    def put(self, record: StepRecord) -> None:
        self.offered.append(record.step)
        if self.ill:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed += 1
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("healthy", "steps", "offered"),
    [((), 20, [1, 3, 6, 11]), ((6, 7, 9, 10), 11, [1, 3, 6, 7, 8, 10])],
    ids=["never", "recovered"],
)
def test_failing_sink_is_retried_after_growing_pauses_until_it_recovers(healthy, steps, offered):
    sink = Failing()
    sinks = Sinks([sink], ErrorBoundary())
    for step in range(1, steps):
        sink.ill = step not in healthy
        sinks.put(record(step))

    assert offered == sink.offered
    assert {"sink_failing": steps - 1 - len({*offered} & {*healthy})} == sinks.missed


def test_sink_that_fails_for_days_is_still_retried():
    sink = Failing()
    sinks = Sinks([sink], ErrorBoundary())
    for step in range(5 * LONGEST_PAUSE):
        sinks.put(record(step))

    assert LONGEST_PAUSE + 1 == sink.offered[-1] - sink.offered[-2]


def test_failing_sink_is_reported_once_and_others_continue(caplog):
    boundary, hearing = ErrorBoundary(), Failing("hearing", ill=False)
    sinks = Sinks([Failing(), hearing], boundary)
    for step in range(1, 7):
        sinks.put(record(step))
    sinks.close()

    assert [1, 2, 3, 4, 5, 6] == hearing.offered
    assert 1 == hearing.closed
    assert ["sink failing", "sink hearing"] == [text.getMessage().split(" failed")[0] for text in caplog.records]
    assert 3 + 2 == boundary.count


def test_forked_child_writes_no_sink(tmp_path):
    sinks = Sinks([Csv(CsvOptions(folder=str(tmp_path)), identity())], ErrorBoundary())
    sinks.put(record(1, (entry(), FINITE)))
    child = os.fork()
    if child == 0:
        try:
            sinks.put(record(2, (entry(), FINITE)))
            sinks.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    assert ["grad_reduced_0-0.csv"] == [path.name for path in tmp_path.glob("*/*")]


@pytest.mark.parametrize("blocked", ["out", "out/below/it"])
def test_sink_recovers_when_its_folder_can_be_created(tmp_path, blocked):
    """A file has the name of the folder. After its removal, rows are written."""
    in_the_way = tmp_path / "out"
    in_the_way.write_text("in the way")
    boundary = ErrorBoundary()
    sinks = Sinks([Csv(CsvOptions(folder=str(tmp_path / blocked)), identity())], boundary)
    for step in (1, 2):
        sinks.put(record(step, (entry(), FINITE)))
    in_the_way.unlink()
    sinks.put(record(3, (entry(), FINITE)))

    assert 1 == boundary.count
    assert {"sink_csv": 2} == sinks.missed
    assert ["grad_reduced_2-2.csv"] == [path.name for path in (tmp_path / blocked).glob("*/*")]
