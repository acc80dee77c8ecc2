"""A sink that fails loses records, counted and named once; training, the channel and the other sinks go on."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import pytest
from tests.exporter.sinks.records import FINITE, entry, identity, record

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sinks.base import LONGEST_REST, Sink, Sinks
from rankscope_exporter.sinks.csv_msprobe import Csv, CsvOptions


@dataclass(frozen=True)
class NoOptions:
    """Nothing to set."""


class Failing(Sink):
    """Fails as long as `ill` holds, and says which steps it was offered."""

    name = "failing"
    options_class = NoOptions

    def __init__(self) -> None:
        self.offered: list[int | None] = []
        self.closed = 0
        self.ill = True

    def put(self, record: StepRecord) -> None:
        self.offered.append(record.step)
        if self.ill:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed += 1
        raise OSError(28, "No space left on device")


class Hearing(Failing):
    """Takes everything."""

    name = "hearing"

    def __init__(self) -> None:
        super().__init__()
        self.ill = False


def test_a_failing_sink_is_tried_again_less_and_less_often():
    sink = Failing()
    sinks = Sinks([sink], ErrorBoundary())
    for step in range(1, 20):
        sinks.put(record(step))

    assert [1, 3, 6, 11] == sink.offered
    assert {"sink_failing": 19} == sinks.missed


def test_a_sink_that_has_recovered_gets_everything_again():
    sink = Failing()
    sinks = Sinks([sink], ErrorBoundary())
    for step in range(1, 8):
        sink.ill = step < 6
        sinks.put(record(step))
    sink.ill = True
    sinks.put(record(8))
    sink.ill = False
    for step in (9, 10):
        sinks.put(record(step))

    assert [1, 3, 6, 7, 8, 10] == sink.offered
    assert {"sink_failing": 7} == sinks.missed


def test_a_sink_that_fails_for_days_is_still_tried_again():
    sink = Failing()
    sinks = Sinks([sink], ErrorBoundary())
    for step in range(5 * LONGEST_REST):
        sinks.put(record(step))

    assert LONGEST_REST + 1 == sink.offered[-1] - sink.offered[-2]


def test_it_is_named_once_and_the_others_go_on(caplog):
    boundary, hearing = ErrorBoundary(), Hearing()
    sinks = Sinks([Failing(), hearing], boundary)
    with caplog.at_level(logging.ERROR, logger="rankscope"):
        for step in range(1, 7):
            sinks.put(record(step))
        sinks.close()

    assert [1, 2, 3, 4, 5, 6] == hearing.offered
    assert 1 == hearing.closed
    assert ["sink failing", "sink hearing"] == [text.getMessage().split(" failed")[0] for text in caplog.records]
    assert 3 + 2 == boundary.count


def test_a_forked_child_writes_nothing(tmp_path):
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
def test_a_folder_that_cannot_be_made_costs_the_rows_alone(tmp_path, blocked):
    """A file stands where the folder should be; once it is gone, rows are written."""
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
