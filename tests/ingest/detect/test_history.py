"""State that a starting service reads from the store, delivery of notifications, and replica divergence."""

import asyncio
import contextlib
import dataclasses
import itertools
import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.ingest import builders
from tests.properties import examples

from rankscope_contract.model.events import REPLICA_DESYNC, RunState
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.divergence import WAIT_SECONDS, DivergenceTracker, diverged_row, divergence_symptom
from rankscope_ingest.detect.history import read_diverged, read_history
from rankscope_ingest.detect.incidents import IncidentTracker, firings
from rankscope_ingest.live.service_metrics import ServiceMetrics
from rankscope_ingest.notify.announcer import Announcer, Deliveries, NotifyError, incident_message
from rankscope_ingest.pipeline.rows import GivenUp, Stamp, attempt_row, clock_row, gap_row, incident_row, launch_row
from rankscope_ingest.runs.incident import Symptom, run_incident
from rankscope_ingest.runs.models import Liveness
from rankscope_ingest.runs.text import SENT_AGAIN, headline
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_storage.api.store import Store
from rankscope_storage.base.datasets import DATASETS, ROLLUPS
from rankscope_storage.base.rule_names import RUN_FAILED
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.writer.writer import Batch


@pytest.fixture
def store_and_read(tmp_path):
    """Return a function that stores rows by dataset, and one that reads the history."""
    writer = Store.open(tmp_path / "store", create=True).claim(owner="test")

    def store(**rows):
        tables = {dataset: rows_table(dataset, listed) for dataset, listed in rows.items()}
        last = {row["incarnation"]: row["seq"] for listed in rows.values() for row in listed if row.get("seq")}
        writer.append(Batch(tables=tables, watermarks=last))

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


def test_only_records_that_may_still_arrive_are_restored_as_lost(store_and_read):
    store, read = store_and_read
    overwritten, unread = gap_row(target(0), 3, 5, "", stamp(1)), gap_row(target(1), 8, 9, "", stamp(2))
    store(events=[overwritten, unread | {"seq": None}])
    of_rank_1 = target(1).incarnation

    assert {of_rank_1: GivenUp(last=9, records=2)} == read().given_up


def test_active_run_fails_if_its_ranks_do_not_report_after_a_restart(restored):
    runs = restored()
    early = [str(found.state) for found in runs.tick(1024.0, 1)[0]]
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
        *((["opened"], 1, 0, 1), (["opened", "notified"], 1, 0, 0), (["opened", "undelivered"], 1, 0, 0)),
        *((["muted"], 1, 0, 0), (["opened", "notified", "resolved"], 0, 1, 0), (["opened", "resolved"], 0, 1, 1)),
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
        assert incident_message(incident).title == incident_message(found).title


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
    assert [line for line in incident_message(failure).body.splitlines() if not line.startswith("message:")] == [
        line for line in incident_message(found).body.splitlines() if line != SENT_AGAIN
    ]
    assert {failure.key} == read().announced_failures
    assert "details: rankscope summary r" in incident_message(failure).body.splitlines()


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
MUTED = dataclasses.replace(some_incident(), is_muted=True)


