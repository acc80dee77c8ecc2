"""Decoding of remote write requests, compared with the official protobuf messages; malformed requests are rejected."""

from __future__ import annotations

import contextlib
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.remote_write.messages import CLASSES, write_request
from tests.properties import examples

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import packed, unpacked
from rankscope_ingest.remote_write.decoder import WriteReader
from rankscope_ingest.remote_write.handler import samples_table

NOW = 1_770_000_000_000
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0002))[0]
UP = {"__name__": "up", "instance": "a:9100", "job": "node"}


def bits(value):
    return None if value is None else struct.pack("<d", value)


def rows(*requests):
    """Return (target, metric, labels, ms, bits of the value) of each row, sorted; the bits of a null are None."""
    found = samples_table(requests).to_pylist()
    return sorted(
        (row["target"], row["metric"], row["labels"] or "", round(row["ts"].timestamp() * 1000), bits(row["value"]))
        for row in found
    )


def expected_rows(data):
    """Return the same rows according to the reference messages."""
    found = []
    for series in CLASSES["WriteRequest"].FromString(data).timeseries:
        labels = {label.name: label.value for label in series.labels if label.value}
        key = (labels.pop("instance", ""), labels.pop("__name__"), canonical_labels(labels) or "")
        found += [
            (*key, one.timestamp, None if bits(one.value) == bits(STALE) else bits(one.value)) for one in series.samples
        ]
    return sorted(found)


NAMES = st.sampled_from(["__name__", "instance", "job", "mode", "ä", "a\x12\x10\t"])
TEXTS = st.one_of(st.sampled_from(["", "x", "\x12\x07\x10", "\x12\x10\t12345678\x10123456\n"]), st.text(max_size=8))
VALUES = st.one_of(st.sampled_from([0.0, -0.0, math.nan, math.inf, STALE]), st.floats())
TIMES = st.one_of(st.integers(0, 1 << 32), st.integers(0, 100_000))
LABELS = st.dictionaries(NAMES, TEXTS, max_size=5).map(
    lambda labels: {**labels, "__name__": "m" + labels.get("job", "")}
)
STARTS = st.sampled_from([0, 1 << 35, NOW, 1 << 42, 1 << 47])
SERIES = st.tuples(
    LABELS,
    st.lists(st.tuples(TIMES, VALUES), max_size=3, unique_by=lambda sample: sample[0]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([0, 0, 0, 1]),
)
REQUESTS = st.lists(SERIES, max_size=6, unique_by=lambda one: canonical_labels({k: v for k, v in one[0].items() if v}))


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.tuples(REQUESTS, st.sampled_from([(), ("up",)]), STARTS), min_size=1, max_size=3))
def test_decoded_samples_equal_those_of_the_reference_messages(requests):
    """Includes known and new labels, empty label values, exemplars, histograms, metadata and staleness markers."""
    for offsets, metadata, begin in requests:
        series = [(labels, [(begin + ms, value) for ms, value in some], *more) for labels, some, *more in offsets]
        data = write_request(*series, metadata=metadata)
        reader = WriteReader()
        first, second = reader.read(data), reader.read(data)

        assert expected_rows(data) == rows(first)
        assert second.rows + second.repeated == first.rows
        assert (sum(one[2] for one in series), sum(one[3] for one in series)) == (first.exemplars, first.histograms)
        assert len(metadata) == first.metadata


def test_fields_of_a_sample_may_have_any_order():
    data = write_request((UP, [(NOW, 1.0)]), ({**UP, "cpu": "1"}, [(NOW, 2.5)]))
    value, time = data[-16:-7], data[-7:]

    assert expected_rows(data) == rows(WriteReader().read(data[:-16] + time + value))


def test_known_series_are_decoded_with_any_values_and_several_samples():
    reader = WriteReader()
    series = [{**UP, "cpu": str(number), "mode": "x" * number} for number in range(300)]
    reader.read(write_request(*((labels, [(NOW, 1.0)]) for labels in series)))
    data = write_request(*((labels, [(NOW + 15_000 * n, n % 3)]) for n, labels in enumerate(series, 1)))
    several = write_request(*((labels, [(NOW + 1000 * n, n % 2) for n in range(9)]) for labels in series))

    assert [expected_rows(data), expected_rows(several)] == [rows(reader.read(one)) for one in (data, several)]


def test_repeated_sample_is_dropped_also_with_another_order_of_labels():
    """A sender may repeat samples in requests that are divided differently."""
    reader = WriteReader()
    reader.read(write_request((UP, [(NOW, 1.0)])))
    backwards = dict(reversed(UP.items()))
    several = [(NOW + 100, 1.0), (NOW + 200, 2.0)]
    again = reader.read(write_request((backwards, [(NOW, 1.0)]), (UP, [(NOW + 1, 1.0)])))
    other = reader.read(write_request((UP, [(NOW + 1, 2.0)]), (UP, [(NOW - 5, 1.0)])))
    reader.read(write_request((UP, several)))
    last = reader.read(write_request((UP, several[1:])))

    assert (1, 0, 1) == (again.repeated, other.repeated, last.repeated)
    assert [("a:9100", "up", '{"job":"node"}', NOW + 1, bits(1.0))] == rows(again)
    assert [NOW + 1, NOW - 5] == other.times_ms.tolist()


def one_round(at, active, *, series_per_request=10, **more):
    """Return requests with one sample at `at`, in seconds, of each of the series `active`."""
    series = [({**UP, "cpu": str(number), **more}, [(NOW + 1000 * at, 1.0 + number)]) for number in active]
    return [
        write_request(*series[first : first + series_per_request])
        for first in range(0, len(series), series_per_request)
    ]


