"""Messages and streamed XOR chunks of remote read, compared with the definitions and bytes of Prometheus."""

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.remote_read.streams import MESSAGES, decoded, frames_of
from tests.properties import examples

from rankscope_ingest.base.protobuf import packed, unpacked
from rankscope_ingest.remote_read import handler
from rankscope_ingest.remote_read.handler import MAX_REQUEST_BYTES, read_request, read_response
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
    questions, accepted = read_request(unpacked(packed(request.SerializeToString()), MAX_REQUEST_BYTES))

    assert ((1, 0), expected) == (accepted, list(questions))


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
    (question,), _ = read_request(request.SerializeToString())

    assert expected == (question.start_ms, question.end_ms, question.last_alone)


def test_block_follows_the_snappy_format():
    """A block is the length as a varint, then literals and copies; here it has one literal of 4 bytes."""
    assert b"abcd" == unpacked(b"\x04\x0cabcd", 4)
    assert b"abcd" == pa.Codec("snappy").decompress(packed(b"abcd"), decompressed_size=4, asbytes=True)


# Streamed XOR chunks: byte-identical to those of Prometheus, in frames that its client can read.

DISTANCES = st.one_of(
    st.just(15_000),
    st.integers(1, 40_000),
    st.sampled_from([15_000 + around + by for around in (8192, -8191, 65_536, 524_288) for by in (-1, 0, 1)]),
    st.integers(1, 1 << 50),
)
BITS = st.one_of(
    st.sampled_from([0, 1 << 63, 0x7FF0_0000_0000_0002, 0x7FF8_0000_0000_0001, 0xFFF8_0000_0000_1234]),
    st.floats().map(lambda value: struct.unpack("<Q", struct.pack("<d", value))[0]),
    st.integers(0, 100).map(lambda value: struct.unpack("<Q", struct.pack("<d", value))[0]),
    st.integers(0, (1 << 64) - 1),
)
SAMPLES = st.tuples(st.integers(-(1 << 60), 1 << 60), st.lists(st.tuples(DISTANCES, BITS), min_size=1, max_size=130))


RECORDED = (Path(__file__).parents[2] / "data" / "remote_read" / "prometheus_2.42_chunks.txt").read_text().split()


def arrays(start, samples):
    times = start + np.cumsum([distance for distance, _ in samples])
    return times, np.array([bits for _, bits in samples], np.uint64).view(np.float64)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_decoded_chunks_are_bit_identical_to_the_encoded_samples(series):
    """Includes irregular times, all kinds of NaN, and chunks of different lengths encoded together."""
    made = [arrays(*one) for one in series]
    times, values = (np.concatenate(columns) for columns in zip(*made, strict=True))
    starts = np.cumsum([0, *(len(one) for one, _ in made[:-1])])
    chunks = handler.chunks(times, values, starts)

    assert [list(zip(ts.tolist(), v.view(np.uint64).tolist(), strict=True)) for ts, v in made] == [
        *map(decoded, chunks)
    ]


@pytest.mark.parametrize("recorded", RECORDED, ids=["irregular", "regular", "open"])
def test_chunk_is_byte_identical_to_that_of_prometheus(recorded):
    """The chunks were recorded from the response of Prometheus 2.42 to a streamed remote read."""
    data = bytes.fromhex(recorded)
    times, bits = zip(*decoded(data), strict=True)

    assert [data] == handler.chunks(np.array(times), np.array(bits, np.uint64).view(np.float64), np.array([0]))


def labelled(number, samples):
    times = 1_770_000_000_000 + 15_000 * np.arange(samples)
    return Series((("__name__", "m"), ("n", str(number))), times, np.random.default_rng(number).normal(size=samples))


def test_frame_has_a_checksum_and_one_series_which_may_span_frames():
    """A client reads only the first series of a frame."""
    answers = [[labelled(0, 500), labelled(1, 1)], [], [labelled(2, 120), labelled(3, 121)]]
    messages = [
        MESSAGES["ChunkedReadResponse"].FromString(frame)
        for frame in frames_of(b"".join(handler.frames(answers, frame_bytes=2_000)))
    ]

    assert [(0, "0"), (0, "0"), (0, "0"), (0, "1"), (2, "2"), (2, "3")] == [
        (message.query_index, one.labels[1].value) for message in messages for one in message.chunked_series
    ]
    chunks = [chunk for message in messages for one in message.chunked_series for chunk in one.chunks]
    assert [120, 120, 120, 120, 20, 1, 120, 120, 1] == [len(decoded(chunk.data)) for chunk in chunks]
    assert {1} == {chunk.type for chunk in chunks}
    ends = [(decoded(chunk.data)[0][0], decoded(chunk.data)[-1][0]) for chunk in chunks]
    assert ends == [(chunk.min_time_ms, chunk.max_time_ms) for chunk in chunks]


@pytest.mark.parametrize("group", [1, 300, 1 << 17])
def test_streamed_and_plain_responses_have_the_same_samples(group):
    """An empty result is an empty stream."""
    answers = [[labelled(number, 1 + 37 * number) for number in range(8)]]
    plain = MESSAGES["ReadResponse"].FromString(read_response(answers)).results[0].timeseries
    found = {}
    for frame in frames_of(b"".join(handler.frames(answers, group_samples=group))):
        for one in MESSAGES["ChunkedReadResponse"].FromString(frame).chunked_series:
            samples = [sample for chunk in one.chunks for sample in decoded(chunk.data)]
            found[one.labels[1].value] = [(ts, struct.unpack(">d", struct.pack(">Q", bits))[0]) for ts, bits in samples]

    assert {one.labels[1].value: [(s.timestamp, s.value) for s in one.samples] for one in plain} == found
    assert b"" == b"".join(handler.frames([[], []], group_samples=group))
