"""Requests of remote write, read as Google's own protobuf would, whatever their form; garbage is refused as a whole."""

from __future__ import annotations

import contextlib
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.remote_write.messages import CLASSES, write_request

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import packed, unpacked
from rankscope_ingest.remote_write.batcher import samples_table
from rankscope_ingest.remote_write.decoder import WriteReader
from rankscope_ingest.remote_write.reference_decoder import read_series

NOW = 1_770_000_000_000
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0002))[0]
UP = {"__name__": "up", "instance": "a:9100", "job": "node"}


def bits(value):
    return None if value is None else struct.pack("<d", value)


def rows(*written):
    """Return (target, metric, labels, ms, bits of the value) of each row, sorted; a value that is null is None."""
    found = samples_table(written).to_pylist()
    return sorted(
        (row["target"], row["metric"], row["labels"] or "", round(row["ts"].timestamp() * 1000), bits(row["value"]))
        for row in found
    )


def meant(data):
    """Return the same of what the reference understands; a sample that repeats the one before it counts once."""
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
BEGINNINGS = st.sampled_from([0, 1 << 35, NOW, 1 << 42, 1 << 47])
SERIES = st.tuples(
    LABELS,
    st.lists(st.tuples(TIMES, VALUES), max_size=3, unique_by=lambda sample: sample[0]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([0, 0, 0, 1]),
)
REQUESTS = st.lists(SERIES, max_size=6, unique_by=lambda one: canonical_labels({k: v for k, v in one[0].items() if v}))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(REQUESTS, st.sampled_from([(), ("up",)]), BEGINNINGS), min_size=1, max_size=3))
def test_any_request_is_read_as_the_reference_reads_it(requests):
    """The first and the later ones, known labels and new ones, in any mixture of forms."""
    for offsets, metadata, begin in requests:
        series = [(labels, [(begin + ms, value) for ms, value in some], *more) for labels, some, *more in offsets]
        data = write_request(*series, metadata=metadata)
        reader = WriteReader()
        first, second = reader.read(data), reader.read(data)

        assert meant(data) == rows(first)
        assert second.rows + second.repeated == first.rows
        assert (sum(one[2] for one in series), sum(one[3] for one in series)) == (first.exemplars, first.histograms)
        assert len(metadata) == first.metadata


def test_a_last_sample_whose_time_comes_first_is_no_end_that_is_proved():
    """Protobuf allows any order; it has the length of a usual one."""
    data = write_request((UP, [(NOW, 1.0)]), ({**UP, "cpu": "1"}, [(NOW, 2.5)]))
    value, time = data[-16:-7], data[-7:]

    assert meant(data) == rows(WriteReader().read(data[:-16] + time + value))


def test_a_value_or_label_in_which_a_sample_seems_to_begin_ends_no_message_twice():
    (within,) = struct.unpack("<d", b"123456\x12\x07")
    for series in ((UP, [(NOW, within)]), ({**UP, "x": "\x12\x10", "zzz": ""}, [(NOW, 0.0)])):
        data = write_request((UP, [(NOW - 1, 1.0)]), series)

        assert meant(data) == rows(WriteReader().read(data))


def test_usual_requests_are_read_by_known_labels_whatever_their_values(monkeypatch):
    """Every label set costs a reading by the rules once; a value of 0 is left out of a message; some have several."""
    reader = WriteReader()
    series = [{**UP, "cpu": str(number), "mode": "x" * number} for number in range(300)]
    reader.read(write_request(*((labels, [(NOW, 1.0)]) for labels in series)))
    monkeypatch.setattr("rankscope_ingest.remote_write.decoder.read_series", None)
    monkeypatch.setattr("rankscope_ingest.remote_write.decoder.frames", None)

    data = [
        write_request(*((labels, [(NOW + at * count, count % 3)]) for count, labels in enumerate(series, 1)))
        for at in (15_000, 30_000)
    ]
    data.append(write_request(*((labels, [(NOW + 1000 * n, n % 2) for n in range(9)]) for labels in series)))

    assert list(map(meant, data)) == [rows(reader.read(one)) for one in data]


def test_labels_in_another_order_are_the_same_series_and_a_repeated_sample_is_left_out():
    """As when a sender gathers what it sends again into other requests."""
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
    assert [NOW + 1, NOW - 5] == [ms for part in other.parts for ms in part.times_ms.tolist()]


def one_round(at, active, *, of_each=10, **more):
    """Return requests with a sample at `at` of each of the series `active`."""
    series = [({**UP, "cpu": str(number), **more}, [(NOW + 1000 * at, 1.0 + number)]) for number in active]
    return [write_request(*series[first : first + of_each]) for first in range(0, len(series), of_each)]


@pytest.fixture
def by_rules(monkeypatch):
    """Return a list that holds each message that was read by the rules since it was cleared."""
    read = []
    monkeypatch.setattr(
        "rankscope_ingest.remote_write.decoder.read_series",
        lambda message: read.append(message) or read_series(message),
    )
    return read


@pytest.mark.parametrize(("active", "most_read"), [(100, 0), (112, 0), (130, 30), (200, 100)])
def test_more_series_than_a_book_holds_cost_as_much_as_there_are_too_many(by_rules, active, most_read):
    """Senders go round and round: in each round those that are known stay so, whatever comes between them."""
    reader = WriteReader(most_known=100)
    costs = []
    for at in range(20):
        by_rules.clear()
        for request in one_round(at, range(active)):
            reader.read(request)
        costs.append(len(by_rules))

    assert active == costs[0]
    assert max(costs[1:]) <= most_read


