"""Replica divergence in the service: which ranks differ, from which step on, reported once, also with late ranks."""

from __future__ import annotations

import contextlib
import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_contract.model.events import REPLICA_DESYNC
from rankscope_ingest.detect.divergence import WAIT_SECONDS, DivergenceTracker, diverged_row, divergence_symptom
from rankscope_ingest.detect.history import read_diverged
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.reporting.rows import Stamp, incident_row
from rankscope_ingest.runs.text import headline
from rankscope_storage.base.schema import dataset_schema

RUN = ("r", 0)


def rows(rank, step, replicas="0-2", run="r", **hashes):
    common = {"run": run, "attempt": 0, "rank": rank, "step": step, "replicas": replicas, "kind": "param_after"}
    named = [{**common, "tensor": tensor, "hash": hash_} for tensor, hash_ in hashes.items()]
    return pa.Table.from_pylist(named, schema=dataset_schema("hashes"))


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
}


@pytest.mark.parametrize("name", DELIVERED)
def test_reported_divergences_follow_from_the_delivered_hashes(name):
    tracker, (delivered, expected) = DivergenceTracker(), DELIVERED[name]
    for table in (None, *delivered):
        tracker.add(table, 0.0)
    changes = check(tracker, 1000.0)

    assert (expected, []) == (found(changes), changes.converged)
    assert ({RUN} if expected else set()) == changes.opened


def test_differing_rank_is_named_when_all_ranks_have_delivered():
    tracker = DivergenceTracker()
    tracker.add(rows(0, 101, a=7, b=1), 0.0)
    tracker.add(rows(1, 101, a=8, b=1), 0.0)

    assert [] == found(check(tracker, 1.0))
    tracker.add(rows(2, 101, a=7, b=1), 2.0)
    changes = check(tracker, 2.0)
    assert [(101, "a", (1,))] == found(changes)
    assert {RUN} == changes.opened
    assert [] == found(check(tracker, 99.0))


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


def test_hashes_of_an_inactive_attempt_are_removed():
    tracker = DivergenceTracker()
    tracker.add(rows(0, 1, a=7), 0.0)
    tracker.check([], 0.0)
    for rank in range(1, 3):
        tracker.add(rows(rank, 1, a=8), 0.0)

    assert [] == found(check(tracker))


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
