"""Arrival numbers, silence of ranks, lost records, and reports of dead processes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np

from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.detect.history import History
from rankscope_ingest.detect.record_sink import RecordSink
from rankscope_ingest.detect.run_monitor import RunMonitor
from rankscope_ingest.record_channel.validate import RowContext, ValidBody
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.service.pipeline import make_batcher

BODY_UP_TO_9 = ValidBody(
    context=RowContext(run="r", attempt=0, rank=0, incarnation="first"),
    first_ordinal=1,
    seqs=np.arange(4, 10),
    columns={},
    statistics=(),
    nested={},
    rows=6,
    missing=(),
    last_step=9,
    last_ts=9,
)


def run_monitor(wall, last_ordinal=0, clock=lambda: 0.0):
    config = ServiceConfig.model_validate({"store": {"path": "nowhere"}})
    return RunMonitor(
        config,
        History(last_ordinal=last_ordinal),
        batcher=make_batcher(config),
        metrics=ServiceMetrics(),
        poll_now=lambda run, rank: None,
        clock=clock,
        wall=wall,
    )


def process(incarnation, rank=0, world_size=1):
    return Registration(
        run="r",
        rank=rank,
        world_size=world_size,
        local_rank=0,
        host="h",
        pid=1,
        incarnation=incarnation,
        launch_id="l",
        url="http://127.0.0.1:1",
    )


def refuse_from(start, monitor, now, incarnation):
    """Refuse connections to one process for 60 s while all others answer; return the time at which it is abandoned."""
    target = monitor.registry.get(incarnation)
    for second in range(start, start + 60):
        now[0] = float(second)
        for other in monitor.registry.targets:
            if other is not target:
                RecordSink(monitor).on_answer(other)
        if not target.is_gone:
            RecordSink(monitor).on_failure(target, FetchError("refused", "connection refused"))
        monitor.update_runs()
    return target.gone_at


def test_ordinals_are_the_time_and_increase_even_if_the_clock_goes_back():
    moments = iter([1000, 1000, 400, 5000])
    monitor = run_monitor(lambda: next(moments))
    counts = (3, 2, 1, 1)
    firsts = [monitor.ordinals(count) for count in counts]

    assert (1000, 5000) == (firsts[0], firsts[-1])
    assert all(later >= first + count for (first, later), count in zip(pairwise(firsts), counts, strict=False))


def test_ordinals_after_a_restart_are_above_those_in_the_store():
    monitor = run_monitor(lambda: 400, last_ordinal=1000)

    assert [1001, 1003] == [monitor.ordinals(2), monitor.ordinals(1)]


def test_pause_of_the_service_does_not_count_as_silence_of_a_rank():
    now = [0.0]
    monitor = run_monitor(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    monitor.accept(process("i"), ())
    failures = []
    for moment in (0, 1, 2, 602, 603, 624, 649):  # stopped for ten minutes; no rank reports afterwards
        for second in range(int(now[0]) + 1, moment) if moment > 603 else ():
            now[0] = float(second)
            failures += [(second, failure) for failure in monitor.update_runs()]
        now[0] = float(moment)
        failures += [(moment, failure) for failure in monitor.update_runs()]

    assert [625] == [moment for moment, _ in failures]
    assert "failed" == monitor.runs.get(("r", 0)).state


def test_process_killed_after_its_exit_report_is_not_polled_forever():
    now = [0.0]
    monitor = run_monitor(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    monitor.accept(process("i"), ())
    monitor.runs.exited(("r", 0), 0, "completed", None, incarnation="i")
    left_at = refuse_from(1, monitor, now, "i")

    assert 10.0 == left_at
    assert "completed" == monitor.runs.get(("r", 0)).state


def test_records_lost_with_a_replaced_process_are_counted():
    """The next process of a rank may register before the service has found that the first one is dead."""
    now = [0.0]
    monitor = run_monitor(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    for rank in range(2):
        monitor.accept(process(f"first-{rank}", rank, world_size=2), ())
    killed = monitor.registry.get("first-0")
    killed.cursor, killed.head = 3, 9
    now[0] = 1.0
    RecordSink(monitor).on_failure(killed, FetchError("refused", "connection refused"))
    monitor.accept(process("second-0", 0, world_size=2), ())
    refuse_from(2, monitor, now, "first-0")

    assert (0, 0) == (killed.attempt, monitor.registry.get("second-0").attempt)
    assert (6, True) == (killed.records_lost, killed.is_gone)


def test_spool_found_hours_later_keeps_attempt_and_undoes_lost_records():
    """A host is back: its next rank serves the spool of the dead process long after the target was removed."""
    now = [0.0]
    monitor = run_monitor(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    first = monitor.accept(process("first"), ()).target
    first.cursor, first.head = 3, 9
    refuse_from(1, monitor, now, "first")
    second = monitor.accept(process("second"), ()).target
    for second_of_day in range(61, 800):
        now[0] = float(second_of_day)
        RecordSink(monitor).on_answer(second)
        monitor.update_runs()
    dropped = monitor.registry.get("first")
    successor = monitor.accept(replace(process("first"), served_by="second", state="draining", head=9), ()).target
    successor.cursor = 3  # the watermark of the store
    found = monitor.losses.of_body(successor, BODY_UP_TO_9)

    assert None is dropped
    assert (0, 1) == (successor.attempt, second.attempt)
    assert [-6] == [json.loads(row["details"])["records"] for row in found]
    assert 0 == monitor.meter(("r", 0)).records_lost


def test_first_dead_process_is_named_when_all_spools_are_read():
    """The spool of another host may be found when the run has failed already."""
    now = [0.0]
    monitor = run_monitor(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    named = []
    for rank, died_at in ((0, 600), (1, 10)):
        dead = replace(
            process(f"dead-{rank}", rank, world_size=2), served_by="successor", state="draining", started_at=1
        )
        target = monitor.accept(dead, ()).target
        now[0] += 1000.0
        target.last_ts = 10**15 - 10**12 + died_at * 10**6
        RecordSink(monitor).on_drained(target)
        monitor.update_runs()
        named.append(monitor.runs.get(("r", 0)).culprit)

    assert [None, 1] == named
