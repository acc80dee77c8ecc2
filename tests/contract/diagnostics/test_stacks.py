"""Stacks and flight records survive a round trip through JSON. Any other input raises ValueError."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    dump = StackDump(
        reason="call",
        threads=(
            ThreadStack(ident=1, name="MainThread", is_training=True, frames=(Frame("/a/train.py", 7, "main"),)),
            ThreadStack(ident=2, name="rankscope-http", is_ours=True, frames=()),
            ThreadStack(ident=255, frames=()),
        ),
    )

    assert (
        'Thread MainThread (training):\n  File "/a/train.py", line 7, in main\n\n'
        "Thread rankscope-http (Rankscope):\n  no Python code\n\nThread 0xff:\n  no Python code"
    ) == stacks_text(dump)
