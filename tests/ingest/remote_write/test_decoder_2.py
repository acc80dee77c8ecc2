"""Decoding of remote write 2.0: the same rows as version 1.0; malformed requests are rejected as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.remote_write.messages import CLASSES_2, write_request, write_request_2
from tests.ingest.remote_write.test_decoder import NOW, REQUESTS, STALE, STARTS, UP, one_round, rows
from tests.properties import examples

from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.remote_write.decoder import MAX_SYMBOLS, WriteReader

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
            assert (one.written, one.repeated, one.exemplars, one.histograms) == (
                *(two.written, two.repeated, two.exemplars, two.histograms),
            )
            assert len(series) == two.metadata


def test_series_is_recognized_in_another_symbol_table_and_version():
    reader = WriteReader()
    reader.read(write_request((UP, [(NOW, 1.0)])))
    decoded = [
        reader.read_2(write_request_2((UP, [(NOW + at, STALE)]), symbols=("", *"abc"[:at])), LIMIT) for at in (0, 1, 3)
    ]

    assert ["a:9100"] * 3 == [one.series[0].target for one in decoded]
    assert 1 == len({one.series[0] for one in decoded})
    assert 1 == reader.read(write_request((UP, [(NOW + 3, STALE)]))).repeated


def test_symbols_that_are_joined_differently_are_different_series():
    reader = WriteReader()
    texts = [{"a": "1:b"}, {"a1": ":b"}, {"a": "1", "b": ""}, {"a": "b", "1:": "1:"}, {"a": "b1:1:"}]
    decoded = [reader.read_2(write_request_2(({"__name__": "m", **one}, [(NOW, 1.0)])), LIMIT) for one in texts]

    assert len(texts) == len({one.series[0].labels for one in decoded})


def test_samples_of_version_2_are_right_while_the_cache_is_full_and_swept():
    one, two = WriteReader(max_known_series=20), WriteReader(max_known_series=20)
    for at in range(40):
        series = [({**UP, "cpu": str(number)}, [(NOW + 1000 * at, 1.0 + number)]) for number in range(at, at + 30)]

        assert rows(*(one.read(data) for data in one_round(at, range(at, at + 30)))) == (
            rows(two.read_2(write_request_2(*series), LIMIT))
        )


@pytest.mark.parametrize("labels", [{f"l{number}": "x" for number in range(200)}, {"x": "y" * 70_000}])
def test_oversized_series_of_version_2_is_dropped_and_counted(labels):
    data = write_request_2(({**UP, **labels}, [(NOW, 1.0)]), (UP, [(NOW, 1.0)]))
    decoded = WriteReader().read_2(data, LIMIT)

    assert (1, 1) == (decoded.oversized, decoded.written)


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

    assert 0 == reader.read_2(write_request_2((UP, [(NOW, 1.0), (NOW, 2.0)])), LIMIT).repeated


@settings(max_examples=examples(60), deadline=None)
@given(st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=3)))
def test_changed_bytes_of_version_2_are_decoded_or_raise_decode_error(change):
    data = write_request_2((UP, [(NOW, 1.0)], 1, 1), ({**UP, "cpu": "1"}, [(NOW, 0.0)]))
    place = change[0] % len(data)
    data = data[:place] + change[1] + data[place + len(change[1]) :]
    try:
        decoded = WriteReader().read_2(data, LIMIT)
    except DecodeError:
        return

    assert decoded.rows == len(rows(decoded))
