"""Messages about runs that stalled or failed: a rank is named only where a source singles it out.

Three situations, with every set of sources: a rank that sleeps, a rank in an earlier collective, a rank that died.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from tests.ingest.runs.life_steps import KEY, START, TIMING

from rankscope_contract.diagnostics.stacks import Collective, FlightRecord, Frame, GroupProgress, StackDump, ThreadStack
from rankscope_contract.model.events import RunState
from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.incidents import FailureAlerts
from rankscope_ingest.detect.stall_tracker import StallTracker
from rankscope_ingest.notify.incident import Incident
from rankscope_ingest.notify.text import message
from rankscope_ingest.runs.models import Attempt, Liveness, Rank
from rankscope_ingest.runs.root_cause import MOST_LINES, last_reports
from rankscope_ingest.runs.tracker import RunTracker

REDUCE = Frame("/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
SOURCES = ("flight", "heartbeat", "stacks")
LONGEST_WAIT = 2000


class Job:
    """`world` ranks that made 41 steps, of which `rank` differs from the others, and the sources of facts about it.

    The heartbeat reports steps and silence to the service; without it every rank seems to answer.
    """

    def __init__(self, world: int, rank: int, situation: str, sources: Collection[str]) -> None:
        self.runs, self.stalls = RunTracker(TIMING), StallTracker()
        self.failures = FailureAlerts((), wait_seconds=TIMING.patience.failed_after_seconds)
        self.world, self.rank, self.situation, self.sources = world, rank, situation, sources
        self.liveness = [Liveness(last_sign=0.0) for _ in range(world)]
        for one in range(world):
            self.runs.registered(registration(one, world), 0, self.liveness[one], START)
            if "heartbeat" in sources:
                self.runs.stepped(KEY, one, 41, 1.0)

    def first_message(self) -> Incident:
        """Let time pass until a message is sent, and return it."""
        for second in range(1, LONGEST_WAIT):
            for one in range(self.world):
                if not self.is_silent(one):
                    self.liveness[one].heard(float(second))
                    self.runs.heard(KEY, one)
            self.runs.tick(float(second), START + second * 1_000_000)
            told = [*self.failures.due(self.runs.attempts(), float(second)), *self.stalled(float(second))]
            if told:
                return told[0]
        raise AssertionError("no message was sent")

    def is_silent(self, one: int) -> bool:
        return (self.situation, one) == ("died", self.rank) and "heartbeat" in self.sources

    def stalled(self, now: float) -> list[Incident]:
        news = self.stalls.look(self.runs.attempts(), now)
        for _, asked in news.to_ask:
            for one in asked:
                for kind, details in self.answers(one):
                    self.stalls.heard(KEY, one, event(kind, details), now)
        return news.due

    def answers(self, one: int) -> Iterator[tuple[str, str]]:
        """Yield the stacks that a rank sends on request; a dead one sends nothing."""
        if (self.situation, one) == ("died", self.rank):
            return
        is_other = one != self.rank
        if "stacks" in self.sources:
            sleeps = not is_other and self.situation == "sleeps"
            yield "stacks", stacks(line=88 if is_other else 12, sleeps=sleeps).to_json()
        if "flight" in self.sources:
            is_behind = not is_other and self.situation == "earlier"
            yield (
                "flight_record",
                flight(40 if is_behind else 41, is_pending=is_other or is_behind, world=self.world).to_json(),
            )


def registration(rank: int, world: int) -> Registration:
    return Registration(
        run="r", rank=rank, world_size=world, local_rank=rank, host="h", pid=1, incarnation=f"i{rank}",
        launch_id="l", url="http://127.0.0.1:1", started_at=START,
    )  # fmt: skip


def stacks(*, line: int, sleeps: bool) -> StackDump:
    own = Frame("/job/train.py", line, "main")
    thread = (
        ThreadStack(ident=1, is_training=True, frames=(own,), calls="time.sleep")
        if sleeps
        else ThreadStack(ident=1, is_training=True, frames=(REDUCE, own), calls=".wait")
    )
    return StackDump(reason="request", threads=(thread,))


def flight(seq: int, *, is_pending: bool, world: int) -> FlightRecord:
    entered = [(seq - 1, False), (seq, True)] if is_pending else [(seq - 1, False)]
    entries = tuple(
        Collective(op="all_reduce", backend="gloo", group="dp", group_id="0", seq=one, is_pending=pends, age_seconds=99)
        for one, pends in entered
    )
    group = GroupProgress(id="0", ranks=f"0-{world - 1}", latest_seq=entries[-1].seq)
    return FlightRecord(reason="request", collectives=entries, recorded=2, groups=(group,))


def event(kind: str, details: str, message: str = "") -> Any:
    return rows_table("events", [{"run": "r", "type": kind, "message": message, "details": details}])


def subsets() -> list[tuple[str, ...]]:
    return [
        tuple(source for place, source in enumerate(SOURCES) if number >> place & 1) for number in reversed(range(8))
    ]


NEEDED = {"sleeps": {"flight", "stacks"}, "earlier": {"flight"}, "died": {"heartbeat"}}
"""The sources each of which singles out the rank."""


@pytest.mark.parametrize("sources", subsets(), ids=lambda sources: "+".join(sources) or "nothing")
@pytest.mark.parametrize("situation", NEEDED)
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 1), (8, 0), (8, 7)])
def test_a_rank_is_named_where_a_source_singles_it_out_and_no_other_ever(situation, sources, world, rank):
    told = Job(world, rank, situation, sources).first_message()
    text = message(told)
    is_named = bool(NEEDED[situation] & set(sources))

    assert (rank if is_named else None) == told.first.rank
    assert ({rank} if is_named else set()) == told.ranks
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
        ("died", ("heartbeat",), "rank 1: it is the first that vanished without a last report"),
        ("died", ("stacks",), "unknown: the stacks of ranks 0, 2 do not identify a single rank"),
        ("sleeps", (), "unknown: no rank sent stacks or a flight record"),
    ],
)  # fmt: skip
def test_the_message_names_the_evidence(situation, sources, cause):
    assert cause == Job(3, 1, situation, sources).first_message().cause


# Failures.


def failed(*words: tuple[str, str | None] | None, world: int = 3, host: str = "h") -> tuple[Attempt, FailureAlerts]:
    """Return an attempt whose ranks ended with these reasons and errors, None for a rank that is at work."""
    book = RunTracker(TIMING)
    for one, word in enumerate(words):
        book.registered(registration(one, world), 0, Liveness(last_sign=10.0), START)
        book.stepped(KEY, one, 5, 10.0)
        if word is not None:
            book.exited(KEY, one, *word, at=START + 10_000_000)
    book.tick(10.0, START + 10_000_000)
    attempt = book.get(KEY)
    assert attempt is not None
    return attempt, FailureAlerts((), wait_seconds=25.0)


RAISED = ("exception", "ValueError: no")
PEER = ("exception", "RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("words", "rank", "cause"),
    [
        ((PEER, RAISED, PEER), 1, "rank 1: it is the first that raised an exception of its own"),
        ((RAISED, RAISED, PEER), None, "unknown: ranks 0-1 ended within 2 s of each other"),
        ((PEER, PEER, PEER), None, "unknown: ranks 0-2 lost a peer, and no rank is known to have failed before"),
        ((RAISED,), 0, "rank 0: it is the first that raised an exception of its own"),
    ],
)
def test_a_failure_names_the_one_rank_that_failed_by_itself(words, rank, cause):
    attempt, book = failed(*words)
    (told,) = book.due([attempt], 10.0)

    assert (rank, cause) == (told.first.rank, told.cause)
    assert (rank is None) == bool(told.reports)


def test_a_rank_that_vanished_beside_unknown_ranks_is_not_named():
    book = RunTracker(TIMING)
    book.registered(registration(0, 3), 0, Liveness(last_sign=0.0), START)
    book.tick(25.0, START + 25_000_000)
    (told,) = FailureAlerts((), wait_seconds=25.0).due(book.attempts(), 25.0)

    assert None is told.first.rank
    assert "unknown: rank 0 vanished, and nothing is known of 2 ranks: never registered" == told.cause
    assert ("rank 0: no step, 25 s ago, vanished", "2 of 3 ranks: never registered") == told.reports


def test_a_failure_is_announced_when_the_other_ranks_are_known_not_to_have_failed_with_it():
    """Their reports may still be on their way."""
    attempt, book = failed(None, RAISED, None)
    early = book.due([attempt], 11.0)
    for one in (0, 2):
        attempt.ranks[one].liveness.heard(12.0)

    assert [] == early
    assert [1] == [told.first.rank for told in book.due([attempt], 12.0)]


def test_a_failure_that_further_reports_make_common_names_no_rank():
    attempt, book = failed(None, RAISED, None)
    early = book.due([attempt], 11.0)
    second, _ = failed(RAISED, RAISED, None)
    second.ranks[2].liveness.heard(13.0)

    assert [] == early
    assert [] == book.due([second], 12.0)
    assert [None] == [told.first.rank for told in book.due([second], 10.0 + 25.0)]


# The last reports of ranks.


def attempt_of(*ranks: tuple[int, int | None, float], world: int | None = None, **more: Any) -> Attempt:
    """Return an attempt with ranks of (number, last step, seconds since the last report)."""
    made = Attempt(run="r", number=0, launch_id="l", world_size=world or len(ranks), started_at=0)
    for number, step, age in ranks:
        made.ranks[number] = Rank(
            number=number, incarnation=f"i{number}", host="h", liveness=Liveness(last_sign=1000.0 - age),
            known_since=0.0, last_step=step, **more,
        )  # fmt: skip
    return made


def test_equal_ranks_share_a_line_and_those_behind_come_first():
    found = attempt_of(
        *((one, 12, 4.0) for one in (0, 1, 2, 3, 5)), (4, 11, 300.0), (6, None, 2.0), (7, 12, 3.0), world=10
    )

    assert (
        "rank 6: no step, 2 s ago",
        "rank 4: step 11, 300 s ago",
        "ranks 0-3, 5, 7: step 12, 3-4 s ago",
        "2 of 10 ranks: never registered",
    ) == last_reports(found, 1000.0)


def test_an_ended_rank_and_one_from_before_a_restart_are_listed_as_such():
    ended = attempt_of((0, 12, 40.0), exit_reason="completed")
    restored = attempt_of((0, None, 40.0), is_restored=True)

    assert ("rank 0: step 12, 40 s ago, ended: completed",) == last_reports(ended, 1000.0)
    assert ("rank 0: no step, not heard of since the service started 40 s ago",) == last_reports(restored, 1000.0)


def test_reports_of_many_ranks_are_few_lines():
    alike = attempt_of(*((one, 12, one % 7) for one in range(1000)))
    scattered = attempt_of(*((one, one // 2, (one % 9) * 100.0) for one in range(1000)))

    assert ("ranks 0-999: step 12, 0-6 s ago",) == last_reports(alike, 1000.0)
    lines = last_reports(scattered, 1000.0)
    assert MOST_LINES + 1 == len(lines)
    assert max(map(len, lines)) < 200


def test_places_of_many_ranks_are_few_lines():
    """A thousand ranks at a thousand places, and half of them gave nothing, for different reasons."""
    book = StallTracker()
    job = attempt_of(*((one, 41, 0.0) for one in range(1000)))
    job.state, job.reason = RunState.STALLED, "alive, but no step for 300 s"
    for one in range(0, 1000, 2):
        book.heard(KEY, one, event("stacks", stacks(line=one, sleeps=True).to_json()), 900.0)
    for one in range(1, 1000, 2):
        book.refused(KEY, one, f"reason {one}", 900.0)
    book.look([job], 901.0)
    (told,) = book.look([job], 920.0).due

    assert None is told.first.rank
    assert 2 * 13 == len(told.lines)
    assert "and 488 more" == told.lines[-1]
    assert len(message(told).body) < 6000


def test_a_rank_that_hangs_while_the_others_make_steps_is_named_by_their_steps():
    """The stacks and records of the others show a moment of a training that runs."""
    book = StallTracker()
    job = attempt_of((0, 60, 0.0), (1, 41, 0.0), (2, 61, 0.0))
    job.state, job.progressed_at = RunState.RUNNING, 960.0
    book.heard(KEY, 1, event("hang", json.dumps({"state": "began"}), "no sign of training for 240 s"), 950.0)
    for one in (0, 2):
        record = flight(41, is_pending=one == 0, world=3)
        book.heard(KEY, one, event("flight_record", record.to_json()), 961.0)
    book.look([job], 951.0)
    (told,) = book.look([job], 970.0).due

    assert 1 == told.first.rank
    assert "rank 1: its last step is 41, and all other ranks made step 60 or a later one (steps)" == told.cause


def test_equal_hangs_are_reported_once_and_not_for_the_lowest_rank():
    book = StallTracker()
    job = attempt_of((0, 41, 0.0), (1, 41, 0.0))
    job.state, job.progressed_at = RunState.RUNNING, 900.0
    for one in (0, 1):
        book.heard(KEY, one, event("hang", json.dumps({"state": "began"}), "no sign of training for 240 s"), 950.0)
    book.look([job], 951.0)
    (told,) = book.look([job], 970.0).due

    assert "ranks 0-1: no sign of training for 240 s" == told.first.message
    assert None is told.first.rank


def test_a_flight_record_from_before_the_standstill_is_no_evidence():
    """A record that was taken while training ran, and stacks alone of the standstill."""
    book = StallTracker()
    job = attempt_of((0, 41, 0.0), (1, 41, 0.0))
    job.state, job.reason, job.progressed_at = RunState.STALLED, "alive, but no step for 300 s", 600.0
    for one in (0, 1):
        record = flight(41, is_pending=one == 0, world=2)
        book.heard(KEY, one, event("flight_record", record.to_json()), 500.0)
        book.heard(KEY, one, event("stacks", stacks(line=88, sleeps=False).to_json()), 900.0)
    book.look([job], 901.0)
    (told,) = book.look([job], 920.0).due

    assert (None, "unknown: the stacks of ranks 0-1 do not identify a single rank") == (told.first.rank, told.cause)
