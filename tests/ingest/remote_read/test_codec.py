"""Messages of remote read, compared with google.protobuf classes for the full definitions of Prometheus."""

import contextlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.remote_read.streams import MESSAGES
from tests.properties import examples

from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import packed, unpacked
from rankscope_ingest.remote_read.handler import MAX_REQUEST_BYTES, read_request, read_response
from rankscope_storage.base.errors import QueryError
from rankscope_storage.prometheus.query import Matcher, MatchType, SeriesQuery
from rankscope_storage.prometheus.series import Series

HINTED = st.sampled_from(["", "rate", "series"])
TIMES = st.one_of(st.integers(-(1 << 62), 1 << 62), st.integers(1_500_000_000_000, 1_900_000_000_000))


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES, HINTED, st.lists(st.tuples(st.integers(0, 3), st.text(), st.just("a|b"))))))
def test_request_is_decoded_like_the_reference_messages(queries):
    request, expected = MESSAGES["ReadRequest"](accepted_response_types=[1, 0]), []
    for start, end, function, matchers in queries:
        query = request.queries.add(start_timestamp_ms=start, end_timestamp_ms=end)
        query.hints.step_ms, query.hints.func = 15_000, function
        for kind, name, value in matchers:
            query.matchers.add(type=kind, name=name, value=value)
        known = tuple(Matcher(MatchType(kind), name, value) for kind, name, value in matchers)
        expected.append(SeriesQuery(known, start, end, function == "series"))
    found = read_request(unpacked(packed(request.SerializeToString()), MAX_REQUEST_BYTES))

    assert ((1, 0), expected) == (found.accepted, list(found.questions))


SERIES = st.tuples(st.dictionaries(st.text(), st.text()), st.lists(st.tuples(TIMES, st.floats(allow_nan=False))))


def series_of(labels, samples):
    times, values = ([sample[place] for sample in samples] for place in (0, 1))
    return Series(tuple(labels.items()), np.array(times, np.int64), np.array(values, np.float64))


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.lists(SERIES, max_size=3), max_size=3))
def test_response_is_decoded_by_the_reference_messages(answers):
    response = MESSAGES["ReadResponse"].FromString(
        read_response([[series_of(*one) for one in all_] for all_ in answers])
    )

    assert [[(list(labels.items()), samples) for labels, samples in series] for series in answers] == [
        [
            ([(label.name, label.value) for label in one.labels], [(s.timestamp, s.value) for s in one.samples])
            for one in result.timeseries
        ]
        for result in response.results
    ]


HALF = {"start_ms": 1_500_000, "end_ms": 1_800_000}


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({}, (1_000_000, 2_000_000, False)),
        (HALF, (1_500_000, 1_800_000, True)),
        (HALF | {"start_ms": 1_500_001, "func": "sum"}, (1_500_001, 1_800_000, True)),
        ({"start_ms": 1_900_000, "end_ms": 2_200_000}, (1_900_000, 2_000_000, True)),
        (HALF | {"func": "timestamp"}, (1_500_000, 1_800_000, False)),
        (HALF | {"step_ms": 1000}, (1_500_000, 1_800_000, False)),
        (HALF | {"range_ms": 300_000}, (1_500_000, 1_800_000, False)),
        (HALF | {"start_ms": 1_200_001}, (1_200_001, 1_800_000, False)),
    ],
)
def test_hints_restrict_a_query_only_where_results_are_equal(hints, expected):
    """The last sample alone is enough without a step and a range, within the default lookback period."""
    request = MESSAGES["ReadRequest"]()
    query = request.queries.add(start_timestamp_ms=1_000_000, end_timestamp_ms=2_000_000)
    query.hints.CopyFrom(MESSAGES["ReadHints"](**hints))
    (question,) = read_request(request.SerializeToString()).questions

    assert expected == (question.start_ms, question.end_ms, question.last_alone)


@given(st.binary(max_size=40))
def test_random_bytes_are_decoded_or_rejected(body):
    """Only DecodeError and QueryError are raised."""
    for read in (read_request, lambda data: unpacked(data, MAX_REQUEST_BYTES)):
        with contextlib.suppress(DecodeError, QueryError):
            read(body)


def test_block_follows_the_snappy_format():
    """A block is the length as a varint, then literals and copies; here it has one literal of 4 bytes."""
    assert b"abcd" == unpacked(b"\x04\x0cabcd", 4)
    assert b"abcd" == pa.Codec("snappy").decompress(packed(b"abcd"), decompressed_size=4, asbytes=True)
