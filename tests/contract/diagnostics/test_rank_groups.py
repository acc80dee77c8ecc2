"""Tests of groups of ranks at the same place. A group that other ranks wait for comes first."""

from __future__ import annotations

import pytest

from rankscope_contract.diagnostics.rank_groups import Standing, grouped, own_frame, ranks_text
from rankscope_contract.diagnostics.stacks import Collective, FlightRecord, Frame, StackDump, ThreadStack

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


def test_rank_outside_of_collectives_comes_before_a_rank_inside():
    assert [(1,), (0,)] == [group.ranks for group in grouped([waiting(0), loading(1)])]


def test_groups_are_ordered_by_collective_number_and_then_by_size():
    behind, others = waiting(5, seq=40), [waiting(rank) for rank in range(5)]

    assert [(5,), (0, 1, 2, 3, 4)] == [group.ranks for group in grouped([*others, behind])]

    elsewhere = Standing(rank=7, frames=(LOOP,), pending=collective(41))

    assert [(7,), (0, 1, 2, 3, 4)] == [group.ranks for group in grouped([*others, elsewhere])]


def test_ranks_with_different_installation_folders_are_at_one_place():
    moved = Standing(
        rank=1,
        frames=tuple(Frame("/other" + frame.file, frame.line, frame.function) for frame in waiting(1).frames),
        pending=collective(41),
    )

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
    dump = StackDump(
        reason="hang",
        threads=(
            ThreadStack(ident=1, frames=(NEXT,)),
            ThreadStack(ident=2, frames=(STEP,), is_training=True),
        ),
    )
    done, first, second = collective(3, is_pending=False), collective(4), collective(5)
    flight = FlightRecord(reason="hang", collectives=(done, first, second), recorded=3)

    assert Standing(rank=0, frames=(STEP,), pending=first, latest=second) == Standing.of(0, dump, flight)


def test_long_rank_list_shows_the_first_ranks_and_counts_the_others():
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 484 more" == ranks_text(
        range(0, 1000, 2)
    )


@pytest.mark.parametrize(
    ("ranks", "text"), [((3,), "rank 3"), ((5, 0, 2, 1), "ranks 0-2, 5"), ((0, 1), "ranks 0-1"), ((0, 2), "ranks 0, 2")]
)
def test_ranks_are_written_as_spans(ranks, text):
    assert text == ranks_text(ranks)
