"""When a run stands still: whom to ask, what to tell and when, and what ends it. No clock, no network."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankscope_contract.diagnostics.stacks import Collective, FlightRecord, Frame, StackDump, ThreadStack
from rankscope_contract.model.events import RunState
from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.stall_handler import parse_stacks_request
from rankscope_ingest.detect.stall_tracker import QUIET_SECONDS, WAIT_SECONDS, StallTracker
from rankscope_ingest.notify.text import goes_on, message
from rankscope_ingest.runs.models import Attempt, Liveness, Patience, Rank
from rankscope_ingest.runs.tracker import RunTracker, Timing

KEY = ("r", 0)


def attempt(*, ranks: int = 2, state: RunState = RunState.STALLED, progressed_at: float = 100.0) -> Attempt:
    made = Attempt(run="r", number=0, launch_id="l", world_size=ranks, started_at=0, state=state, last_step=41)
    made.progressed_at, made.reason = progressed_at, "alive, but no step for 300 s"
    for number in range(ranks):
        made.ranks[number] = Rank(
            number=number, incarnation=f"i{number}", host="h", liveness=Liveness(last_sign=0), known_since=0
        )
    return made


def event(kind: str, details: str, message: str = "") -> Any:
    return rows_table("events", [{"run": "r", "type": kind, "message": message, "details": details}])


def stacks(line: int) -> Any:
    thread = ThreadStack(ident=1, is_training=True, frames=(Frame("/job/train.py", line, "main"),))
    return event("stacks", StackDump(reason="hang", threads=(thread,)).to_json())


def flight(seq: int, *, is_pending: bool) -> Any:
    entry = Collective(
        op="all_reduce", backend="gloo", group="default_pg", seq=seq, is_pending=is_pending, age_seconds=300.0
    )
    return event("flight_record", FlightRecord(reason="hang", collectives=(entry,), recorded=1).to_json())


def hang(state: str) -> Any:
    return event("hang", json.dumps({"state": state, "seconds": 240.0}), "no sign of training for 240 s, after step 41")


def heard_from_both(book: StallTracker, now: float) -> None:
    book.heard(KEY, 0, stacks(88), now)
    book.heard(KEY, 0, flight(41, is_pending=True), now)
    book.heard(KEY, 1, stacks(12), now)
    book.heard(KEY, 1, flight(40, is_pending=False), now)


def test_a_stalled_run_has_its_silent_ranks_asked_once_and_is_told_once_with_who_waits_where():
    book, run = StallTracker(), attempt()
    book.heard(KEY, 1, stacks(12), 200)
    first = book.look([run], 201)

    assert [(KEY, (0,))] == first.to_ask
    assert ([], []) == (book.look([run], 202).to_ask, first.due)

    heard_from_both(book, 203)

    assert [] == book.look([run], 203 + QUIET_SECONDS / 2).due
    (told,) = book.look([run], 203 + QUIET_SECONDS).due
    assert [] == book.look([run], 300).due
    assert (
        "rank 1 never entered all_reduce 41 of default_pg; rank 0 is in it since 300 s, called at train.py[88]",
        "rank 1 at train.py:12 in main; its last collective was all_reduce 40",
        "rank 0 in all_reduce seq 41 (gloo, default_pg), called at train.py:88 in main",
    ) == told.lines
    assert 1 == told.first.rank
    assert "RunStalled:0:41:r" == told.key


def test_a_rank_that_does_not_answer_delays_the_message_by_no_more_than_its_time():
    book, run = StallTracker(), attempt()
    book.heard(KEY, 0, stacks(88), 200)
    book.look([run], 201)
    book.refused(KEY, 1, "it does not answer: C code", 205)

    assert [] == book.look([run], 200 + WAIT_SECONDS).due
    (told,) = book.look([run], 201 + WAIT_SECONDS).due
    assert "rank 1 gave no stacks: it does not answer: C code" == told.lines[-1]


def test_what_a_rank_says_of_its_own_hang_is_enough_though_the_others_make_steps():
    book = StallTracker()
    book.heard(KEY, 1, hang("began"), 200)
    book.heard(KEY, 1, stacks(12), 200)
    run = attempt(state=RunState.RUNNING, progressed_at=250)
    book.look([run], 251)
    (told,) = book.look([run], 251 + WAIT_SECONDS).due

    assert "rank 1: no sign of training for 240 s, after step 41" == told.first.message
    assert "rank 1 at train.py:12 in main" == told.lines[0]

    book.heard(KEY, 1, hang("ended"), 270)
    run.last_step = 42

    assert [(told, True)] == book.look([run], 271).over
    assert [] == book.look([run], 272).over


def test_a_process_that_took_the_place_of_one_that_hung_does_not_hang_though_nobody_took_that_back():
    book, run = StallTracker(), attempt(state=RunState.RUNNING)
    book.heard(KEY, 0, hang("began"), 200)
    heard_from_both(book, 200)
    (told,) = book.look([run], 200 + WAIT_SECONDS).due
    run.ranks[0] = Rank(number=0, incarnation="next", host="h", liveness=Liveness(last_sign=260), known_since=260)
    run.last_step = 42

    assert [(told, True)] == book.look([run], 261).over


def test_stacks_from_before_the_last_step_say_nothing_of_this_standstill():
    book, run = StallTracker(), attempt(progressed_at=150)
    heard_from_both(book, 149)

    assert [(KEY, (0, 1))] == book.look([run], 450).to_ask


@pytest.mark.parametrize(
    ("state", "last_step", "went_on"),
    [
        (RunState.RUNNING, 42, True),
        (RunState.COMPLETED, 50, True),
        (RunState.FAILED, 41, False),
        (RunState.STOPPED, 41, False),
    ],
)
def test_the_end_of_a_standstill_is_told_where_steps_followed(state, last_step, went_on):
    book, run = StallTracker(), attempt()
    heard_from_both(book, 200)
    book.look([run], 200)
    (told,) = book.look([run], 200 + QUIET_SECONDS).due
    run.state, run.last_step = state, last_step

    assert [(told, went_on)] == book.look([run], 200 + 2 * QUIET_SECONDS).over


def test_a_service_that_starts_anew_tells_no_standstill_twice_and_still_tells_its_end():
    before, run = StallTracker(), attempt()
    heard_from_both(before, 200)
    before.look([run], 200)
    (told,) = before.look([run], 200 + QUIET_SECONDS).due
    book = StallTracker([told])

    assert ([], []) == ((news := book.look([run], 300)).due, news.to_ask)
    run.state = RunState.RUNNING
    assert [(told, True)] == book.look([run], 301).over


def test_details_that_make_no_sense_are_passed_over():
    book, run = StallTracker(), attempt(ranks=1)
    for kind in ("stacks", "flight_record", "hang"):
        for details in ("", "[]", '{"threads": 3}', "no json", '{"state": 7}'):
            book.heard(KEY, 0, event(kind, details), 200)
    book.look([run], 201)
    (told,) = book.look([run], 201 + WAIT_SECONDS).due

    assert ("rank 0 gave no stacks: no answer",) == told.lines


def test_an_attempt_that_is_known_no_more_is_forgotten():
    book = StallTracker()
    heard_from_both(book, 200)
    book.look([attempt()], 201)
    book.look([], 202)

    assert ({}, {}) == (book._reports, book._stalls)


def test_the_messages_as_people_get_them():
    book, run = StallTracker(), attempt()
    heard_from_both(book, 200)
    book.look([run], 200)
    (told,) = book.look([run], 200 + QUIET_SECONDS).due
    began, ended = message(told), goes_on(told)

    assert "[critical] r: RunStalled, rank 1, step 41" == began.title
    assert (
        """\
