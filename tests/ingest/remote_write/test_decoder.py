"""Decoding of remote write in both versions, compared with the official messages; malformed requests are rejected."""

import contextlib
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.remote_write.messages import CLASSES, CLASSES_2, write_request, write_request_2
from tests.properties import examples

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import packed, unpacked
from rankscope_ingest.remote_write.decoder import MAX_SYMBOLS, WriteReader
from rankscope_ingest.remote_write.handler import samples_table
from rankscope_ingest.remote_write.senders import MIXED_SECONDS, SHOWN_SECONDS, Senders

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
        assert second.written == first.rows
        assert (sum(one[2] for one in series), sum(one[3] for one in series)) == (
            first.dropped["exemplar"],
            first.dropped["histogram"],
        )
        assert len(metadata) == first.dropped["metadata"]


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

    assert (1, 0, 1) == (again.dropped["repeated"], other.dropped["repeated"], last.dropped["repeated"])
    assert [("a:9100", "up", '{"job":"node"}', NOW + 1, bits(1.0))] == rows(again)
    assert [NOW + 1, NOW - 5] == other.times_ms.tolist()


def one_round(at, active, *, series_per_request=10, write=write_request, **more):
    """Return requests with one sample at `at`, in seconds, of each of the series `active`."""
    series = [({**UP, "cpu": str(number), **more}, [(NOW + 1000 * at, 1.0 + number)]) for number in active]
    return [write(*series[first : first + series_per_request]) for first in range(0, len(series), series_per_request)]


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


@pytest.mark.parametrize("version", [1, 2])
def test_inactive_series_are_swept_from_a_full_cache(version):
    """After two generations without the old series, repeated samples of the new ones are detected, also by a sweep."""
    reader, write = WriteReader(max_known_series=100), (write_request, write_request_2)[version - 1]
    read = reader.read if version == 1 else lambda data: reader.read_2(data, LIMIT)
    repeated = []
    for at in range(40):
        active = range(300, 400) if at >= 20 else range(50, 150) if at else range(150)
        requests = one_round(at, active, series_per_request=10 - at % 2 * 2, write=write)
        _, again = ([read(request) for request in requests] for _ in range(2))
        repeated.append(sum(one.dropped["repeated"] for one in again))

    assert [100] * 10 == repeated[30:]


def test_series_with_long_labels_use_the_capacity_of_several():
    """The cache is bounded in bytes: of 20 series with 10,000 bytes of labels, only 3 fit into the capacity of 100."""
    reader = WriteReader(max_known_series=100)
    for _ in range(2):
        decoded = [reader.read(one) for one in one_round(0, range(20), series_per_request=1, text="x" * 10_000)]

    assert 3 == sum(one.dropped["repeated"] for one in decoded)


def test_series_with_too_many_or_too_long_labels_is_dropped_and_counted():
    reader = WriteReader()
    many = {**UP, **{f"l{number}": "x" for number in range(200)}}
    long = {**UP, "x": "y" * 70_000}
    data = write_request((many, [(NOW, 1.0)]), (UP, [(NOW, 1.0)]), (long, [(NOW, 1.0)]))
    first, second = reader.read(data), WriteReader().read(data)

    assert (2, 2) == (first.dropped["oversized"], second.dropped["oversized"])
    assert (
        3 == reader.read(write_request((many, [(NOW, 1.0)]), (long, [(NOW, 1.0), (NOW + 1, 2.0)]))).dropped["oversized"]
    )
    assert expected_rows(write_request((UP, [(NOW, 1.0)]))) == rows(first)


def twice():
    request = CLASSES["WriteRequest"].FromString(write_request((UP, [(NOW, 1.0)])))
    request.timeseries[0].labels.add(name="job", value="again")
    return request.SerializeToString()


