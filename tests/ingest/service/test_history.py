"""What a starting service finds in the store: numbers to go on with, and what was left open."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from rankscope_contract.model.events import RunState
from rankscope_contract.model.rollups import ROLLUPS
from rankscope_contract.model.schema import DATASETS
from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.notify.announcer import Announcer
from rankscope_ingest.notify.incident import Symptom
from rankscope_ingest.notify.notifiers import NotifyError, make_notifiers
from rankscope_ingest.notify.text import AGAIN, message, run_failed
from rankscope_ingest.reporting.rows import Stamp, attempt_row, incident_row, launch_row
from rankscope_ingest.runs.models import Liveness, Patience
from rankscope_ingest.runs.target import Target
from rankscope_ingest.runs.tracker import Attempt, RunTracker, Timing
from rankscope_ingest.service.history import read_history
from rankscope_storage.api.store import Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.writer.writer import Batch

TIMING = Timing(
    patience=Patience(refused_after_seconds=10, failed_after_seconds=25),
    stalled_after_seconds=300,
    stalled_in_phase_after_seconds=1800,
)


@pytest.fixture
def keep(tmp_path):
    """Return a function that stores rows by dataset, and one that reads the history back."""
    writer = Store.open(tmp_path / "store", create=True).claim(owner="test")

    def store(**rows):
        tables = {dataset: rows_table(dataset, listed) for dataset, listed in rows.items()}
        writer.append(Batch(tables=tables, watermarks={}))

    def read():
        with connect(tmp_path / "store") as connection:
            return read_history(connection, now=1000.0)

    yield store, read
    writer.close()


def stamp(order):
    return Stamp(1_700_000_000_000_000 + order, order)


def attempt(number=0, state=RunState.RUNNING, launch="l0", **changes):
    fields = {"run": "r", "number": number, "launch_id": launch, "world_size": 2, "started_at": 100 + number}
    return Attempt(**(fields | {"state": state, "last_step": 7} | changes))


def target(rank=0):
    registration = Registration(
        run="r",
        rank=rank,
        world_size=2,
        local_rank=rank,
        host=f"node{rank}",
        pid=1,
        incarnation=f"i{rank}",
        launch_id="l0",
        url="http://127.0.0.1:1",
    )
    return Target(registration=registration, attempt=0, lease="x", liveness=Liveness(last_sign=0.0))


def exit_row(rank, reason):
    return {
        "run": "r",
        "attempt": 0,
        "rank": rank,
        "incarnation": f"i{rank}",
        "type": "exit",
        "details": f'{{"reason": "{reason}"}}',
        "ordinal": 50,
    }


def failure_of_unknown_rank():
    return run_failed(
        run="r",
        attempt=0,
        rank=None,
        step=7,
        reason="ranks 0-1 on h vanished without a word",
        cause="unknown: ranks 0-1 vanished, and the order is not known",
        reports=("ranks 0-1: step 7, 31 s ago, vanished",),
        opened_at=0.0,
    )


def some_incident(step=60, severity="critical"):
    first = Symptom(
        run="r",
        attempt=0,
        rank=1,
        step=step,
        severity=severity,
        causal=(step,),
        rule="AnomalyNan",
        tensor="w",
        events=3,
    )
    book = IncidentTracker(group_wait_seconds=0, quiet_steps=20)
    book.observe(first, 0.0)
    return book.settle(1.0, {})[0]


def test_empty_store_tells_nothing(keep):
    _, read = keep

    assert ([], (), ()) == (read().launches, read().attempts, read().unsent)


def test_launch_numbers_come_back(keep):
    store, read = keep
    store(attempts=[attempt_row(attempt(n, launch=f"l{n}"), stamp(n)) for n in range(3)])

    assert [("r", f"l{n}", n) for n in range(3)] == sorted(read().launches)
    assert {"r": 100} == read().run_starts


def test_ranks_of_an_unfinished_attempt_must_speak_up_or_the_run_has_failed(keep):
    store, read = keep
    store(
        attempts=[attempt_row(attempt(), stamp(0))],
        events=[launch_row(target(0), stamp(1)), launch_row(target(1), stamp(2))],
    )
    runs = RunTracker(TIMING)
    read().restore(runs, IncidentTracker(group_wait_seconds=1, quiet_steps=20))
    early = [str(found.state) for found in runs.tick(1024.0, 1).changed]
    runs.tick(1025.0, 1)

    assert [] == early
    assert "failed" == runs.get(("r", 0)).state
    assert None is runs.get(("r", 0)).culprit
    assert (
        "rank 0 on node0, rank 1 on node1 were not heard of again since the service came back: "
        "they ended or were killed meanwhile; which rank failed first is unknown"
    ) == runs.get(("r", 0)).reason


def test_last_words_that_were_stored_before_the_service_died_still_count(keep):
    store, read = keep
    store(
        attempts=[attempt_row(attempt(), stamp(0))],
        events=[
            launch_row(target(0), stamp(1)),
            launch_row(target(1), stamp(2)),
            exit_row(0, "completed"),
            exit_row(1, "completed"),
        ],
    )
    runs = RunTracker(TIMING)
    read().restore(runs, IncidentTracker(group_wait_seconds=1, quiet_steps=20))
    runs.tick(1001.0, 1)

    assert "completed" == runs.get(("r", 0)).state


def test_attempt_that_ended_is_not_judged_again_but_remembered(keep):
    store, read = keep
    store(attempts=[attempt_row(attempt(state=RunState.COMPLETED), stamp(0))])
    runs = RunTracker(TIMING)
    read().restore(runs, IncidentTracker(group_wait_seconds=1, quiet_steps=20))
    runs.tick(9999.0, 1)
    before = list(runs.attempts())
    revived = runs.registered(target().registration, 0, Liveness(last_sign=0.0), 5)

    assert [] == before
    assert 7 == revived.last_step


def test_failed_run_stays_failed_when_only_its_living_rank_comes_back(keep):
    store, read = keep
    store(
        attempts=[attempt_row(attempt(state=RunState.FAILED), stamp(0))],
        events=[launch_row(target(0), stamp(1)), launch_row(target(1), stamp(2))],
    )
    runs = RunTracker(TIMING)
    read().restore(runs, IncidentTracker(group_wait_seconds=1, quiet_steps=20))
    states = []
    for rank in (0, 1):
        runs.registered(target(rank).registration, 0, Liveness(last_sign=1000.0), 5)
        runs.tick(1001.0, 1)
        states.append((runs.get(("r", 0)).state, runs.get(("r", 0)).reason))

    assert [("failed", "rank 1 on node1 vanished without a word"), ("running", None)] == states


@pytest.mark.parametrize(
    ("states", "still_open", "past", "unsent"),
    [
        (["opened"], 1, 0, 1),
        (["opened", "notified"], 1, 0, 0),
        (["opened", "undelivered"], 1, 0, 0),
        (["muted"], 1, 0, 0),
        (["opened", "notified", "resolved"], 0, 1, 0),
    ],
)
def test_incident_comes_back_in_the_state_it_had_reached(keep, states, still_open, past, unsent):
    store, read = keep
    incident = some_incident()
    store(
        attempts=[attempt_row(attempt(), stamp(0))],
        events=[incident_row(incident, state, stamp(n)) for n, state in enumerate(states)],
    )
    history = read()

    lists = (history.open_incidents, history.past_incidents, history.unsent)
    assert (still_open, past, unsent) == tuple(map(len, lists))
    for found in itertools.chain(*lists):
        assert (incident.key, {1}, 60, 3) == (found.key, found.ranks, found.last_step, found.events)
        assert message(incident).title == message(found).title


@pytest.mark.parametrize("dataset", sorted(DATASETS.keys() - ROLLUPS.values()))
def test_highest_arrival_number_of_any_dataset_comes_back(keep, dataset):
    store, read = keep
    row = {field.name: "completed" for field in dataset_schema(dataset) if not field.nullable}  # all of them texts
    store(**{dataset: [row | {"ordinal": ordinal} for ordinal in (70, 90, 80, None)]})
    store(attempts=[attempt_row(attempt(), stamp(50))])

    assert 90 == read().last_ordinal


def test_rank_that_writes_incidents_or_launches_itself_is_not_believed(keep):
    store, read = keep
    forged = incident_row(some_incident(), "opened", stamp(0)) | {"ts_origin": "rank"}
    store(attempts=[attempt_row(attempt(), stamp(0))], events=[forged])

    assert ((), ()) == (read().open_incidents, read().unsent)


def test_failure_that_was_told_is_known(keep):
    store, read = keep
    failure = failure_of_unknown_rank()
    store(events=[incident_row(failure, "opened", stamp(0)), incident_row(failure, "notified", stamp(1))])

    assert {failure.key} == read().failures_told
    assert "look closer: rankscope summary r" in message(failure).body.splitlines()


def test_failure_of_an_unknown_rank_is_stored_and_sent_again_without_one(keep):
    store, read = keep
    failure = failure_of_unknown_rank()
    store(events=[incident_row(failure, "opened", stamp(0))])
    (found,) = read().unsent

    assert (None, set()) == (found.first.rank, found.ranks)
    # The row does not repeat the reason, which stands in the tables of runs.
    assert [line for line in message(failure).body.splitlines() if not line.startswith("said:")] == [
        line for line in message(found).body.splitlines() if line != AGAIN
    ]


class ListNotifier:
    """Collects messages, and refuses the first few."""

    priority = 0
    label = "list"

    def __init__(self, refuse=0):
        self.refuse = refuse
        self.messages = []

    async def send(self, text):
        if self.refuse:
            self.refuse -= 1
            raise NotifyError("not now")
        self.messages.append(text)


def announcer(*notifiers, **changes):
    log = []

    async def commit():
        log.append("commit")

    made = Announcer(
        notifiers,
        record=lambda incident, state: log.append(state),
        commit=changes.get("commit", commit),
        count=lambda outcome: log.append(f"count {outcome}"),
        retry_seconds=(0.0, 0.0),
    )
    return made, log


async def test_incident_is_durable_before_it_is_sent_and_confirmed_after():
    notifier = ListNotifier()
    made, log = announcer(notifier)
    await made.announce(some_incident())

    assert ["opened", "commit", "count sent", "notified", "commit"] == log
    assert 1 == len(notifier.messages)


async def test_message_that_may_have_been_delivered_before_a_kill_says_so():
    notifier = ListNotifier()
    made, log = announcer(notifier)
    incident = some_incident()
    await made.announce(incident, again=True)

    assert ["count sent", "notified", "commit"] == log
    assert AGAIN in notifier.messages[0].body
    assert incident.key == notifier.messages[0].key


async def test_failing_notifier_is_tried_again_and_does_not_hold_up_the_other():
    good, flaky, dead = ListNotifier(), ListNotifier(refuse=2), ListNotifier(refuse=99)
    made, log = announcer(good, flaky, dead)
    await made.announce(some_incident())

    assert [1, 1, 0] == [len(notifier.messages) for notifier in (good, flaky, dead)]
    assert ["count failed", "undelivered", "commit"] == log[-3:]


async def test_store_that_hangs_does_not_keep_people_from_hearing(monkeypatch):
    import asyncio

    monkeypatch.setattr("rankscope_ingest.notify.announcer.COMMIT_WAIT_SECONDS", 0.01)
    notifier = ListNotifier()
    made, _ = announcer(notifier, commit=lambda: asyncio.sleep(60))
    await made.announce(some_incident())

    assert 1 == len(notifier.messages)


async def test_muted_incident_is_recorded_only():
    notifier = ListNotifier()
    made, log = announcer(notifier)
    await made.announce(dataclasses.replace(some_incident(), is_muted=True))

    assert (["muted", "commit", "count muted"], []) == (log, notifier.messages)


def test_address_no_notifier_understands_is_refused_without_its_secret():
    with pytest.raises(ConfigError, match=r"notify\.urls\[0\] \(nosuch://…\)") as error:
        make_notifiers(["nosuch://user:s3cret@host"], timeout_seconds=1)

    assert "s3cret" not in str(error.value)