run: r (attempt 0)
rank: 1
step: 41
said: alive, but no step for 300 s
cause: rank 1: it never entered all_reduce 41 of default_pg, in which rank 0 waits (flight records)
where:
  rank 1 never entered all_reduce 41 of default_pg; rank 0 is in it since 300 s, called at train.py[88]
  rank 1 at train.py:12 in main; its last collective was all_reduce 40
  rank 0 in all_reduce seq 41 (gloo, default_pg), called at train.py:88 in main
look closer: rankscope stacks r
incident: RunStalled:0:41:r"""
        == began.body
    )
    assert "[resolved] r: RunStalled, steps go on" == ended.title
    assert "run: r (attempt 0)\nTraining goes on. It had stood still after step 41.\nincident: RunStalled:0:41:r" == (
        ended.body
    )
    assert began.key != ended.key


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"run": 3}', b'{"run": "r", "ranks": [true]}', b'{"run": "r", "ranks": 1}']
)
def test_a_request_without_sense_is_told_the_form(body):
    with pytest.raises(RegistrationError, match="ask with a JSON object"):
        parse_stacks_request(body)


def test_a_request_names_a_run_and_may_name_ranks():
    assert ("r", None) == parse_stacks_request(b'{"run": "r"}')
    assert ("r", [0, 3]) == parse_stacks_request(b'{"run": "r", "ranks": [0, 3]}')


def test_what_a_rank_says_under_its_last_step_is_no_progress():
    """Stacks and hangs carry the step that was finished last; else each would end the standstill it tells of."""
    book = RunTracker(
        Timing(
            patience=Patience(refused_after_seconds=1e9, failed_after_seconds=1e9),
            stalled_after_seconds=10,
            stalled_in_phase_after_seconds=60,
        )
    )
    who = Registration(
        run="r", rank=0, world_size=1, local_rank=0, host="h", pid=1, incarnation="i", launch_id="l", url="http://h:1"
    )
    book.registered(who, 0, Liveness(last_sign=0), wall=0)
    book.stepped(KEY, 0, 41, now=1)
    book.stepped(KEY, 0, 41, now=9)
    book.tick(11, wall=0)

    assert RunState.STALLED is book.get(KEY).state
    book.stepped(KEY, 0, 40, now=12)  # a step may rewind
    book.tick(13, wall=0)
    assert RunState.RUNNING is book.get(KEY).state
