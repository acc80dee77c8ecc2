"""Hashes of replicas in the service: who disagrees, from which step on, told once, whoever is late."""

from __future__ import annotations

import contextlib
import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_contract.model.events import REPLICA_DESYNC
from rankscope_ingest.detect.divergence_handler import _symptom, apart_row
from rankscope_ingest.detect.divergence_tracker import WAIT_SECONDS, DivergenceTracker
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.notify.incident import headline
from rankscope_ingest.reporting.rows import Stamp, incident_row
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.service.history import read_apart
from rankscope_storage.base.schema import dataset_schema

RUN = ("r", 0)


def rows(rank, step, replicas="0-2", run="r", **hashes):
    common = {"run": run, "attempt": 0, "rank": rank, "step": step, "replicas": replicas, "kind": "param_after"}
    named = [{**common, "tensor": tensor, "hash": hash_} for tensor, hash_ in hashes.items()]
    return pa.Table.from_pylist(named, schema=dataset_schema("hashes"))


def found(news):
    return [(item.step, item.tensor, item.ranks) for item in news.apart]


def look(book, now=0.0):
    return book.look([RUN], now)


def test_equal_ranks_are_never_told_of():
    book = DivergenceTracker()
    for step in (1, 101, 201):
        for rank in range(3):
            book.heard(rows(rank, step, a=7, b=-1), 0.0)
            news = look(book, 1000.0)

            assert ([], []) == (news.apart, news.again)


def test_the_one_that_disagrees_with_the_others_is_named_once_all_have_spoken():
    book = DivergenceTracker()
    book.heard(rows(0, 101, a=7, b=1), 0.0)
    book.heard(rows(1, 101, a=8, b=1), 0.0)

    assert [] == found(look(book, 1.0))
    book.heard(rows(2, 101, a=7, b=1), 2.0)
    news = look(book, 2.0)
    assert [(101, "a", (1,))] == found(news)
    assert {RUN} == news.opened
    assert [] == found(look(book, 99.0))


def test_two_ranks_have_no_majority_and_are_both_named():
    book = DivergenceTracker()
    for rank in range(2):
        book.heard(rows(rank, 5, "0,1", a=rank), 0.0)

    news = look(book)
    assert [(5, "a", (0, 1))] == found(news)
    assert "ReplicaDesync in param_after of a, ranks 0-1, step 5" == headline(_symptom(news.apart))
    assert (None, None) == (_symptom(news.apart).rank, apart_row(news.apart[0], Stamp(0, 0))["rank"])


@pytest.mark.parametrize(
    ("hashes", "rank", "ranks"),
    [((7, 7, 8), 2, [2]), ((7, 8), None, [0, 1]), ((7, 8, 9, 7), None, [1, 2]), ((8, 7, 9), None, [0, 1, 2])],
)
def test_an_event_has_a_rank_where_one_alone_disagrees(hashes, rank, ranks):
    """The lowest of several is no more to blame than the others."""
    book = DivergenceTracker()
    for one, value in enumerate(hashes):
        book.heard(rows(one, 5, f"0-{len(hashes) - 1}", a=value), 0.0)
    (item,) = look(book, WAIT_SECONDS).apart
    row = apart_row(item, Stamp(0, 0))
    incident = IncidentTracker(group_wait_seconds=1, quiet_steps=20).observe(_symptom([item]), 0.0)

    assert (rank, ranks) == (row["rank"], json.loads(row["details"])["ranks"])
    assert rank == incident_row(incident, "opened", Stamp(0, 0))["rank"]
    assert (rank is not None) == (f", rank {rank}," in headline(incident.first))


def test_firings_without_a_rank_are_counted_as_those_of_an_unknown_one():
    metrics = ServiceMetrics()
    metrics.fired("r", None, {(REPLICA_DESYNC, "param_after"): 1})
    series = (
        f'rankscope_ingest_anomaly_events_total{{kind="param_after",rank="unknown",rule="{REPLICA_DESYNC}",run="r"}}'
    )

    assert f"{series} 1.0" in metrics.page().decode()


def test_a_rank_that_is_late_is_waited_for_some_seconds_and_judged_when_it_comes():
    book = DivergenceTracker()
    book.heard(rows(0, 5, "0-3", a=7), 0.0)
    book.heard(rows(1, 5, "0-3", a=7), 0.0)
    book.heard(rows(2, 5, "0-3", a=8), 50.0)

    assert [] == found(look(book, 50.0 + WAIT_SECONDS / 2))
    assert [(5, "a", (2,))] == found(look(book, 50.0 + WAIT_SECONDS))
    book.heard(rows(3, 5, "0-3", a=9), 500.0)
    late = look(book, 500.0)
    assert [(5, "a", (2, 3))] == found(late)
    assert set() == late.opened


def test_what_stays_apart_is_not_told_again_and_what_joins_is():
    book = DivergenceTracker()
    for step, hashes in ((1, {"a": 8, "b": 1}), (101, {"a": 9, "b": 1}), (201, {"a": 10, "b": 2})):
        for rank in range(3):
            book.heard(rows(rank, step, **(hashes if rank == 1 else {"a": 7, "b": 1})), 0.0)
    news = look(book)

    assert [(1, "a", (1,)), (201, "b", (1,))] == found(news)
    assert {RUN} == news.opened


