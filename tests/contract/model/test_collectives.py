"""Message sizes of collectives, and stacks and flight records as JSON and text."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.model.flights import entry, record

from rankscope_contract.model.collective_format import MOST_RANKS, message_bytes, ranks_in, spans
from rankscope_contract.model.stacks import (
    Collective,
    FlightRecord,
    Frame,
    StackDump,
    Standing,
    ThreadStack,
    own_frame,
    stacks_text,
)
from rankscope_exporter.adapters import placement
from rankscope_ingest.detect.divergence import parse_ranks
from rankscope_ingest.runs.collective_calls import grouped, ranks_text

F, L = ["Float"], ["Long"]


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "count"),
    [
        # Two ranks with three floats each, as gloo records them on rank 0.
        ("all_reduce", ([[3]], F), ([[3]], F), 12),
        ("broadcast", ([[3]], F), ([[3]], F), 12),
        ("reduce", ([[3]], F), ([[3]], F), 12),
        ("all_gather", ([[3]], F), ([[2, 3]], F), 24),  # the gathered tensor
        ("reduce_scatter", ([[2, 3]], F), ([[3]], F), 24),  # the tensor before scattering
        ("gather", ([[3]], F), ([[2, 3]], F), 24),  # at the destination; 12 on other ranks
        ("gather", ([[3]], F), ([], []), 12),
        ("scatter", ([[2, 3]], F), ([[3]], F), 24),  # at the source; 12 on other ranks
        ("all_to_all", ([[2], [1]], ["Float", "Float"]), ([[2], [2]], ["Float", "Float"]), 16),
        ("send", ([[3]], F), ([[3]], F), 12),
        ("all_reduce of several", ([[4], [6]], ["BFloat16", "Long"]), ([[4], [6]], ["BFloat16", "Long"]), 56),
        *(("all_reduce of a scalar", ([[]], L), ([[]], L), 8), ("all_reduce of nothing", ([[0]], F), ([[0]], F), 0)),
        *(("barrier", ([], []), ([], []), None), ("an unknown dtype", ([[3]], ["Float3"]), ([[3]], F), None)),
    ],
)
def test_message_bytes_is_the_larger_of_input_and_output(op, inputs, outputs, count):
    assert count == message_bytes(*inputs, *outputs), op


@given(st.sets(st.integers(0, 60)))
def test_ranks_in_is_the_inverse_of_spans(ranks):
    assert tuple(sorted(ranks)) == ranks_in(spans(ranks))
    assert "0-2,5" == spans([5, 0, 2, 1, 1])


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", f"0-{MOST_RANKS}"])
def test_ranks_in_rejects_other_text(text):
    with pytest.raises(ValueError):
        ranks_in(text)


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=12))
def test_parse_ranks_is_the_inverse_of_the_ranks_in_a_placement(ranks):
    assert tuple(sorted(ranks)) == parse_ranks(placement.ranks_text(sorted(ranks)))


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", (3,)), ("0,1", (0, 1)), ("0-3", (0, 1, 2, 3)), ("1-9:4", (1, 5, 9)), ("5,1", (1, 5))]
)
def test_parse_ranks_accepts_a_list_a_range_and_a_step(text, ranks):
    assert ranks == parse_ranks(text)


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-4:0", "1,", "0-999999999", "-1", "0-3,5"])
def test_parse_ranks_rejects_other_text(text):
    with pytest.raises(ValueError, match="no group of ranks"):
        parse_ranks(text)


def test_stacks_and_flight_records_are_unchanged_after_a_json_round_trip():
    frames = (Frame("/job/übung.py", 1 << 40, "step"), Frame("", 0, "<module>"))
    training = ThreadStack(ident=1 << 40, frames=frames, name="Main", is_training=True, calls="time.sleep")
    stacks = StackDump(reason="hang", threads=(training, ThreadStack(ident=2, frames=(), is_ours=True)), left_out=3)
    sent = entry(5, pending=True, op="send 0->1", is_p2p=True, sizes=((), (2, 3)), dtypes=("Float", "Long"))
    flight = record(entry(41), sent, entry(7, bytes=None, group_id=None), ranks="0-3", dp=41, tp=7)

    assert stacks == StackDump.of(json.loads(stacks.to_json()))
    assert flight == FlightRecord.of(json.loads(flight.to_json()))


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
        *(((REDUCE, STEP), STEP), ((Frame("/root/lib/python3.11/threading.py", 331, "wait"), LOOP), LOOP)),
        *(((Frame("<frozen importlib._bootstrap>", 1, "load"), LOOP), LOOP), ((REDUCE,), REDUCE), ((), None)),
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


def test_long_list_of_ranks_is_cut_off():
    assert ranks_text(range(0, 1000, 2)).endswith(" 26, 28, 30 and 484 more")
