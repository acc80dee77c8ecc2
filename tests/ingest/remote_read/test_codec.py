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
    request = MESSAGES["ReadRequest"](accepted_response_types=[1, 0])
    for start, end, function, matchers in queries:
        query = request.queries.add(start_timestamp_ms=start, end_timestamp_ms=end)
        query.hints.step_ms, query.hints.func = 15_000, function
        for kind, name, value in matchers:
            query.matchers.add(type=kind, name=name, value=value)

    found = read_request(unpacked(packed(request.SerializeToString()), MAX_REQUEST_BYTES))

    assert (1, 0) == found.accepted
    assert [
        SeriesQuery(
            tuple(Matcher(MatchType(kind), name, value) for kind, name, value in matchers),
            start,
            end,
            function == "series",
        )
        for start, end, function, matchers in queries
    ] == list(found.questions)


SERIES = st.tuples(st.dictionaries(st.text(), st.text()), st.lists(st.tuples(TIMES, st.floats(allow_nan=False))))


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.lists(SERIES, max_size=3), max_size=3))
def test_response_is_decoded_by_the_reference_messages(answers):
    given_series = [
        [
            Series(
                tuple(labels.items()),
                np.array([ts for ts, _ in samples], np.int64),
                np.array([value for _, value in samples], np.float64),
            )
            for labels, samples in series
        ]
        for series in answers
    ]

    response = MESSAGES["ReadResponse"].FromString(read_response(given_series))

    assert [[(list(labels.items()), samples) for labels, samples in series] for series in answers] == [
        [
            ([(label.name, label.value) for label in one.labels], [(s.timestamp, s.value) for s in one.samples])
            for one in result.timeseries
        ]
        for result in response.results
    ]


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({}, (1_000_000, 2_000_000, False)),
        ({"start_ms": 1_500_000, "end_ms": 1_800_000}, (1_500_000, 1_800_000, True)),
        ({"start_ms": 1_500_001, "end_ms": 1_800_000, "func": "sum"}, (1_500_001, 1_800_000, True)),
        ({"start_ms": 1_900_000, "end_ms": 2_200_000}, (1_900_000, 2_000_000, True)),
        ({"start_ms": 1_500_000, "end_ms": 1_800_000, "func": "timestamp"}, (1_500_000, 1_800_000, False)),
        ({"start_ms": 1_500_000, "end_ms": 1_800_000, "step_ms": 1000}, (1_500_000, 1_800_000, False)),
        ({"start_ms": 1_500_000, "end_ms": 1_800_000, "range_ms": 300_000}, (1_500_000, 1_800_000, False)),
        ({"start_ms": 1_200_001, "end_ms": 1_800_000}, (1_200_001, 1_800_000, False)),
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


@pytest.mark.parametrize(
    "body", [b"", b"\xff", packed(b"x" * 10)[:-2], packed(b"x" * 2_000_000), b"\xff\xff\xff\xff\x7f"]
)
def test_invalid_or_too_large_snappy_block_is_rejected(body):
    with pytest.raises(DecodeError):
        unpacked(body, MAX_REQUEST_BYTES)


def test_block_follows_the_snappy_format():
    """A block is the length as a varint, then literals and copies; here it has one literal of 4 bytes."""
    assert b"abcd" == unpacked(b"\x04\x0cabcd", 4)
    assert b"abcd" == pa.Codec("snappy").decompress(packed(b"abcd"), decompressed_size=4, asbytes=True)
