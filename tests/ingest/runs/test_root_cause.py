"""Messages about stalled and failed runs name a rank only if a source singles it out, for every set of sources."""

import itertools
import json
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from tests.ingest import builders
from tests.ingest.builders import rank_of
from tests.ingest.runs.life_steps import KEY, LIMITS, START

from rankscope_contract.model.events import RunState
from rankscope_contract.model.stacks import Collective, FlightRecord, Frame, GroupProgress, StackDump, ThreadStack
from rankscope_contract.wire.channel import Registration
from rankscope_ingest.detect.incidents import FailureAlerts
from rankscope_ingest.detect.stall_tracker import StallTracker
from rankscope_ingest.notify.announcer import incident_message
from rankscope_ingest.runs.incident import Incident
from rankscope_ingest.runs.models import Attempt, Liveness
from rankscope_ingest.runs.text import MAX_LINES, last_reports
from rankscope_ingest.runs.tracker import RunTracker

REDUCE = Frame("/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
SOURCES = ("flight", "heartbeat", "stacks")
SUBSETS = [one for size in range(4) for one in itertools.combinations(SOURCES, size)]
LONGEST_WAIT = 2000


class Job:
    """`world` ranks after 41 steps, of which `rank` differs from the others, and the sources of facts about it."""

    # The heartbeat reports steps and silence to the service; without it every rank seems to answer.

    def __init__(self, world: int, rank: int, situation: str, sources: Collection[str]) -> None:
        self.runs, self.stalls = RunTracker(LIMITS), StallTracker()
        self.failures = FailureAlerts((), wait_seconds=LIMITS.failed_after_seconds)
        self.world, self.rank, self.situation, self.sources = world, rank, situation, sources
        self.liveness = [Liveness(last_sign=0.0) for _ in range(world)]
        for one in range(world):
            self.runs.registered(registration(one, world), 0, self.liveness[one], START)
            if "heartbeat" in sources:
                self.runs.stepped(KEY, one, 41, 1.0)

    def first_message(self) -> Incident:
        for second in range(1, LONGEST_WAIT):
            for one in range(self.world):
                if not self.is_silent(one):
                    self.liveness[one].note_sign(float(second))
                    self.runs.answered(KEY, one)
            self.runs.tick(float(second), START + second * 1_000_000)
            incidents = [*self.failures.due(self.runs.attempts(), float(second)), *self.stalled(float(second))]
            if incidents:
                return incidents[0]
        raise AssertionError("no message was sent")

    def is_silent(self, one: int) -> bool:
        return (self.situation, one) == ("died", self.rank) and "heartbeat" in self.sources

    def stalled(self, now: float) -> list[Incident]:
        actions = self.stalls.check(self.runs.attempts(), now)
        for _, ranks in actions.to_request:
            for one in ranks:
                for kind, details in self.answers(one):
                    self.stalls.add(KEY, one, event(kind, details), now)
        return actions.due

    def answers(self, one: int) -> Iterator[tuple[str, str]]:
        """Yield the stacks that a rank sends on request. A dead rank sends nothing."""
        if (self.situation, one) == ("died", self.rank):
            return
        is_other = one != self.rank
        if "stacks" in self.sources:
            sleeps = not is_other and self.situation == "sleeps"
            yield "stacks", stacks(line=88 if is_other else 12, sleeps=sleeps).to_json()
        if "flight" in self.sources:
            is_behind = not is_other and self.situation == "earlier"
            record = flight(40 if is_behind else 41, is_pending=is_other or is_behind, world=self.world)
            yield "flight_record", record.to_json()


def registration(rank: int, world: int) -> Registration:
    return builders.registration(rank=rank, world_size=world, started_at=START)


def stacks(*, line: int, sleeps: bool) -> StackDump:
    own = Frame("/job/train.py", line, "main")
    frames, calls = ((own,), "time.sleep") if sleeps else ((REDUCE, own), ".wait")
    thread = ThreadStack(ident=1, is_training=True, frames=frames, calls=calls)
    return StackDump(reason="request", threads=(thread,))


def flight(seq: int, *, is_pending: bool, world: int) -> FlightRecord:
    entered = [(seq - 1, False), (seq, True)] if is_pending else [(seq - 1, False)]
    common = {"op": "all_reduce", "backend": "gloo", "group": "dp", "group_id": "0", "age_seconds": 99}
    entries = tuple(Collective(seq=one, is_pending=pends, **common) for one, pends in entered)
    group = GroupProgress(id="0", ranks=f"0-{world - 1}", latest_seq=entries[-1].seq)
    return FlightRecord(reason="request", collectives=entries, recorded=2, groups=(group,))


def event(kind: str, details: str, message: str = "") -> Any:
    return [{"run": "r", "type": kind, "message": message, "details": details}]


NEEDED = {"sleeps": {"flight", "stacks"}, "earlier": {"flight"}, "died": {"heartbeat"}}
"""The sources each of which singles out the rank."""


@pytest.mark.usual(40)
@pytest.mark.parametrize("sources", SUBSETS, ids=lambda sources: "+".join(sources) or "nothing")
@pytest.mark.parametrize("situation", NEEDED)
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 1), (8, 0), (8, 7)])
def test_rank_is_named_only_if_a_source_singles_it_out(situation, sources, world, rank):
    incident = Job(world, rank, situation, sources).first_message()
    text = incident_message(incident)
    is_named = bool(NEEDED[situation] & set(sources))

    assert (rank if is_named else None) == incident.first.rank
    assert ({rank} if is_named else set()) == incident.ranks
    assert f", rank {rank if is_named else 'unknown'}" in text.title
    assert f"rank: {rank if is_named else 'unknown'}" in text.body.splitlines()
    if is_named:
        assert f"cause: rank {rank}: " in text.body
        assert "last reports:" not in text.body
    else:
        assert "cause: unknown: " in text.body
        assert f"  ranks 0-{world - 1}: {'step 41' if 'heartbeat' in sources else 'no step'}, 0 s ago" in text.body


