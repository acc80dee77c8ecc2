"""The few protobuf messages of Prometheus' remote read (prompb/remote.proto), in snappy's block format. Pure.

By hand, as they are small and do not change; samples are written as columns, since there may be millions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import (
    FIXED64,
    LENGTH,
    VARINT,
    field,
    fields,
    number_field,
    octets,
    signed,
    text,
    varints,
)
from rankscope_storage.prometheus.matchers import Matcher, MatchType
from rankscope_storage.prometheus.query import SeriesQuery
from rankscope_storage.prometheus.series import Series

SAMPLES, STREAMED_XOR_CHUNKS = 0, 1
MAX_REQUEST_BYTES: Final = 1 << 20
SERIES_ALONE: Final = "series"
"""What Prometheus names in place of a function when it looks for series, as lists of Grafana do, not for samples."""

_SIX_BYTES_FROM, _SIX_BYTES_BELOW = 1 << 35, 1 << 42  # ms since 1970: from 1971 to 2109


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What is asked, and which forms of an answer are taken, best first; none named is samples."""

    questions: tuple[SeriesQuery, ...]
    accepted: tuple[int, ...]


def read_request(data: bytes) -> ReadRequest:
    """Return the request. Raises DecodeError for what is none, QueryError for a bad expression."""
    questions, accepted = [], []
    for number, value in fields(data):
        if number == 1:
            questions.append(_question(octets(value)))
        elif number == 2:
            accepted += [value] if isinstance(value, int) else list(varints(octets(value)))
    return ReadRequest(tuple(questions), tuple(accepted))


def read_response(answers: Iterable[Sequence[Series]]) -> bytes:
    """Return the answer of samples: one result for each question, in order."""
    return b"".join(field(1, b"".join(field(1, _time_series(one)) for one in series)) for series in answers)


def _question(data: bytes) -> SeriesQuery:
    start = end = 0
    matchers = []
    function = ""
    for number, value in fields(data):
        if number == 1:
            start = signed(value)
        elif number == 2:
            end = signed(value)
        elif number == 3:
            matchers.append(_matcher(octets(value)))
        elif number == 4:
            function = _function(octets(value))
    return SeriesQuery(tuple(matchers), start, end, series_alone=function == SERIES_ALONE)


def _function(hints: bytes) -> str:
    """Return for which function of PromQL the answer is."""
    return next((text(value) for number, value in fields(hints) if number == 2), "")


def _matcher(data: bytes) -> Matcher:
    kind, name, expected = 0, "", ""
    for number, value in fields(data):
        if number == 1:
            kind = signed(value)
        elif number == 2:
            name = text(value)
        elif number == 3:
            expected = text(value)
    if kind not in set(MatchType):
        raise DecodeError(f"there is no matcher of type {kind}")
    return Matcher(MatchType(kind), name, expected)


def label_fields(series: Series) -> bytes:
    """Return the labels of a series as they stand in its message."""
    return b"".join(field(1, field(1, name.encode()) + field(2, value.encode())) for name, value in series.labels)


def _time_series(series: Series) -> bytes:
    return label_fields(series) + _samples(series.times_ms, series.values)


def _samples(times: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> bytes:
    if len(times) and not _SIX_BYTES_FROM <= times.min() <= times.max() < _SIX_BYTES_BELOW:
        return b"".join(_sample(int(ts), float(value)) for ts, value in zip(times, values, strict=True))
    rows = np.empty((len(times), 18), np.uint8)
    rows[:, :3] = (2 << 3 | LENGTH, 16, 1 << 3 | FIXED64)
    rows[:, 3:11] = np.ascontiguousarray(values, "<f8").view(np.uint8).reshape(-1, 8)
    rows[:, 11] = 2 << 3 | VARINT
    for place in range(6):
        rows[:, 12 + place] = times >> 7 * place & 0x7F | (0x80 if place < 5 else 0)
    return rows.tobytes()


def _sample(ts: int, value: float) -> bytes:
    number = bytes([1 << 3 | FIXED64]) + np.array(value, "<f8").tobytes()
    return field(2, number + number_field(2, ts))
