"""What becomes of what is heard: the order of arrival, silence, losses, and words of the dead."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np

from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.detect.record_sink import RecordSink
from rankscope_ingest.detect.run_monitor import RestoredState, RunMonitor
from rankscope_ingest.record_channel.validate import RowContext, ValidBody
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.models import Patience
from rankscope_ingest.runs.tracker import RunTracker, Timing
from rankscope_ingest.service.wiring import make_batcher
from rankscope_ingest.targets.registry import AttemptNumbers, Registry

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


def collector(wall, last_ordinal=0, clock=lambda: 0.0):
    patience = Patience(refused_after_seconds=10, failed_after_seconds=25)
    return RunMonitor(
        registry=Registry(networks=[], heartbeat_seconds=5, ttl_seconds=15, attempts=AttemptNumbers()),
        runs=RunTracker(Timing(patience=patience, stalled_after_seconds=300, stalled_in_phase_after_seconds=1800)),
        incidents=IncidentTracker(group_wait_seconds=1, quiet_steps=20),
        batcher=make_batcher(ServiceConfig.model_validate({"store": {"path": "nowhere"}})),
        metrics=ServiceMetrics(),
        clock=clock,
        wall=wall,
        restored=RestoredState(last_ordinal=last_ordinal),
        urge=lambda run, rank: None,
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


def refuse_from(start, book, now, incarnation):
    """Let nobody listen where a process was, for a minute, while all others are heard; return when it was left."""
    target = book.registry.get(incarnation)
    for second in range(start, start + 60):
        now[0] = float(second)
        for other in book.registry.targets:
            if other is not target:
                RecordSink(book).on_answer(other)
        if not target.is_gone:
            RecordSink(book).on_failure(target, FetchError("refused", "nobody listens"))
        book.update_runs()
    return target.gone_at


def test_arrival_numbers_are_the_time_and_rise_though_the_clock_stands_still_or_goes_back():
    moments = iter([1000, 1000, 400, 5000])
    book = collector(lambda: next(moments))
    counts = (3, 2, 1, 1)
    firsts = [book.ordinals(count) for count in counts]

    assert (1000, 5000) == (firsts[0], firsts[-1])
    assert all(later >= first + count for (first, later), count in zip(pairwise(firsts), counts, strict=False))


def test_arrival_numbers_go_on_above_the_store_though_the_clock_was_set_back_before_the_restart():
    book = collector(lambda: 400, last_ordinal=1000)

    assert [1001, 1003] == [book.ordinals(2), book.ordinals(1)]


def test_silence_while_the_service_itself_was_stopped_is_held_against_nobody():
    now = [0.0]
    book = collector(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    book.accept(process("i"), ())
    told = []
    for moment in (0, 1, 2, 602, 603, 624, 649):  # stopped for ten minutes, and then nothing is heard any more
        for second in range(int(now[0]) + 1, moment) if moment > 603 else ():
            now[0] = float(second)
            told += [(second, failure) for failure in book.update_runs()]
        now[0] = float(moment)
        told += [(moment, failure) for failure in book.update_runs()]

    assert [625] == [moment for moment, _ in told]
    assert "failed" == book.runs.get(("r", 0)).state


def test_a_process_killed_after_its_last_word_and_before_it_drained_is_not_asked_for_ever():
    now = [0.0]
    book = collector(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    book.accept(process("i"), ())
    book.runs.exited(("r", 0), 0, "completed", None, incarnation="i")
    left_at = refuse_from(1, book, now, "i")

    assert 10.0 == left_at
    assert "completed" == book.runs.get(("r", 0)).state


def test_what_is_lost_with_a_process_is_counted_though_another_one_has_its_place_already():
    """The next process of a rank may register before anybody has found out that the first one is dead."""
    now = [0.0]
    book = collector(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    for rank in range(2):
        book.accept(process(f"first-{rank}", rank, world_size=2), ())
    killed = book.registry.get("first-0")
    killed.cursor, killed.head = 3, 9
    now[0] = 1.0
    RecordSink(book).on_failure(killed, FetchError("refused", "nobody listens"))
    book.accept(process("second-0", 0, world_size=2), ())
    refuse_from(2, book, now, "first-0")

    assert (0, 0) == (killed.attempt, book.registry.get("second-0").attempt)
    assert (6, True) == (killed.records_lost, killed.is_gone)


def test_a_dead_process_that_is_heard_of_hours_later_keeps_its_attempt_and_what_was_counted_as_lost_with_it():
    """A host that was down is back: the next rank there hands over what was left, long after the target was dropped."""
    now = [0.0]
    book = collector(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    first = book.accept(process("first"), ()).target
    first.cursor, first.head = 3, 9
    refuse_from(1, book, now, "first")
    second = book.accept(process("second"), ()).target
    for second_of_day in range(61, 800):
        now[0] = float(second_of_day)
        RecordSink(book).on_answer(second)
        book.update_runs()
    dropped = book.registry.get("first")
    heir = book.accept(replace(process("first"), served_by="second", state="draining", head=9), ()).target
    heir.cursor = 3  # as the store says
    found = book.losses.of_body(heir, BODY_UP_TO_9)

    assert None is dropped
    assert (0, 1) == (heir.attempt, second.attempt)
    assert [-6] == [json.loads(row["details"])["records"] for row in found]
    assert 0 == book.meter(("r", 0)).records_lost


def test_of_dead_processes_the_first_is_named_once_all_ranks_are_known():
    """The spool of another host may be found when the run is said to have failed already."""
    now = [0.0]
    book = collector(lambda: 10**15 + int(now[0] * 1e6), clock=lambda: now[0])
    named = []
    for rank, died_at in ((0, 600), (1, 10)):
        dead = replace(process(f"dead-{rank}", rank, world_size=2), served_by="heir", state="draining", started_at=1)
        target = book.accept(dead, ()).target
        now[0] += 1000.0
        target.last_ts = 10**15 - 10**12 + died_at * 10**6
        RecordSink(book).on_drained(target)
        book.update_runs()
        named.append(book.runs.get(("r", 0)).culprit)

    assert [None, 1] == named