GOOD = write_request((UP, [(NOW, 1.0)]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (write_request(({"instance": "a"}, [(NOW, 1.0)])), "has no label __name__"),
        (write_request(({**UP, "": "x"}, [(NOW, 1.0)])), "no name"),
        *((write_request((UP, [(-1, 1.0)])), "before 1970"), (write_request((UP, [(1 << 50, 1.0)])), "after 9999")),
        (write_request((UP, [(NOW - 86_400_000 * 70, 1.0)])), "more than 62 days"),
        (GOOD + b"\x0a\x7f", "not a valid prometheus.WriteRequest"),
        (GOOD + b"\x22\x01x", "field 4 does not exist in remote write 1.0"),
        (GOOD.replace(b"node", b"\xff\xfe\xfd\xfc"), "not a valid prometheus.Label"),
        (b"\x0a\x06" + b"\x0a\x04\x0a\x02up"[:6], "has no label __name__"),
        (b"\x0a\x02\x10\x01", "field 2 of a TimeSeries has the unexpected wire type 0"),
        *((b"\x0b", "not a valid prometheus.WriteRequest"), (GOOD[:-1], "not a valid prometheus.WriteRequest")),
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


# Version 2.0.

LIMIT = 1 << 20


def with_changes(unit_ref=0, **changes):
    """Return a request with one series; `changes` are fields of the series, and `symbols`."""
    request = CLASSES_2["Request"].FromString(write_request_2((UP, [(NOW, 2.0)])))
    request.symbols.extend(changes.pop("symbols", ()))
    request.timeseries[0].metadata.unit_ref = unit_ref
    for name, value in changes.items():
        del getattr(request.timeseries[0], name)[:]
        getattr(request.timeseries[0], name).extend(value)
    return request.SerializeToString()


def with_long_symbol():
    """Return a request of 60 kB, which has 50 MB of labels with inserted symbols."""
    request = CLASSES_2["Request"](symbols=["", "__name__", "m", "x", "y" * 50_000])
    for _ in range(1_000):
        request.timeseries.add(labels_refs=(1, 2, 3, 4))
    return request.SerializeToString()


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.tuples(REQUESTS, STARTS), min_size=1, max_size=3))
def test_same_samples_in_both_versions_give_equal_rows(requests):
    """Includes labels with empty values, exemplars, histograms and staleness markers; each request is sent twice."""
    first, second = WriteReader(), WriteReader()
    for offsets, begin in requests:
        series = [(labels, [(begin + ms, value) for ms, value in some], *more) for labels, some, *more in offsets]
        for _ in range(2):
            one, two = first.read(write_request(*series)), second.read_2(write_request_2(*series), LIMIT)

            assert rows(one) == rows(two)
            assert (one.written, one.dropped["repeated"], one.dropped["exemplar"], one.dropped["histogram"]) == (
                *(two.written, two.dropped["repeated"], two.dropped["exemplar"], two.dropped["histogram"]),
            )
            assert len(series) == two.dropped["metadata"]


def test_series_is_recognized_in_another_symbol_table_and_version():
    reader = WriteReader()
    reader.read(write_request((UP, [(NOW, 1.0)])))
    decoded = [
        reader.read_2(write_request_2((UP, [(NOW + at, STALE)]), symbols=("", *"abc"[:at])), LIMIT) for at in (0, 1, 3)
    ]

    assert ["a:9100"] * 3 == [one.series[0].target for one in decoded]
    assert 1 == len({one.series[0] for one in decoded})
    assert 1 == reader.read(write_request((UP, [(NOW + 3, STALE)]))).dropped["repeated"]


def test_symbols_that_are_joined_differently_are_different_series():
    reader = WriteReader()
    texts = [{"a": "1:b"}, {"a1": ":b"}, {"a": "1", "b": ""}, {"a": "b", "1:": "1:"}, {"a": "b1:1:"}]
    decoded = [reader.read_2(write_request_2(({"__name__": "m", **one}, [(NOW, 1.0)])), LIMIT) for one in texts]

    assert len(texts) == len({one.series[0].labels for one in decoded})


