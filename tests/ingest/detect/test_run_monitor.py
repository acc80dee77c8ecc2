"""Arrival numbers, silence of ranks, lost records, and reports of dead processes."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.ingest.builders import registration
from tests.ingest.conftest import encode_records

from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import FetchError
from rankscope_ingest.detect.history import History
from rankscope_ingest.detect.run_monitor import RecordSink, RunMonitor
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.record_channel.bodies import RowContext, check
from rankscope_ingest.record_channel.client import open_stream
from rankscope_ingest.runs.incident import Incident, Symptom
from rankscope_ingest.service.polling import make_batcher


def run_monitor(wall, last_ordinal=0, clock=lambda: 0.0, poll_now=lambda run, rank: None):
    config = ServiceConfig.model_validate({"store": {"path": "nowhere"}})
    return RunMonitor(
        config,
        History(last_ordinal=last_ordinal),
        batcher=make_batcher(config),
        metrics=ServiceMetrics(),
        poll_now=poll_now,
        clock=clock,
        wall=wall,
        steady=lambda: int(clock() * 1e6),
    )


def process(incarnation, rank=0, world_size=1):
    return registration(rank=rank, world_size=world_size, local_rank=0, incarnation=incarnation)


class Host:
    """A host with a clock that can be set. `now` is the true time in seconds."""

    def __init__(self) -> None:
        self.now, self.offset = 0.0, 0.0

    def wall(self) -> int:
        return 10**15 + round((self.now + self.offset) * 1e6)

    def monitor(self) -> RunMonitor:
        return run_monitor(self.wall, clock=lambda: self.now)


def live(host, monitor, incarnation, seconds):
    """Let one process answer each poll for `seconds`."""
    for _ in range(seconds):
        host.now += 1
        RecordSink(monitor).on_answer(monitor.registry.get(incarnation))
        monitor.update_runs()


def vanish(host, monitor, incarnation):
    """Refuse connections to one process for 60 s while all others answer; return its target."""
    target = monitor.registry.get(incarnation)
    for _ in range(60):
        host.now += 1
        for other in monitor.registry.targets:
            if other is not target:
                RecordSink(monitor).on_answer(other)
        if not target.is_gone:
            RecordSink(monitor).on_failure(target, FetchError("refused", "connection refused"))
        monitor.update_runs()
    return target


def events_of(monitor, kind):
    return [row for row in monitor.batcher.take().tables()["events"].to_pylist() if row["type"] == kind]


def test_ordinals_are_the_time_and_increase_even_if_the_clock_goes_back():
    moments = iter([1000, 1000, 400, 5000])
    monitor, restarted = run_monitor(lambda: next(moments)), run_monitor(lambda: 400, last_ordinal=1000)
    counts = (3, 2, 1, 1)
    firsts = [monitor.ordinals(count) for count in counts]

    assert (1000, 5000) == (firsts[0], firsts[-1])
    assert all(later >= first + count for (first, later), count in zip(pairwise(firsts), counts, strict=False))
    assert [1001, 1003] == [restarted.ordinals(2), restarted.ordinals(1)]


def test_message_about_an_ended_process_has_the_time_of_its_delivery():
    monitor = run_monitor(lambda: 5000)
    monitor.accept(process("i"), ())
    first = Symptom(run="r", attempt=0, rank=0, step=3, severity="critical", causal=(), rule="AnomalyNan", at=700)
    for state in ("opened", "notified", "undelivered"):
        monitor.record_incident(Incident(first=first, severity="critical", opened_at=0.0, last_step=3), state)

    assert [700, 5000, 5000] == [row["ts"].microsecond for row in events_of(monitor, "incident")]


def test_pause_of_the_service_does_not_count_as_silence_of_a_rank():
    host, failures = Host(), []
    monitor = host.monitor()
    monitor.accept(process("i"), ())
    for moment in (0, 1, 2, *range(602, 650)):  # stopped for ten minutes; no rank reports afterwards
        host.now = float(moment)
        failures += [(moment, failure) for failure in monitor.update_runs()]

    assert [625] == [moment for moment, _ in failures]
    assert "failed" == monitor.runs.get(("r", 0)).state


@pytest.mark.parametrize(("cursor", "left_at"), [(9, 1.0), (8, 10.0)])
def test_process_killed_after_its_exit_report_is_not_polled_forever(cursor, left_at):
    """Its last response was lost. It is gone immediately if all was read."""
    host = Host()
    monitor = host.monitor()
    monitor.accept(process("i"), ())
    target = monitor.registry.get("i")
    target.cursor, target.head = cursor, 9
    monitor.runs.exited(("r", 0), 0, "completed", None, incarnation="i")

    assert left_at == vanish(host, monitor, "i").gone_at
    assert 9 - cursor == target.records_lost
    assert "completed" == monitor.runs.get(("r", 0)).state


def test_records_lost_with_a_replaced_process_are_counted():
    """The next process of a rank may register before the service has found that the first one is dead."""
    host = Host()
    monitor = host.monitor()
    for rank in range(2):
        monitor.accept(process(f"first-{rank}", rank, world_size=2), ())
    killed = monitor.registry.get("first-0")
    killed.cursor, killed.head = 3, 9
    host.now = 1.0
    RecordSink(monitor).on_failure(killed, FetchError("refused", "connection refused"))
    monitor.accept(process("second-0", 0, world_size=2), ())
    vanish(host, monitor, "first-0")

    assert (0, 0) == (killed.attempt, monitor.registry.get("second-0").attempt)
    assert (6, True) == (killed.records_lost, killed.is_gone)


def test_spool_found_hours_later_keeps_attempt_and_undoes_lost_records():
    """A host is back: its next rank serves the spool of the dead process long after the target was removed."""
    host = Host()
    monitor = host.monitor()
    first = monitor.accept(process("first"), ()).target
    first.cursor, first.head = 3, 9
    vanish(host, monitor, "first")
    second = monitor.accept(process("second"), ()).target
    live(host, monitor, "second", 740)
    dropped = monitor.registry.get("first")
    successor = monitor.accept(replace(process("first"), served_by="second", state="draining", head=9), ()).target
    successor.cursor = 3  # the watermark of the store
    found = monitor.losses.of_body(successor, body_of(successor, *range(4, 10)), [])

    assert None is dropped
    assert (0, 1) == (successor.attempt, second.attempt)
    assert [-6] == [json.loads(row["details"])["records"] for row in found]
    assert 0 == monitor.meter(("r", 0)).records_lost


def test_first_dead_process_is_named_when_all_spools_are_read():
    """The spool of another host may be found when the run has failed already."""
    host, named = Host(), []
    monitor = host.monitor()
    served = {"served_by": "successor", "state": "draining", "started_at": 1}
    for rank, died_at in ((0, 600), (1, 10)):
        target = monitor.accept(replace(process(f"dead-{rank}", rank, world_size=2), **served), ()).target
        host.now += 1000.0
        target.last_ts = 10**15 - 10**12 + died_at * 10**6
        RecordSink(monitor).on_drained(target)
        monitor.update_runs()
        named.append(monitor.runs.get(("r", 0)).culprit)

    assert [None, 1] == named


@pytest.mark.parametrize("jump", [-3600, 40 * 86400, -1.5, 1.5])
def test_clock_set_on_the_host_of_service_and_rank_changes_no_duration(jump):
    host, lasted, starts = Host(), [], []
    monitor = host.monitor()
    for incarnation, launch in (("first", "l"), ("second", "m")):
        began = host.wall()
        monitor.accept(replace(process(incarnation), launch_id=launch, started_at=began), ())
        live(host, monitor, incarnation, 100)
        host.offset = jump  # during the first attempt
        live(host, monitor, incarnation, 100)
        attempt = monitor.runs.get(vanish(host, monitor, incarnation).attempt_key)
        starts.append(attempt.started_at - began)
        lasted.append((attempt.ended_at - attempt.started_at) / 1e6)
    small = jump if abs(jump) < 2 else 0  # not a jump: wall time is used as it is
    named = [(row["attempt"], row["value"]) for row in events_of(monitor, "clock")]

    assert [0, 0] == starts
    assert [200 + small, 200] == lasted
    assert ([] if small else [(0, jump)]) == named


def test_completed_attempt_ends_after_its_start_on_a_clock_set_back():
    host = Host()
    monitor = host.monitor()
    monitor.accept(replace(process("i"), started_at=host.wall()), ())
    live(host, monitor, "i", 100)
    host.offset = -3600.0
    monitor.runs.exited(("r", 0), 0, "completed", None, at=host.wall() + 3600 * 10**6, incarnation="i")
    monitor.update_runs()
    attempt = monitor.runs.get(("r", 0))

    assert ("completed", 100.0) == (attempt.state, (attempt.ended_at - attempt.started_at) / 1e6)


def test_attempt_starts_by_the_rank_if_the_service_was_set_back():
    host = Host()
    monitor = host.monitor()
    monitor.update_runs()
    host.now, host.offset = 100.0, -3600.0
    began = 10**15 + 100 * 10**6
    monitor.accept(replace(process("i"), started_at=began), ())
    live(host, monitor, "i", 50)
    attempt = monitor.runs.get(vanish(host, monitor, "i").attempt_key)

    assert began == attempt.started_at
    assert 50 == (attempt.ended_at - began) / 1e6


def body_of(target, *seqs, events=(), **columns):
    """Return the body with a record of a loss for each of `seqs`, or of `events`."""
    rows = {"events": list(events)} if events else {"scalars": [{"name": "loss", "value": 1.0}]}
    records = [{"seq": seq, "ts": 10**15, "step": seq, **rows, **columns} for seq in seqs]
    who = target.registration
    context = RowContext(run="r", attempt=0, rank=who.rank, incarnation=who.incarnation)
    return check(open_stream(encode_records(records)), {}, context, first_ordinal=1, after=target.cursor)


def take_body(monitor, target, body):
    RecordSink(monitor).on_body(target, body, {}, size=1, inflated=1)


def test_ranks_that_have_not_delivered_the_step_of_an_incident_are_polled():
    polled = []
    monitor = run_monitor(lambda: 10**15, poll_now=lambda run, rank: polled.append((run, rank)))
    zero, one = (monitor.accept(process(f"i{rank}", rank, world_size=2), ()).target for rank in range(2))
    take_body(monitor, one, body_of(one, 2))
    nan = {"type": "anomaly", "severity": "critical", "rule": "AnomalyNan", "tensor": "w"}
    take_body(monitor, zero, body_of(zero, 5, events=[nan]))
    polled.clear()

    assert [] == monitor.due_incidents()
    assert [("r", 1)] == polled
