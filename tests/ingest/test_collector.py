"""The order of arrival, which decides what is the latest version of a run."""

from __future__ import annotations

from itertools import pairwise

from rankscope_contract.channel import Registration
from rankscope_ingest.assembly import make_batcher
from rankscope_ingest.attempts import AttemptBook
from rankscope_ingest.collector import Collector
from rankscope_ingest.config import ServiceConfig
from rankscope_ingest.incidents import IncidentBook
from rankscope_ingest.registry import Registry
from rankscope_ingest.runs import RunBook, Timing
from rankscope_ingest.service_metrics import ServiceMetrics
from rankscope_ingest.vitals import Patience


def collector(wall, last_ordinal=0, clock=lambda: 0.0):
    patience = Patience(refused_after_seconds=10, failed_after_seconds=25)
    return Collector(
        registry=Registry(networks=[], heartbeat_seconds=5, ttl_seconds=15, attempts=AttemptBook()),
        runs=RunBook(Timing(patience=patience, stalled_after_seconds=300, stalled_in_phase_after_seconds=1800)),
        incidents=IncidentBook(group_wait_seconds=1, quiet_steps=20),
        batcher=make_batcher(ServiceConfig.model_validate({"store": {"path": "nowhere"}})),
        metrics=ServiceMetrics(),
        clock=clock,
        wall=wall,
        run_starts={},
        failures_told=(),
        last_ordinal=last_ordinal,
        urge=lambda run, rank: None,
    )


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
    who = Registration(
        run="r",
        rank=0,
        world_size=1,
        local_rank=0,
        host="h",
        pid=1,
        incarnation="i",
        launch_id="l",
        url="http://127.0.0.1:1",
    )
    book.accept(who, ())
    told = []
    for moment in (0, 1, 2, 602, 603, 624, 649):  # stopped for ten minutes, and then nothing is heard any more
        for second in range(int(now[0]) + 1, moment) if moment > 603 else ():
            now[0] = float(second)
            told += [(second, failure) for failure in book.judge()]
        now[0] = float(moment)
        told += [(moment, failure) for failure in book.judge()]

    assert [625] == [moment for moment, _ in told]
    assert "failed" == book.runs.get(("r", 0)).state