@pytest.mark.parametrize("length", [65_480, 65_490, 65_500, 65_510])
def test_limit_of_the_labels_is_that_of_version_1(length):
    series = ({**UP, "x": "é" * (length // 2)}, [(NOW, 1.0)])

    assert WriteReader().read(write_request(series)).rows == WriteReader().read_2(write_request_2(series), LIMIT).rows


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (with_changes(labels_refs=(1, 2, 3, 99)), "symbol 99 does not exist: the request has 8 symbols"),
        (with_changes(labels_refs=(1, 2, 3)), "a list of labels has 3 references; their number must be even"),
        (with_changes(labels_refs=(3, 4, 1, 2)), "labels that are not sorted: 'instance' comes before '__name__'"),
        (with_changes(labels_refs=(1, 2, 3, 4, 3, 4)), "the label 'instance' twice"),
        (with_changes(labels_refs=()), "has no label __name__"),
        (with_changes(labels_refs=(0, 2, 1, 2)), "has no name"),
        (with_changes(labels_refs=(1, 2) * 300 + (99, 1)), "symbol 99 does not exist"),
        (with_changes(exemplars=[CLASSES_2["Exemplar"](labels_refs=(1, 99))]), "symbol 99 does not exist"),
        (with_changes(exemplars=[CLASSES_2["Exemplar"](labels_refs=(1,))]), "must be even"),
        (write_request_2((UP, [(NOW, 1.0)]), symbols=("x", "")), "the first symbol of the request is not empty"),
        (with_changes(symbols=["x"] * MAX_SYMBOLS), "500008 symbols; the limit is 500000"),
        (write_request_2((UP, [(NOW, 1.0), (-1, 1.0)])), "before 1970"),
        (write_request((UP, [(NOW, 1.0)])), "field 1 with wire type 2 does not exist in remote write 2.0"),
        (with_changes(unit_ref=99), "symbol 99 does not exist"),
        (with_long_symbol(), "the labels of all series have more than 1048576"),
        (with_changes()[:-1], "not a valid io.prometheus.write.v2.Request"),
        (with_changes().replace(b"node", b"\xff\xfe\xfd\xfc"), "not a valid io.prometheus.write.v2.Request"),
    ],
)
def test_malformed_request_of_version_2_is_rejected_with_the_reason(data, why):
    reader = WriteReader()
    with pytest.raises(DecodeError, match=why):
        reader.read_2(data, LIMIT)

    assert 0 == reader.read_2(write_request_2((UP, [(NOW, 1.0), (NOW, 2.0)])), LIMIT).dropped["repeated"]


# Senders that get only refusals: when they are logged and listed, and when no longer.


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def names(senders):
    return [one.name for one in senders.listed()]


def test_single_refusals_of_a_sender_that_is_accepted_are_not_listed(caplog):
    clock = Clock()
    senders = Senders(clock)
    for _ in range(10):
        senders.accepted("10.0.0.1", "")
        clock.now += 59
        senders.refused("10.0.0.1", "", "malformed: x")
        senders.accepted("10.0.0.1", "")
        clock.now += MIXED_SECONDS

    assert ([], []) == (names(senders), caplog.records)


@pytest.mark.parametrize(
    ("accepted_seconds", "share", "lines"),
    [
        (5, "120 of 240 requests", ["3 of 6"]),
        (120, "120 of 125 requests", ["3 of 4"]),
    ],
)
def test_accepted_requests_do_not_hide_a_refused_sender_with_the_same_name(caplog, accepted_seconds, share, lines):
    """Two programs behind one proxy, of which one sends every 5 s and gets only refusals."""
    caplog.set_level("INFO")
    clock = Clock()
    senders = Senders(clock)
    for moment in range(0, 600, 5):
        clock.now += 5
        if moment % accepted_seconds == 0:
            senders.accepted("10.0.0.1", "p/3")
        senders.refused("10.0.0.1", "p/3", "malformed: x")
    (listed,) = senders.listed()

    assert share == listed.share
    assert lines == [" ".join(one.getMessage().split()[2:5]) for one in caplog.records]

    clock.now += MIXED_SECONDS
    assert [] == senders.listed()
    senders.accepted("10.0.0.1", "p/3")
    assert "accepted now" in caplog.messages[-1]


def test_refusals_before_the_first_accepted_request_are_forgotten():
    """Some senders try another format first, with several requests at the same time."""
    senders = Senders(Clock())
    for _ in range(8):
        senders.refused("10.0.0.1", "p/3", "unsupported: x")
    senders.accepted("10.0.0.1", "p/3")

    assert [] == senders.listed()


def test_senders_and_log_lines_are_bounded(caplog):
    """A program may send any number of values of User-Agent, of any length."""
    clock = Clock()
    senders = Senders(clock)
    for number in range(1000):
        clock.now += 0.01
        senders.refused("10.0.0.1", f"{number}" + "x" * 10_000, "y" * 10_000)

    assert 256 == len(senders.listed())
    assert 1000 > max(len(one.name) + len(one.reason) for one in senders.listed())
    assert 10 >= sum(record.name == "rankscope_ingest.remote_write.senders" for record in caplog.records)
    clock.now += SHOWN_SECONDS
    assert [] == senders.listed()