def test_rows_are_right_wherever_their_series_stand():
    """Also those that wait for a commit while their book goes on without their series."""
    reader = WriteReader(most_known=20)
    requests = [
        one for at in range(60) for one in one_round(at, range(at // 2, at // 2 + 30), of_each=7 + at % 5, mode="é")
    ]

    written = [reader.read(one) for one in requests]

    assert [meant(one) for one in requests] == [rows(one) for one in written]
    assert sorted(row for one in requests for row in meant(one)) == rows(*written)
    assert len({id(part.book) for one in written for part in one.parts}) > 4


def test_series_that_are_no_longer_sent_make_room(by_rules):
    """After a generation or two of what comes in their place."""
    reader = WriteReader(most_known=100)
    for at in range(20):
        for request in one_round(at, range(50, 150) if at else range(100)):
            reader.read(request)
    for at in range(20, 40):
        by_rules.clear()
        for request in one_round(at, range(300, 390)):
            reader.read(request)

    assert [] == by_rules


def test_what_is_known_of_repeats_outlasts_a_full_book():
    """A sender that lost its way may send the last sample of each series again, in other requests."""
    reader = WriteReader(most_known=100)
    for at in range(9):
        for request in one_round(at, range(at, at + 80)):
            reader.read(request)
    for request in one_round(0, range(1000, 1040)):
        reader.read(request)

    again = [reader.read(request) for request in one_round(8, range(8, 88), of_each=8)]

    assert (0, 80) == (sum(one.rows for one in again), sum(one.repeated for one in again))


def test_series_with_long_labels_take_the_room_of_several(by_rules):
    """So that memory is bounded whatever is sent."""
    reader = WriteReader(most_known=100)
    for at in range(2):
        by_rules.clear()
        for request in one_round(at, range(20), of_each=1, text="x" * 10_000):
            reader.read(request)

    assert 17 <= len(by_rules)


def test_a_series_with_too_many_or_too_long_labels_is_left_out_alone():
    reader = WriteReader()
    many = {**UP, **{f"l{number}": "x" for number in range(200)}}
    long = {**UP, "x": "y" * 70_000}
    data = write_request((many, [(NOW, 1.0)]), (UP, [(NOW, 1.0)]), (long, [(NOW, 1.0)]))

    first, second = reader.read(data), WriteReader().read(data)

    assert (2, 2) == (first.oversized, second.oversized)
    assert 3 == reader.read(write_request((many, [(NOW, 1.0)]), (long, [(NOW, 1.0), (NOW + 1, 2.0)]))).oversized
    assert meant(write_request((UP, [(NOW, 1.0)]))) == rows(first)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (write_request(({"instance": "a"}, [(NOW, 1.0)])), "no __name__"),
        (write_request(({**UP, "": "x"}, [(NOW, 1.0)])), "no name"),
        (write_request((UP, [(-1, 1.0)])), "before 1970"),
        (write_request((UP, [(1 << 50, 1.0)])), "after 9999"),
        (write_request((UP, [(NOW - 86_400_000 * 70, 1.0)])), "more than 62 days"),
        (write_request((UP, [(NOW, 1.0)])) + b"\x0a\x7f", "middle of a field"),
        (write_request((UP, [(NOW, 1.0)])) + b"\x22\x01x", "field 4 is none of remote write 1.0"),
        (write_request((UP, [(NOW, 1.0)])).replace(b"node", b"\xff\xfe\xfd\xfc"), "not UTF-8"),
        (b"\x0a\x06" + b"\x0a\x04\x0a\x02up"[:6], "middle|wire type|no __name__"),
        (b"\x0a\x02\x10\x01", "wire type"),
        (b"\x0b", "wire type"),
        (write_request((UP, [(NOW, 1.0)]))[:-1], "middle"),
    ],
)
def test_what_is_malformed_is_refused_with_a_reason_and_as_a_whole(data, why):
    with pytest.raises(DecodeError, match=why):
        WriteReader().read(write_request((UP, [(NOW, 2.0)])) + data)


def test_a_label_twice_is_refused():
    request = CLASSES["WriteRequest"].FromString(write_request((UP, [(NOW, 1.0)])))
    request.timeseries[0].labels.add(name="job", value="again")

    with pytest.raises(DecodeError, match="twice"):
        WriteReader().read(request.SerializeToString())


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=3)),
    )
)
def test_bytes_are_read_or_refused_and_never_anything_else(change):
    """Random ones, and a good request with some of its bytes changed."""
    data = write_request((UP, [(NOW, 1.0)]), ({**UP, "cpu": "1"}, [(NOW, 0.0)]), ({**UP, "cpu": "2"}, [(NOW, 2.5)]))
    if isinstance(change, tuple):
        place = change[0] % len(data)
        data = data[:place] + change[1] + data[place + len(change[1]) :]
    else:
        data = change
    reader = WriteReader()
    reader.read(write_request((UP, [(NOW - 1, 1.0)])))
    with contextlib.suppress(DecodeError):
        written = reader.read(data)
        with contextlib.suppress(Exception):
            expected = meant(data)
            assert expected == rows(written)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", packed(b"x" * 10)[:-2], packed(b"x" * 2_000), b"\xff\xff\xff\xff\x7f", b"\xe8\x07\x00x"]
)
def test_what_is_no_snappy_block_or_larger_than_allowed_is_refused(body):
    with pytest.raises(DecodeError):
        unpacked(body, 1_000)