@pytest.mark.parametrize(
    ("incident", "is_repeated", "expected", "count"),
    [
        (some_incident(), False, ["opened", "commit", *SENT], 1),
        (some_incident(), True, SENT, 1),
        (MUTED, False, ["muted", "commit", "count notifications muted"], 0),
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
    async with asyncio.timeout(10):
        await made.announce(some_incident())

    assert 1 == len(notifier.messages)


# Firings that the service has polled remain on its page after the end of the rank.

NAME = "rankscope_ingest_anomaly_events_total"


def events(*rows):
    return [{"run": "r", "type": kind, "rule": rule, "kind": of} for kind, rule, of in rows]


def counted(metrics):
    families = text_string_to_metric_families(metrics.page().decode())
    samples = (sample for family in families for sample in family.samples if sample.name == NAME)
    return {tuple(sample.labels[name] for name in ("run", "rank", "rule", "kind")): sample.value for sample in samples}


def test_firings_are_counted_by_rule_and_kind():
    happened = events(
        ("anomaly", "AnomalyNan", "grad_reduced"),
        ("anomaly", "AnomalyNan", "grad_reduced"),
        ("anomaly", "AnomalyNan", None),
        ("anomaly", None, "grad_reduced"),
        ("exit", "AnomalyNan", "grad_reduced"),
    )

    assert {("AnomalyNan", "grad_reduced"): 2, ("AnomalyNan", ""): 1} == firings(happened)
    assert {} == firings(events(("exit", None, None)))


def test_counter_increases_and_remains_while_the_run_is_known():
    metrics = ServiceMetrics()
    metrics.fired("gone", 0, {("AnomalyNan", ""): 1})
    metrics.fired("r", 1, {("AnomalyNan", "grad_reduced"): 2})
    metrics.fired("r", 1, {("AnomalyNan", "grad_reduced"): 3})
    metrics.fired("r", None, {("ReplicaDesync", "param_after"): 1})
    metrics.show([], [builders.attempt()], [], 0)
    expected = {("r", "1", "AnomalyNan", "grad_reduced"): 5.0, ("r", "unknown", "ReplicaDesync", "param_after"): 1.0}

    assert expected == counted(metrics)


# Replica divergence: which ranks differ, from which step on, reported once, also with late ranks.

RUN = ("r", 0)


def rows(rank, step, replicas="0-2", run="r", **hashes):
    common = {"run": run, "attempt": 0, "rank": rank, "step": step, "replicas": replicas, "kind": "param_after"}
    return [{**common, "vpp_stage": None, "tensor": tensor, "hash": hash_} for tensor, hash_ in hashes.items()]


def found(changes):
    return [(item.step, item.tensor, item.ranks) for item in changes.diverged]


def check(tracker, now=0.0):
    return tracker.check([RUN], now)


DELIVERED = {
    "equal ranks": ([rows(rank, step, a=7, b=-1) for step in (1, 101, 201) for rank in range(3)], []),
    "different groups": ([rows(rank, 1, ("0,2", "1,3")[rank % 2], a=rank % 2) for rank in range(4)], []),
    "repeated step of a rank": ([rows(rank, 1, "0,1", a=hash_) for rank, hash_ in ((0, 7), (0, 8), (1, 8))], []),
    "no valid group": ([rows(rank, 1, given, a=rank) for given in (None, "everybody", "9-1") for rank in (0, 1)], []),
    "further tensors": (
        [
            rows(rank, step, a=(7, wrong)[rank == 1], b=(1, other)[rank == 1])
            for step, wrong, other in ((1, 8, 1), (101, 9, 1), (201, 10, 2))
            for rank in range(3)
        ],
        [(1, "a", (1,)), (201, "b", (1,))],
    ),
    "further ranks": (
        [
            rows(rank, step, "0-4", a=int(0 < rank <= wrong))
            for step, wrong in ((1, 1), (2, 2), (3, 2))
            for rank in range(5)
        ],
        [(1, "a", (1,)), (2, "a", (1, 2))],
    ),
}


@pytest.mark.parametrize("name", DELIVERED)
def test_reported_divergences_follow_from_the_delivered_hashes(name):
    tracker, (delivered, expected) = DivergenceTracker(), DELIVERED[name]
    for table in ([], *delivered):
        tracker.add(table, 0.0)
    changes = check(tracker, 1000.0)

    assert (expected, []) == (found(changes), changes.converged)
    assert ({RUN} if expected else set()) == changes.opened


@pytest.mark.parametrize(
    ("hashes", "rank", "ranks"), [((7, 7, 8), 2, [2]), ((7, 8), None, [0, 1]), ((7, 8, 9, 7), None, [1, 2])]
)
def test_event_has_a_rank_only_if_one_rank_differs(hashes, rank, ranks):
    """If several ranks differ, none is singled out. Without a majority, all are named."""
    tracker = DivergenceTracker()
    for one, value in enumerate(hashes):
        tracker.add(rows(one, 5, f"0-{len(hashes) - 1}", a=value), 0.0)
    (item,) = check(tracker, WAIT_SECONDS).diverged
    row, symptom = diverged_row(item, Stamp(0, 0)), divergence_symptom([item])
    incident = IncidentTracker(group_wait_seconds=1, quiet_steps=20).observe(symptom, 0.0)

    assert (rank, ranks) == (row["rank"], json.loads(row["details"])["ranks"])
    assert rank == symptom.rank == incident_row(incident, "opened", Stamp(0, 0))["rank"]
    shown = f"rank {rank}" if rank is not None else f"ranks {ranks[0]}-{ranks[1]}"
    assert f"ReplicaDesync in param_after of a, {shown}, step 5" == headline(incident.first)


def test_step_waits_for_a_late_rank_and_is_judged_again_with_it():
    tracker = DivergenceTracker()
    tracker.add(rows(0, 5, "0-3", a=7), 0.0)
    tracker.add(rows(1, 5, "0-3", a=7), 0.0)
    tracker.add(rows(2, 5, "0-3", a=8), 50.0)

    assert [] == found(check(tracker, 50.0 + WAIT_SECONDS / 2))
    assert [(5, "a", (2,))] == found(check(tracker, 50.0 + WAIT_SECONDS))
    tracker.add(rows(3, 5, "0-3", a=9), 500.0)
    late = check(tracker, 500.0)
    assert [(5, "a", (2, 3))] == found(late)
    assert set() == late.opened


def test_convergence_is_reported_and_a_new_divergence_too():
    """This happens after a restart from a checkpoint that all ranks load."""
    tracker = DivergenceTracker()
    for step, other in ((1, 8), (101, 7), (201, 9)):
        for rank in range(3):
            tracker.add(rows(rank, step, a=other if rank == 0 else 7), 0.0)
        changes = check(tracker)
        assert ({1: [(1, "a", (0,))], 101: [], 201: [(201, "a", (0,))]}[step]) == found(changes)
        assert [101] * (step == 101) == [item.step for item in changes.converged]


@given(st.permutations([(rank, step) for rank in range(3) for step in (1, 2, 3)]), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=examples(20), deadline=None)
def test_first_step_and_rank_do_not_depend_on_the_order_of_arrival(order, first, wrong):
    def reported(order):
        tracker = DivergenceTracker()
        for rank, step in order:
            tracker.add(rows(rank, step, a=step * 10 + (rank == wrong and step >= first)), 0.0)
            yield from found(check(tracker))

    in_any_order = list(reported(order))

    assert {("a", (wrong,))} == {one[1:] for one in in_any_order}
    assert first <= in_any_order[0][0]
    assert [(first, "a", (wrong,))] == list(reported(sorted(order, key=lambda item: item[1])))


def wire(**hashes):
    return [
        {"kind": "param_after", "tensor": tensor, "replicas": "0-2", "dtype": "float32", "hash": hash_, "numel": 4}
        for tensor, hash_ in hashes.items()
    ]


EVENTS = (
    f"SELECT step, rank, tensor, type, severity, details FROM events WHERE rule = '{REPLICA_DESYNC}' ORDER BY ordinal"
)


async def test_service_stores_events_and_one_incident_also_after_a_restart(start_service, fake_rank, eventually):
    async with contextlib.AsyncExitStack() as stack:
        async with start_service() as service:
            ranks = [await stack.enter_async_context(fake_rank(rank=rank, world_size=3)) for rank in range(3)]
            for rank in ranks:
                assert 200 == (await rank.register(service.url))[0]
            for step in (1, 101):
                for number, rank in enumerate(ranks):
                    rank.publish(step=step, hashes=wire(a=7, b=3 + (number == 2 and step == 101)))
            await eventually(lambda: any(row["type"] == "incident" for row in service.rows(EVENTS)))
            _, page = await service.get("/metrics")
            # Only one rank has delivered the next step when the service stops.
            ranks[0].publish(step=201, hashes=wire(a=7, b=3))
            await eventually(lambda: service.rows("SELECT 1 FROM hashes WHERE step = 201"))
        stored = service.rows(EVENTS)

        events = [row for row in stored if row["type"] == "anomaly"]
        assert [(101, 2, "b", "critical")] == [
            (row["step"], row["rank"], row["tensor"], row["severity"]) for row in events
        ]
        details = json.loads(events[0]["details"])
        assert ({"0000000000000003": [0, 1], "0000000000000004": [2]}, [2]) == (details["hashes"], details["ranks"])
        assert 1 == len({json.loads(row["details"])["key"] for row in stored if row["type"] == "incident"})
        assert (
            f'rankscope_ingest_anomaly_events_total{{kind="param_after",rank="2",rule="{REPLICA_DESYNC}",run="r"}} 1.0'
            in page
        )

        async with start_service() as service:
            for rank in ranks:
                await rank.register(service.url)
            for rank in ranks[1:]:
                rank.publish(step=201, hashes=wire(a=7 + 100 * (rank is ranks[2]), b=4 if rank is ranks[2] else 3))
            changes = await eventually(
                lambda: [row for row in service.rows(EVENTS) if row["type"] == "anomaly" and row["step"] == 201]
            )
        assert [(2, "a")] == [(row["rank"], row["tensor"]) for row in changes]


@pytest.mark.parametrize("text", ["{", "{}", '{"hashes": 3}', '{"hashes": {"zz": [0]}}', '{"hashes": {"07": [0]}}'])
def test_malformed_divergence_events_are_ignored_at_the_start(text):
    class Reader:
        def query(self, query):
            row = {"run": "r", "attempt": 0, "step": 1, "kind": "k", "tensor": "t", "vpp_stage": None}
            return pa.Table.from_pylist([row | {"details": text, "type": "anomaly"}])

    assert [] == read_diverged(Reader())
