"""Calls of collectives that flight records of several ranks show."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.model.flights import MIB, entry, record

from rankscope_contract.model.stacks import FlightRecord, GroupProgress
from rankscope_ingest.runs.collective_calls import Call, calls_of_note, sentences
from rankscope_storage.sql.collective_calls import CallState


def only(records: Mapping[int, FlightRecord]) -> Call:
    (call,) = calls_of_note(records)
    return call


WAITS, THROUGH = record(entry(40), entry(41, pending=True)), record(entry(41), entry(42))
CALL = "all_reduce 41 (4.0 MiB float32) of dp"


@pytest.mark.parametrize(
    ("records", "state", "sentence"),
    [
        (
            {0: WAITS, 1: WAITS, 2: WAITS, 3: record(entry(40))},
            *(CallState.NEVER_ENTERED, f"rank 3 never entered {CALL}; ranks 0-2 are in it since 62 s"),
        ),
        (
            {0: THROUGH, 1: record(entry(41, pending=True)), 2: THROUGH, 3: THROUGH},
            CallState.NEVER_LEFT,
            f"rank 1 entered {CALL} since 62 s and never left it; ranks 0, 2-3 completed it",
        ),
        (
            dict.fromkeys(range(4), record(entry(41, pending=True))),
            *(CallState.ALL_IN, f"ranks 0-3 are all in {CALL} since 62 s, and none has left it"),
        ),
        (
            {0: WAITS, 1: WAITS, 2: WAITS},
            *(CallState.UNKNOWN, f"ranks 0-2 are in {CALL} since 62 s; rank 3 has no record"),
        ),
    ],
)
def test_state_of_a_call_and_its_sentence(records, state, sentence):
    assert state is only(records).state
    assert [sentence] == sentences(records)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (entry(41, pending=True, op="broadcast"), "rank 3 broadcast (4.0 MiB float32)"),
        (entry(41, pending=True, bytes=8 * MIB), "rank 3 all_reduce (8.0 MiB float32)"),
        (entry(41, pending=True, dtypes=("BFloat16",)), "rank 3 all_reduce (4.0 MiB bfloat16)"),
        (entry(41, pending=True, op="barrier", bytes=None, dtypes=()), "rank 3 barrier"),
    ],
)
def test_mismatched_calls_are_reported_with_the_operation_of_each_rank(other, words):
    waits = record(entry(41, pending=True))
    records = {0: waits, 1: waits, 2: waits, 3: record(other)}

    assert only(records).is_mismatch
    sentence = f"ranks differ in collective 41 of dp: ranks 0-2 all_reduce (4.0 MiB float32), {words}; ranks 0-3 are"
    assert [f"{sentence} in it since 62 s"] == sentences(records)


def test_earlier_mismatch_is_reported_before_the_pending_call():
    """The pending call is the same on both ranks."""
    one = record(entry(40), entry(41), entry(42, pending=True), ranks="0-1")
    other = record(entry(40), entry(41, op="broadcast"), entry(42, pending=True), ranks="0-1")

    assert [(41, CallState.OVER, True), (42, CallState.ALL_IN, False)] == [
        (call.seq, call.state, call.is_mismatch) for call in calls_of_note({0: one, 1: other})
    ]


def test_different_tensors_of_a_gather_and_of_a_scatter_are_no_mismatch():
    """Only the source of a scatter has tensors. The other ranks complete it when they have received their part."""
    sizes = [entry(41, pending=True, op="gather", bytes=size * MIB) for size in (1, 2)]
    source, others = entry(41, pending=True, op="scatter"), entry(41, op="scatter", dtypes=(), sizes=(), bytes=None)
    scatter = {0: record(others), 1: record(source), 2: record(others), 3: record(entry(40))}

    assert not only({rank: record(one, ranks="0-1") for rank, one in enumerate(sizes)}).is_mismatch
    assert not only(scatter).is_mismatch
    assert (3,) == only(scatter).missing


def test_call_that_blocks_another_call_comes_first():
    """Rank 1 cannot enter the call of dp, because it waits in a call of tp, which rank 3 never entered."""
    records = {
        0: record(entry(41, pending=True), ranks="0-1", dp=41),
        1: record(entry(7, pending=True, group="tp"), ranks="0-1", dp=40),
        3: record(ranks="1,3", tp=6),
    }
    groups = (*records[1].groups, GroupProgress(id="id of tp", ranks="1,3", latest_seq=7))
    records[1] = replace(records[1], groups=groups)

    assert [("tp", (3,)), ("dp", (1,))] == [(call.group, call.missing) for call in calls_of_note(records)]


def test_groups_with_one_description_are_distinguished_by_id():
    mine, theirs = entry(5, pending=True, group_id="a"), entry(5, pending=True, group_id="b")
    records = {
        rank: replace(record(one), groups=(GroupProgress(id=str(one.group_id), ranks=ranks, latest_seq=5),))
        for rank, one, ranks in ((0, mine, "0-1"), (1, mine, "0-1"), (2, theirs, "2-3"))
    }

    assert [((0, 1), ()), ((2,), (3,))] == [(call.waiting, call.unknown) for call in calls_of_note(records)]


def test_point_to_point_messages_are_no_collective_calls():
    assert [] == calls_of_note({0: record(entry(5, pending=True, op="send 0->1", is_p2p=True), ranks="0-1")})


def test_groups_of_a_record_without_group_list_are_taken_from_its_calls():
    """A rank of an earlier release sends such a record."""
    calls = (entry(41, pending=True, group_id=None, bytes=None), entry(40, group_id=None, bytes=None))
    records = {rank: replace(record(call), groups=()) for rank, call in enumerate(calls)}

    assert ["rank 1 never entered all_reduce 41 (float32) of dp; rank 0 is in it since 62 s"] == sentences(records)


# Any history, compared with a simulation of the calls of each rank.

KEPT = 3


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, int], dict[int, dict[int, str]], set[int]]:
    """Return entered calls, completed calls and operations by rank, and the ranks that send a record."""
    size = draw(st.integers(1, 4))
    entered = {rank: draw(st.integers(0, 6)) for rank in range(size)}
    left = {rank: count - draw(st.integers(0, min(1, count))) for rank, count in entered.items()}
    ops = {
        rank: {seq: draw(st.sampled_from(["all_reduce", "all_reduce", "broadcast"])) for seq in range(1, count + 1)}
        for rank, count in entered.items()
    }
    return entered, left, ops, draw(st.sets(st.sampled_from(range(size)), min_size=1))


@given(histories())
def test_calls_equal_a_simulation_for_every_history(history):
    entered, left, ops, reporting = history
    everyone = f"0-{len(entered) - 1}"
    kept = {rank: range(max(1, entered[rank] - KEPT + 1), entered[rank] + 1) for rank in reporting}
    calls = {rank: [entry(seq, pending=seq > left[rank], op=ops[rank][seq]) for seq in kept[rank]] for rank in kept}
    records = {rank: record(*calls[rank], ranks=everyone, dp=entered[rank] or -1) for rank in reporting}

    expected = {}
    for seq in range(1, 7):
        waiting = {rank for rank in reporting if left[rank] < seq <= entered[rank]}
        if waiting:
            missing, over = (
                {rank for rank in reporting if seq > entered[rank]},
                {rank for rank in reporting if seq <= left[rank]},
            )
            expected[seq] = (missing, waiting, over, set(entered) - reporting)
    found = {call.seq: call for call in calls_of_note(records)}

    assert expected == {
        seq: (set(call.missing), set(call.waiting), set(call.left), set(call.unknown))
        for seq, call in found.items()
        if call.waiting
    }
    seen = {seq: {ops[rank][seq] for rank in reporting if seq in kept[rank]} for seq in range(1, 7)}
    differing = [seq for seq, called in seen.items() if len(called) > 1]
    assert {call.seq for call in found.values() if call.is_mismatch} <= set(differing)
    assert not differing or found[differing[0]].is_mismatch
    assert all(call.sentence() for call in found.values())