NEVER_ENTERED = "it never entered all_reduce 41 of dp, in which ranks 0, 2 wait"
SLEEPS = "it is in time.sleep, called at train.py:12 in main, and ranks 0, 2 wait in a collective"


@pytest.mark.parametrize(
    ("situation", "sources", "cause"),
    [
        ("sleeps", ("flight",), f"rank 1: {NEVER_ENTERED} (flight records)"),
        ("sleeps", ("stacks",), f"rank 1: {SLEEPS} (stacks)"),
        ("sleeps", SOURCES, f"rank 1: {NEVER_ENTERED} (flight records); {SLEEPS} (stacks)"),
        ("earlier", ("flight",), "rank 1: it is still in all_reduce 40 of dp, which ranks 0, 2 left (flight records)"),
        ("earlier", ("stacks",), "unknown: the stacks of ranks 0-2 do not identify a single rank"),
        ("died", ("heartbeat",), "rank 1: first rank to stop responding without an exit report"),
        ("died", ("stacks",), "unknown: the stacks of ranks 0, 2 do not identify a single rank"),
        ("sleeps", (), "unknown: no rank sent stacks or a flight record"),
    ],
)  # fmt: skip
def test_message_contains_the_evidence(situation, sources, cause):
    assert cause == Job(3, 1, situation, sources).first_message().cause


# Failures.


def failed(*ends: tuple[str, str | None] | None, world: int = 3) -> tuple[Attempt, FailureAlerts]:
    """Return an attempt whose ranks ended with these reasons and errors. None: the rank still runs."""
    runs = RunTracker(LIMITS)
    for one, end in enumerate(ends):
        runs.registered(registration(one, world), 0, Liveness(last_sign=10.0), START)
        runs.stepped(KEY, one, 5, 10.0)
        if end is not None:
            runs.exited(KEY, one, *end, at=START + 10_000_000)
    runs.tick(10.0, START + 10_000_000)
    attempt = runs.get(KEY)
    assert attempt is not None
    return attempt, FailureAlerts((), wait_seconds=25.0)


