"""State that a starting service reads from the store, and delivery of notifications."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest
from tests.ingest import builders

from rankscope_contract.model.events import RUN_FAILED, RunState
from rankscope_contract.model.schema import DATASETS, ROLLUPS
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.history import read_history
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.notify.announcer import Announcer, message
from rankscope_ingest.notify.deliveries import Deliveries
from rankscope_ingest.notify.notifiers import NotifyError
from rankscope_ingest.reporting.rows import Stamp, attempt_row, clock_row, incident_row, launch_row
from rankscope_ingest.runs.incident import Symptom, run_incident
from rankscope_ingest.runs.models import Liveness
from rankscope_ingest.runs.text import SENT_AGAIN
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_storage.api.store import Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.writer.writer import Batch


@pytest.fixture
def store_and_read(tmp_path):
    """Return a function that stores rows by dataset, and one that reads the history."""
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
    fields = {"number": number, "launch_id": launch, "world_size": 2, "started_at": 100 + number, "state": state}
    return builders.attempt(**(fields | {"last_step": 7} | changes))


def target(rank=0):
    return builders.target(builders.registration(rank=rank, world_size=2, host=f"node{rank}", launch_id="l0"))


def exit_row(rank, reason):
    who = {"run": "r", "attempt": 0, "rank": rank, "incarnation": f"i{rank}"}
    return who | {"type": "exit", "details": f'{{"reason": "{reason}"}}', "ordinal": 50}


def failure_of_unknown_rank():
    return run_incident(
        RUN_FAILED,
        attempt(),
        rank=None,
        reason="ranks 0-1 on h stopped responding without an exit report",
        cause="unknown: ranks 0-1 stopped responding in an unknown order",
        reports=("ranks 0-1: step 7, 31 s ago, stopped responding",),
        opened_at=0.0,
    )


def some_incident(step=60, severity="critical"):
    first = Symptom(
        run="r", attempt=0, rank=1, step=step, severity=severity, causal=(step,), rule="AnomalyNan", tensor="w",
        further_subjects=frozenset({("AnomalyNan", "v")}), events=3,
    )  # fmt: skip
    incidents = IncidentTracker(group_wait_seconds=0, quiet_steps=20)
    incidents.observe(first, 0.0)
    return incidents.settle(1.0, {})[0]


@pytest.fixture
def restored(store_and_read):
    """Return a function that stores an attempt of two ranks and further events, and restores a tracker from it."""
    store, read = store_and_read

    def restore(state=RunState.RUNNING, *events):
        launches = [launch_row(target(rank), stamp(1 + rank)) for rank in range(2)]
        store(attempts=[attempt_row(attempt(state=state), stamp(0))], events=[*launches, *events])
        runs = RunTracker(RunsSection())
        read().restore(runs, IncidentTracker(group_wait_seconds=1, quiet_steps=20))
        return runs

    return restore


def test_launches_attempts_and_jumps_of_the_clock_are_restored(store_and_read):
    store, read = store_and_read
    empty = read()
    jumps = [clock_row(attempt(0), -3_600_000_000, stamp(2)), clock_row(attempt(0), 5_000_000, stamp(3))]
    store(attempts=[attempt_row(attempt(n, launch=f"l{n}"), stamp(n)) for n in range(3)], events=jumps)
    found = read()

    assert ([], (), ()) == (empty.launches, empty.attempts, empty.unsent)
    assert [("r", f"l{n}", n) for n in range(3)] == sorted(found.launches)
    assert {"r": 100} == found.run_starts
    assert [-3_595_000_000, 0, 0] == [one.clock_offset for one in found.attempts]


def test_active_run_fails_if_its_ranks_do_not_report_after_a_restart(restored):
    runs = restored()
    early = [str(found.state) for found in runs.tick(1024.0, 1).changed]
    runs.tick(1025.0, 1)
    found = runs.get(("r", 0))

    assert ([], "failed", None) == (early, found.state, found.culprit)
    assert (
        "rank 0 on node0, rank 1 on node1 did not respond after the service restarted "
        "(ended or killed while it was down); which rank failed first is unknown"
    ) == found.reason


def test_exit_reports_in_the_store_complete_the_run(restored):
    runs = restored(RunState.RUNNING, exit_row(0, "completed"), exit_row(1, "completed"))
    runs.tick(1001.0, 1)

    assert "completed" == runs.get(("r", 0)).state


def test_ended_attempt_is_remembered_but_not_judged_again(restored):
    runs = restored(RunState.COMPLETED)
    runs.tick(9999.0, 1)
    found = []
    for _ in range(2):
        found.append(list(runs.attempts()))
        revived = runs.registered(target().registration, 0, Liveness(last_sign=0.0), 5)
        found.append((list(runs.attempts()) == [revived], revived.last_step, list(revived.ranks)))
        runs.forget(("r", 0))

    assert [[], (True, 7, [0])] * 2 == found


def test_failed_run_remains_failed_until_all_its_ranks_register(restored):
    runs, states = restored(RunState.FAILED), []
    for rank in (0, 1):
        runs.registered(target(rank).registration, 0, Liveness(last_sign=1000.0), 5)
        runs.tick(1001.0, 1)
        states.append((runs.get(("r", 0)).state, runs.get(("r", 0)).reason))

    assert [("failed", "rank 1 on node1 stopped responding without an exit report"), ("running", None)] == states


@pytest.mark.usual(2)
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
def test_incident_is_restored_in_its_last_state(store_and_read, states, still_open, past, unsent):
    store, read = store_and_read
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
        assert incident.subjects == found.subjects
        assert message(incident).title == message(found).title


@pytest.mark.usual(3)
@pytest.mark.parametrize("dataset", sorted(DATASETS.keys() - ROLLUPS.values()))
def test_last_ordinal_is_the_highest_of_all_datasets(store_and_read, dataset):
    store, read = store_and_read
    row = {field.name: "completed" for field in dataset_schema(dataset) if not field.nullable}
    store(**{dataset: [row | {"ordinal": ordinal} for ordinal in (70, 90, 80, None)]})
    store(attempts=[attempt_row(attempt(), stamp(50))])

    assert 90 == read().last_ordinal


def test_incident_rows_written_by_a_rank_are_ignored(store_and_read):
    store, read = store_and_read
    forged = incident_row(some_incident(), "opened", stamp(0)) | {"ts_origin": "rank"}
    store(attempts=[attempt_row(attempt(), stamp(0))], events=[forged])

    assert ((), ()) == (read().open_incidents, read().unsent)


def test_failure_of_an_unknown_rank_is_sent_again_without_a_rank(store_and_read):
    store, read = store_and_read
    failure = failure_of_unknown_rank()
    store(events=[incident_row(failure, "opened", stamp(0))])
    (found,) = read().unsent
    store(events=[incident_row(failure, "notified", stamp(1))])

    assert (None, set()) == (found.first.rank, found.ranks)
    # The row does not contain the reason, which is in the tables of runs.
    assert [line for line in message(failure).body.splitlines() if not line.startswith("message:")] == [
        line for line in message(found).body.splitlines() if line != SENT_AGAIN
    ]
    assert {failure.key} == read().announced_failures
    assert "details: rankscope summary r" in message(failure).body.splitlines()


class ListNotifier:
    """Collects messages, and rejects the first `refuse` ones."""

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
        deliveries=Deliveries(lambda spec, outcome: log.append(f"count {spec.name.split('_')[-2]} {outcome}")),
        retry_seconds=(0.0, 0.0),
    )
    return made, log


SENT = ["count attempts sent", "count notifications sent", "notified", "commit"]


@pytest.mark.parametrize(
    ("incident", "is_repeated", "expected", "count"),
    [
        (some_incident(), False, ["opened", "commit", *SENT], 1),
        (some_incident(), True, SENT, 1),
        (
            dataclasses.replace(some_incident(), is_muted=True),
            False,
            ["muted", "commit", "count notifications muted"],
            0,
        ),
    ],
    ids=["first", "repeated", "muted"],
)
async def test_incident_is_committed_before_it_is_sent_and_again_after(incident, is_repeated, expected, count):
    notifier = ListNotifier()
    made, log = announcer(notifier)
    await made.announce(incident, is_repeated=is_repeated)

    assert (expected, [incident.key] * count) == (log, [one.key for one in notifier.messages])
    assert all(is_repeated == (SENT_AGAIN in one.body) for one in notifier.messages)


async def test_failing_notifier_is_retried_and_delays_no_other():
    good, flaky, dead = ListNotifier(), ListNotifier(refuse=2), ListNotifier(refuse=99)
    made, log = announcer(good, flaky, dead)
    await made.announce(some_incident())

    assert [1, 1, 0] == [len(notifier.messages) for notifier in (good, flaky, dead)]
    assert ["count attempts failed", "count notifications failed", "undelivered", "commit"] == log[-4:]
    assert 5 == log.count("count attempts failed")


async def test_message_is_sent_if_the_commit_times_out(monkeypatch):
    monkeypatch.setattr("rankscope_ingest.notify.announcer.COMMIT_WAIT_SECONDS", 0.01)
    notifier = ListNotifier()
    made, _ = announcer(notifier, commit=lambda: asyncio.sleep(60))
    await made.announce(some_incident())

    assert 1 == len(notifier.messages)