def test_equal_again_is_told_and_the_next_time_is_news():
    """As after a restart from a checkpoint that all ranks read."""
    book = DivergenceTracker()
    for step, other in ((1, 8), (101, 7), (201, 9)):
        for rank in range(3):
            book.heard(rows(rank, step, a=other if rank == 0 else 7), 0.0)
        news = look(book)
        assert ({1: [(1, "a", (0,))], 101: [], 201: [(201, "a", (0,))]}[step]) == found(news)
        assert [101] * (step == 101) == [item.step for item in news.again]


def test_copies_of_other_parts_and_other_attempts_are_not_compared():
    book = DivergenceTracker()
    for rank, group in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        book.heard(rows(rank, 1, group, a=rank % 2), 0.0)

    assert [] == found(look(book))


def test_a_step_made_again_replaces_what_the_rank_said_before():
    book = DivergenceTracker()
    book.heard(rows(0, 1, "0,1", a=7), 0.0)
    book.heard(rows(0, 1, "0,1", a=8), 0.0)
    book.heard(rows(1, 1, "0,1", a=8), 0.0)

    assert [] == found(look(book))


def test_hashes_that_say_nothing_of_others_or_speak_otherwise_are_passed_over():
    book = DivergenceTracker()
    for replicas in (None, "everybody", "9-1"):
        for rank in range(2):
            book.heard(rows(rank, 1, replicas, a=rank), 0.0)
    book.heard(None, 0.0)

    assert [] == found(look(book, 1000.0))


def test_what_ended_is_forgotten():
    book = DivergenceTracker()
    book.heard(rows(0, 1, a=7), 0.0)
    book.look([], 0.0)
    for rank in range(1, 3):
        book.heard(rows(rank, 1, a=8), 0.0)

    assert [] == found(look(book))


@given(st.permutations([(rank, step) for rank in range(3) for step in (1, 2, 3)]), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_in_whatever_order_ranks_speak_the_first_step_and_the_rank_are_the_same(order, first, wrong):
    book = DivergenceTracker()
    told = []
    for rank, step in order:
        book.heard(rows(rank, step, a=step * 10 + (rank == wrong and step >= first)), 0.0)
        told += found(look(book))

    assert {"a"} == {tensor for _, tensor, _ in told}
    assert {(wrong,)} == {ranks for _, _, ranks in told}
    assert first <= told[0][0]
    in_lockstep = sorted(order, key=lambda item: item[1])
    book, told = DivergenceTracker(), []
    for rank, step in in_lockstep:
        book.heard(rows(rank, step, a=step * 10 + (rank == wrong and step >= first)), 0.0)
        told += found(look(book))
    assert [(first, "a", (wrong,))] == told


def wire(**hashes):
    return [
        {"kind": "param_after", "tensor": tensor, "replicas": "0-2", "dtype": "float32", "hash": hash_, "numel": 4}
        for tensor, hash_ in hashes.items()
    ]


async def ranks_of(fake_rank, service, stack):
    ranks = [await stack.enter_async_context(fake_rank(rank=rank, world_size=3)) for rank in range(3)]
    for rank in ranks:
        assert 200 == (await rank.register(service.url))[0]
    return ranks


TOLD = (
    f"SELECT step, rank, tensor, type, severity, details FROM events WHERE rule = '{REPLICA_DESYNC}' ORDER BY ordinal"
)


async def test_the_service_stores_an_event_and_one_incident_and_stays_silent_over_a_restart(
    start_service, fake_rank, eventually
):
    async with contextlib.AsyncExitStack() as stack:
        async with start_service() as service:
            ranks = await ranks_of(fake_rank, service, stack)
            for step in (1, 101):
                for number, rank in enumerate(ranks):
                    rank.publish(step=step, hashes=wire(a=7, b=3 + (number == 2 and step == 101)))
            await eventually(lambda: any(row["type"] == "incident" for row in service.rows(TOLD)))
            _, page = await service.get("/metrics")
            # One rank has told of the next step when the service stops, the others have not.
            ranks[0].publish(step=201, hashes=wire(a=7, b=3))
            await eventually(lambda: service.rows("SELECT 1 FROM hashes WHERE step = 201"))
        stored = service.rows(TOLD)

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
            news = await eventually(
                lambda: [row for row in service.rows(TOLD) if row["type"] == "anomaly" and row["step"] == 201]
            )
        assert [(2, "a")] == [(row["rank"], row["tensor"]) for row in news]


@pytest.mark.parametrize("text", ["{", "{}", '{"hashes": 3}', '{"hashes": {"zz": [0]}}', '{"hashes": {"07": [0]}}'])
def test_events_that_tell_otherwise_are_passed_over_at_a_start(text):
    class Reader:
        def query(self, query):
            row = {"run": "r", "attempt": 0, "step": 1, "kind": "k", "tensor": "t", "vpp_stage": None}
            return pa.Table.from_pylist([row | {"details": text, "type": "anomaly"}])

    assert [] == read_apart(Reader())