RAISED = ("exception", "ValueError: no")
PEER = ("exception", "RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("ends", "rank", "cause"),
    [
        ((PEER, RAISED, PEER), 1, "rank 1: first rank to raise an exception other than a lost connection"),
        ((RAISED, RAISED, PEER), None, "unknown: ranks 0-1 ended within 2 s of each other"),
        ((PEER, PEER, PEER), None, "unknown: ranks 0-2 lost the connection to a peer, and no earlier failure is known"),
        ((RAISED,), 0, "rank 0: first rank to raise an exception other than a lost connection"),
    ],
)
def test_failure_names_the_only_rank_that_failed_without_a_lost_peer(ends, rank, cause):
    attempt, alerts = failed(*ends)
    (incident,) = alerts.due([attempt], 10.0)

    assert (rank, cause) == (incident.first.rank, incident.cause)
    assert (rank is None) == bool(incident.reports)


def test_vanished_rank_is_not_named_if_other_ranks_never_registered():
    runs = RunTracker(LIMITS)
    runs.registered(registration(0, 3), 0, Liveness(last_sign=0.0), START)
    runs.tick(25.0, START + 25_000_000)
    (incident,) = FailureAlerts((), wait_seconds=25.0).due(runs.attempts(), 25.0)

    assert None is incident.first.rank
    assert "unknown: rank 0 stopped responding, and 2 ranks never registered" == incident.cause
    assert ("rank 0: no step, 25 s ago, stopped responding", "2 of 3 ranks: never registered") == incident.reports


def test_failure_is_announced_when_the_other_ranks_are_known_to_be_alive():
    """Until then, their exit reports may arrive."""
    attempt, alerts = failed(None, RAISED, None)
    early = alerts.due([attempt], 11.0)
    for one in (0, 2):
        attempt.ranks[one].liveness.note_sign(12.0)

    assert [] == early
    assert [1] == [incident.first.rank for incident in alerts.due([attempt], 12.0)]


def test_failure_names_no_rank_if_a_late_report_shows_a_second_failure():
    attempt, alerts = failed(None, RAISED, None)
    early = alerts.due([attempt], 11.0)
    second, _ = failed(RAISED, RAISED, None)
    second.ranks[2].liveness.note_sign(13.0)

    assert [] == early
    assert [] == alerts.due([second], 12.0)
    assert [None] == [incident.first.rank for incident in alerts.due([second], 10.0 + 25.0)]


# The last reports of ranks.


def attempt_of(*ranks: tuple[int, int | None, float], world: int | None = None, **more: Any) -> Attempt:
    """Return an attempt with ranks of (number, last step, seconds since the last report)."""
    made = (rank_of(one, last_step=step, liveness=Liveness(last_sign=1000.0 - age), **more) for one, step, age in ranks)
    return builders.attempt(made, world_size=world or len(ranks))


def stalled(*ranks: tuple[int, int | None, float], state: RunState = RunState.STALLED, progressed_at: float) -> Attempt:
    job = attempt_of(*ranks)
    job.state, job.reason, job.progressed_at = state, "alive, but no step for 300 s", progressed_at
    return job


def announced(stalls: StallTracker, job: Attempt, first: float, second: float) -> Incident:
    stalls.check([job], first)
    (incident,) = stalls.check([job], second).due
    return incident


BEGAN = json.dumps({"state": "began"})


def test_last_reports_group_equal_ranks_and_start_with_the_lowest_step():
    found = attempt_of(
        *((one, 12, 4.0) for one in (0, 1, 2, 3, 5)), (4, 11, 300.0), (6, None, 2.0), (7, 12, 3.0), world=10
    )

    assert (
        "rank 6: no step, 2 s ago",
        "rank 4: step 11, 300 s ago",
        "ranks 0-3, 5, 7: step 12, 3-4 s ago",
        "2 of 10 ranks: never registered",
    ) == last_reports(found, 1000.0)


