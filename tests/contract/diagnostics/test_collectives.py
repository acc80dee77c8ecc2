"""Message sizes and calls of collectives, and stacks and flight records as JSON and text."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.diagnostics.collective_calls import Call, calls_of_note, sentences
from rankscope_contract.diagnostics.collective_format import (
    MOST_RANKS,
    CallState,
    message_bytes,
    parse_ranks,
    ranks_in,
    spans,
)
from rankscope_contract.diagnostics.rank_groups import Standing, grouped, own_frame, ranks_text
from rankscope_contract.diagnostics.stacks import (
    Collective,
    FlightRecord,
    Frame,
    GroupProgress,
    StackDump,
    ThreadStack,
    stacks_text,
)
from rankscope_exporter.adapters import placement

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
        ("all_reduce of a scalar", ([[]], L), ([[]], L), 8),
        ("all_reduce of nothing", ([[0]], F), ([[0]], F), 0),
        ("barrier", ([], []), ([], []), None),
        ("an unknown dtype", ([[3]], ["Float3"]), ([[3]], F), None),
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


MIB = 1 << 20


def entry(seq: int, *, pending: bool = False, op: str = "all_reduce", group: str = "dp", **more: object) -> Collective:
    given: dict[str, object] = {
        "sizes": ((MIB,),), "dtypes": ("Float",), "bytes": 4 * MIB, "group_id": f"id of {group}",
        "age_seconds": 62.0 if pending else 90.0, "backend": "gloo", **more,
    }  # fmt: skip
    return Collective(op=op, group=group, seq=seq, is_pending=pending, **given)  # type: ignore[arg-type]


def record(*entries: Collective, ranks: str = "0-3", **latest: int) -> FlightRecord:
    """Return a flight record of the group `dp`, or of the groups in `latest`, which has the latest call of each."""
    newest = latest or {"dp": max((one.seq for one in entries), default=-1)}
    groups = tuple(
        GroupProgress(id=f"id of {name}", ranks=ranks, latest_seq=seq) for name, seq in newest.items() if seq >= 0
    )
    return FlightRecord(reason="x", collectives=entries, recorded=len(entries), groups=groups)


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


def test_long_list_of_ranks_is_cut_off():
    assert ranks_text(range(0, 1000, 2)).endswith(" 26, 28, 30 and 484 more")