def test_samples_are_right_while_the_cache_is_full_and_swept():
    reader = WriteReader(max_known_series=20)
    requests = [
        one
        for at in range(60)
        for one in one_round(at, range(at // 2, at // 2 + 30), series_per_request=7 + at % 5, mode="é")
    ]
    decoded = [reader.read(one) for one in requests]

    assert [expected_rows(one) for one in requests] == [rows(one) for one in decoded]
    assert sorted(row for one in requests for row in expected_rows(one)) == rows(*decoded)


def read_rounds(reader, *rounds):
    """Read one request after the other; return the numbers of new and repeated samples of the last round."""
    for at, active in rounds:
        decoded = [reader.read(request) for request in one_round(at, active, series_per_request=10 - (at % 2) * 2)]
    return sum(one.rows for one in decoded), sum(one.repeated for one in decoded)


def test_inactive_series_are_swept_from_a_full_cache():
    """After two generations without the old series, repeated samples of the new ones are detected."""
    reader = WriteReader(max_known_series=100)
    read_rounds(reader, *((at, range(50, 150) if at else range(100)) for at in range(20)))
    read_rounds(reader, *((at, range(300, 390)) for at in range(20, 40)))

    assert (0, 90) == read_rounds(reader, (39, range(300, 390)))


def test_repeated_samples_of_cached_series_are_detected_in_a_full_cache():
    reader = WriteReader(max_known_series=100)
    read_rounds(reader, *((at, range(at, at + 80)) for at in range(9)), (0, range(1000, 1040)))

    assert (0, 80) == read_rounds(reader, (8, range(8, 88)))


def test_series_with_long_labels_use_the_capacity_of_several():
    """The cache is bounded in bytes: of 20 series with 10,000 bytes of labels, only 3 fit into the capacity of 100."""
    reader = WriteReader(max_known_series=100)
    for _ in range(2):
        decoded = [reader.read(one) for one in one_round(0, range(20), series_per_request=1, text="x" * 10_000)]

    assert 3 == sum(one.repeated for one in decoded)


def test_series_with_too_many_or_too_long_labels_is_dropped_and_counted():
    reader = WriteReader()
    many = {**UP, **{f"l{number}": "x" for number in range(200)}}
    long = {**UP, "x": "y" * 70_000}
    data = write_request((many, [(NOW, 1.0)]), (UP, [(NOW, 1.0)]), (long, [(NOW, 1.0)]))
    first, second = reader.read(data), WriteReader().read(data)

    assert (2, 2) == (first.oversized, second.oversized)
    assert 3 == reader.read(write_request((many, [(NOW, 1.0)]), (long, [(NOW, 1.0), (NOW + 1, 2.0)]))).oversized
    assert expected_rows(write_request((UP, [(NOW, 1.0)]))) == rows(first)


def twice():
    """Return a request whose only series has a label twice."""
    request = CLASSES["WriteRequest"].FromString(write_request((UP, [(NOW, 1.0)])))
    request.timeseries[0].labels.add(name="job", value="again")
    return request.SerializeToString()


GOOD = write_request((UP, [(NOW, 1.0)]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (write_request(({"instance": "a"}, [(NOW, 1.0)])), "has no label __name__"),
        (write_request(({**UP, "": "x"}, [(NOW, 1.0)])), "no name"),
        (write_request((UP, [(-1, 1.0)])), "before 1970"),
        (write_request((UP, [(1 << 50, 1.0)])), "after 9999"),
        (write_request((UP, [(NOW - 86_400_000 * 70, 1.0)])), "more than 62 days"),
        (GOOD + b"\x0a\x7f", "not a valid prometheus.WriteRequest"),
        (GOOD + b"\x22\x01x", "field 4 does not exist in remote write 1.0"),
        (GOOD.replace(b"node", b"\xff\xfe\xfd\xfc"), "not a valid prometheus.Label"),
        (b"\x0a\x06" + b"\x0a\x04\x0a\x02up"[:6], "has no label __name__"),
        (b"\x0a\x02\x10\x01", "field 2 of a TimeSeries has the unexpected wire type 0"),
        (b"\x0b", "not a valid prometheus.WriteRequest"),
        (GOOD[:-1], "not a valid prometheus.WriteRequest"),
        (twice(), "twice"),
    ],
)
def test_malformed_request_is_rejected_as_a_whole_with_the_reason(data, why):
    with pytest.raises(DecodeError, match=why):
        WriteReader().read(write_request((UP, [(NOW, 2.0)])) + data)


@settings(max_examples=examples(60), deadline=None)
@given(st.one_of(st.binary(max_size=60), st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=3))))
def test_random_bytes_are_decoded_or_raise_decode_error(change):
    """Random bytes, and a valid request in which up to three bytes are changed."""
    data = write_request((UP, [(NOW, 1.0)]), ({**UP, "cpu": "1"}, [(NOW, 0.0)]), ({**UP, "cpu": "2"}, [(NOW, 2.5)]))
    if isinstance(change, tuple):
        place = change[0] % len(data)
        data = data[:place] + change[1] + data[place + len(change[1]) :]
    else:
        data = change
    reader = WriteReader()
    reader.read(write_request((UP, [(NOW - 1, 1.0)])))
    with contextlib.suppress(DecodeError):
        decoded = reader.read(data)
        with contextlib.suppress(Exception):
            expected = expected_rows(data)
            assert expected == rows(decoded)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", packed(b"x" * 10)[:-2], packed(b"x" * 2_000), b"\xff\xff\xff\xff\x7f", b"\xe8\x07\x00x"]
)
def test_invalid_or_too_large_snappy_block_raises_decode_error(body):
    with pytest.raises(DecodeError):
        unpacked(body, 1_000)