def test_last_reports_mark_ended_and_restored_ranks():
    ended = attempt_of((0, 12, 40.0), exit_reason="completed")
    restored = attempt_of((0, None, 40.0), is_restored=True)

    assert ("rank 0: step 12, 40 s ago, ended: completed",) == last_reports(ended, 1000.0)
    assert ("rank 0: no step, no response since the service started 40 s ago",) == last_reports(restored, 1000.0)


def test_last_reports_of_many_ranks_have_few_lines():
    alike = attempt_of(*((one, 12, one % 7) for one in range(1000)))
    scattered = attempt_of(*((one, one // 2, (one % 9) * 100.0) for one in range(1000)))

    assert ("ranks 0-999: step 12, 0-6 s ago",) == last_reports(alike, 1000.0)
    lines = last_reports(scattered, 1000.0)
    assert MAX_LINES + 1 == len(lines)
    assert max(map(len, lines)) < 200


def test_places_of_many_ranks_have_few_lines():
    """A thousand ranks at different places; half of them sent no stacks, for different reasons."""
    stalls, job = StallTracker(), stalled(*((one, 41, 0.0) for one in range(1000)), progressed_at=0.0)
    for one in range(0, 1000, 2):
        stalls.add(KEY, one, event("stacks", stacks(line=one, sleeps=True).to_json()), 900.0)
        stalls.add_refusal(KEY, one + 1, f"reason {one + 1}", 900.0)
    incident = announced(stalls, job, 901.0, 920.0)

    assert None is incident.first.rank
    assert 2 * 13 == len(incident.places)
    assert "and 488 more" == incident.places[-1]
    assert len(incident_message(incident).body) < 6000


def test_hanging_rank_is_named_by_the_steps_of_the_others():
    """The stacks and flight records of the others show a training that runs."""
    stalls = StallTracker()
    job = stalled((0, 60, 0.0), (1, 41, 0.0), (2, 61, 0.0), state=RunState.RUNNING, progressed_at=960.0)
    stalls.add(KEY, 1, event("hang", BEGAN, "no sign of training for 240 s"), 950.0)
    for one in (0, 2):
        record = flight(41, is_pending=one == 0, world=3)
        stalls.add(KEY, one, event("flight_record", record.to_json()), 961.0)
    incident = announced(stalls, job, 951.0, 970.0)

    assert 1 == incident.first.rank
    assert "rank 1: its last step is 41, and all other ranks made step 60 or a later one (steps)" == incident.cause


def test_equal_hangs_share_a_message_and_name_no_rank():
    stalls, job = StallTracker(), stalled((0, 41, 0.0), (1, 41, 0.0), state=RunState.RUNNING, progressed_at=900.0)
    for one in (0, 1):
        stalls.add(KEY, one, event("hang", BEGAN, "no sign of training for 240 s"), 950.0)
    first = announced(stalls, job, 951.0, 970.0).first

    assert ("ranks 0-1: no sign of training for 240 s", None) == (first.message, first.rank)


def test_flight_record_from_before_the_stall_is_no_evidence():
    """The flight record was taken while training ran; only the stacks are from the stall."""
    stalls, job = StallTracker(), stalled((0, 41, 0.0), (1, 41, 0.0), progressed_at=600.0)
    for one in (0, 1):
        record = flight(41, is_pending=one == 0, world=2)
        stalls.add(KEY, one, event("flight_record", record.to_json()), 500.0)
        stalls.add(KEY, one, event("stacks", stacks(line=88, sleeps=False).to_json()), 900.0)
    incident = announced(stalls, job, 901.0, 920.0)

    cause = "unknown: the stacks of ranks 0-1 do not identify a single rank"
    assert (None, cause) == (incident.first.rank, incident.cause)
