"""Streamed XOR chunks: byte-identical to those of Prometheus, in frames that its client can read."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.remote_read.streams import MESSAGES, decoded, frames_of
from tests.properties import examples

from rankscope_ingest.remote_read import handler
from rankscope_ingest.remote_read.handler import read_response
from rankscope_storage.prometheus.series import Series

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


RECORDED = (
    (
        "001e8e91fea9b368bff0572bde70572080f104c1dffee2b95ef382b9d0218c5f7fa8000000000003e000000000011da5387f"
        "80275df800000003fffffffffffee65af7fbf2efc0000000050761af5623fdd67e00057ffd00109c99eee6642eddff7c00e0"
        "02f001fcd8ee98cc32236340010004000000000000e6ef391fddc00000000000f3827047f77000000000003d1f641202c48e"
        "c50000000e910ccffeba3b140000001b4ad0400018000000000008000100000000000384e1fe0061c00000000000eec7818f"
        "f3000000000000716a627e8b17c0b72f6563bffe66ef4c7d062f816e5ecac5ddc431000aca1a3000000061000cff4e2868c0"
        "0000008feea0000000000068001bbfff1fe3000000000000a3fce0000000000000"
    ),
    "0004f6c7ee99c0680000000000000000e807c3efe37e43c8800759d01c7e43c8800759db3480000000000010",
    (
        "0028d29ab8c9b3683fd002d0600000009875c5cfd479e31cc90206ffdb003dc573c007f45e6e443240810f80000000000493"
        "e03fffffffffffdb610240280f3a7b9260d447fa01e74f724c1ab8751af000000000008ed339ffc0000000000003ffffffff"
        "fffdb61024037e1bd20000000c3a9761000c807fc37a40000003bbfff0004000000000000ef0004001000000000000387fff"
        "3f2c3ae82bf1129fee000a95a63e5075d057e2253ef0000000000083d5f9ffc0000000000003fffffffffffdf74e68000000"
        "000000000f00000000000822c7affe00000000000073a985a2b3f1fd4a00000000000ffffffffffffbee9c50000000000000"
        "00188003400000000000000078000000000046694400fa800000000001fffffffffffede5af3fe4fbfaa00000004000c7c8e"
        "d52550dae4afe000000000010458f3f294eb3f436b92bffffffffffffbfe9c400100000000000026f000280005000bc00000"
        "00000208b1ec004d5c350f3c6a8ffffffffffff7dd39a000000000000000310001bbfff20066ae1a879e354d000a8002403c"
        "e0fc6000000000"
    ),
)


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
