"""Stacks and flight records as JSON and text, and groups of ranks at the same place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.diagnostics.rank_groups import Standing, grouped, own_frame, ranks_text
from rankscope_contract.diagnostics.stacks import Collective, FlightRecord, Frame, StackDump, ThreadStack, stacks_text

TEXT = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=20)  # printable
COUNT = st.integers(0, 1 << 40)
FRAMES = st.lists(st.builds(Frame, TEXT, COUNT, TEXT), max_size=4).map(tuple)
THREADS = st.builds(
    ThreadStack,
    ident=COUNT,
    frames=FRAMES,
    name=st.none() | TEXT,
    is_training=st.booleans(),
    is_ours=st.booleans(),
    calls=st.none() | TEXT,
)
COLLECTIVES = st.builds(
    Collective,
    op=TEXT,
    backend=TEXT,
    group=TEXT,
    seq=COUNT,
    is_pending=st.booleans(),
    age_seconds=st.floats(0, 1e9),
    is_p2p=st.booleans(),
    sizes=st.lists(st.lists(COUNT, max_size=3).map(tuple), max_size=2).map(tuple),
    dtypes=st.lists(TEXT, max_size=2).map(tuple),
)


@given(st.builds(StackDump, reason=TEXT, threads=st.lists(THREADS, max_size=3).map(tuple), left_out=COUNT))
def test_stacks_are_unchanged_after_a_json_round_trip(dump):
    assert dump == StackDump.of(json.loads(dump.to_json()))


@given(st.builds(FlightRecord, reason=TEXT, collectives=st.lists(COLLECTIVES, max_size=3).map(tuple), recorded=COUNT))
def test_flight_records_are_unchanged_after_a_json_round_trip(record):
    assert record == FlightRecord.of(json.loads(record.to_json()))


@pytest.mark.parametrize("document", [{}, {"threads": 1}, {"threads": [{}], "reason": "x"}, {"threads": ["a"]}, [], 3])
@pytest.mark.parametrize("kind", [StackDump, FlightRecord])
def test_any_other_document_raises_value_error(kind, document):
    with pytest.raises(ValueError, match="not "):
        kind.of(document)


def test_text_marks_training_threads_and_threads_of_rankscope():
    training = ThreadStack(ident=1, name="MainThread", is_training=True, frames=(Frame("/a/train.py", 7, "main"),))
    ours = ThreadStack(ident=2, name="rankscope-http", is_ours=True, frames=())
    dump = StackDump(reason="call", threads=(training, ours, ThreadStack(ident=255, frames=())))

    assert (
        'Thread MainThread (training):\n  File "/a/train.py", line 7, in main\n\n'
        "Thread rankscope-http (Rankscope):\n  no Python code\n\nThread 0xff:\n  no Python code"
    ) == stacks_text(dump)


REDUCE = Frame("/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3245, "all_reduce")
STEP = Frame("/job/train.py", 88, "step")
NEXT = Frame("/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 701, "__next__")
LOOP = Frame("/job/train.py", 40, "main")


def collective(seq: int, *, is_pending: bool = True, op: str = "all_reduce") -> Collective:
    return Collective(
        op=op, backend="gloo", group="default_pg", seq=seq, is_pending=is_pending, age_seconds=9.0,
        sizes=((4, 5),), dtypes=("Float",),
    )  # fmt: skip


def waiting(rank: int, seq: int = 41) -> Standing:
    return Standing(rank=rank, frames=(REDUCE, STEP, LOOP), pending=collective(seq), latest=collective(seq))


def loading(rank: int) -> Standing:
    return Standing(rank=rank, frames=(NEXT, LOOP), latest=collective(40, is_pending=False))


def test_rank_that_the_others_wait_for_comes_first():
    groups = grouped([waiting(0), loading(1), waiting(2), waiting(3)])

    assert [
        "rank 1 in __next__ (dataloader.py:701), called at train.py:40 in main; its last collective was all_reduce 40",
        "ranks 0, 2-3 in all_reduce seq 41 (gloo, default_pg, Float 4x5), called at train.py:88 in step",
    ] == [str(group) for group in groups]


def test_groups_are_ordered_by_collective_number_and_then_by_size():
    behind, others = waiting(5, seq=40), [waiting(rank) for rank in range(5)]

    assert [(5,), (0, 1, 2, 3, 4)] == [group.ranks for group in grouped([*others, behind])]

    elsewhere = Standing(rank=7, frames=(LOOP,), pending=collective(41))

    assert [(7,), (0, 1, 2, 3, 4)] == [group.ranks for group in grouped([*others, elsewhere])]


def test_ranks_with_different_installation_folders_are_at_one_place():
    frames = tuple(replace(frame, file="/other" + frame.file) for frame in waiting(1).frames)
    moved = Standing(rank=1, frames=frames, pending=collective(41))

    assert [(0, 1)] == [group.ranks for group in grouped([waiting(0), moved])]


@pytest.mark.parametrize(
    ("frames", "own"),
    [
        ((REDUCE, STEP), STEP),
        ((Frame("/root/lib/python3.11/threading.py", 331, "wait"), LOOP), LOOP),
        ((Frame("<frozen importlib._bootstrap>", 1, "load"), LOOP), LOOP),
        ((REDUCE,), REDUCE),
        ((), None),
    ],
)
def test_own_frame_is_the_innermost_frame_outside_of_libraries(frames, own):
    assert own is own_frame(frames)


@pytest.mark.parametrize(
    ("frames", "calls", "text"),
    [
        ((LOOP,), "time.sleep", "in time.sleep, called at train.py:40 in main"),
        ((LOOP,), ".item", "in item, called at train.py:40 in main"),
        ((LOOP,), "", "at train.py:40 in main"),
        ((NEXT, LOOP), ".get", "in __next__ (dataloader.py:701), called at train.py:40 in main"),
    ],
)
def test_text_contains_the_call_and_its_line_in_own_code(frames, calls, text):
    assert text == str(Standing(rank=0, frames=frames, calls=calls))


def test_rank_without_data_is_in_no_python_code():
    assert "rank 3 in no Python code" == f"{grouped([Standing.of(3, None, None)])[0]}"


def test_place_has_training_thread_and_oldest_pending_collective():
    threads = (ThreadStack(ident=1, frames=(NEXT,)), ThreadStack(ident=2, frames=(STEP,), is_training=True))
    dump = StackDump(reason="hang", threads=threads)
    done, first, second = collective(3, is_pending=False), collective(4), collective(5)
    flight = FlightRecord(reason="hang", collectives=(done, first, second), recorded=3)

    assert Standing(rank=0, frames=(STEP,), pending=first, latest=second) == Standing.of(0, dump, flight)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "rank 3"),
        ((5, 0, 2, 1), "ranks 0-2, 5"),
        (range(0, 1000, 2), f"ranks {', '.join(map(str, range(0, 32, 2)))} and 484 more"),
    ],
)
def test_ranks_are_written_as_spans(ranks, text):
    assert text == ranks_text(ranks)
