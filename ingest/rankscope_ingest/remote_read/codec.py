"""Decode remote read requests, and encode responses with plain samples.

Responses with streamed chunks are left to `chunked`. The module performs no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import MESSAGES, label_bytes, parse
from rankscope_storage.prometheus.matchers import Matcher, MatchType
from rankscope_storage.prometheus.query import SeriesQuery
from rankscope_storage.prometheus.series import Series

SAMPLES, STREAMED_XOR_CHUNKS = 0, 1
MAX_REQUEST_BYTES: Final = 1 << 20
SERIES_ALONE: Final = "series"
"""The function name in the hints of a remote read query that asks only for the labels of series, without samples.

Prometheus sends such queries when it lists series, for example for the menus of Grafana.
"""

_SIX_BYTES_FROM, _SIX_BYTES_BELOW = 1 << 35, 1 << 42  # ms since 1970: from 1971 to 2109
_SAMPLE_HEAD: Final = (2 << 3 | 2, 16, 1 << 3 | 1)  # field 2 of 16 bytes; its field 1, a double
_TIME_TAG: Final = 2 << 3


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The queries of a request, and the accepted response types, the preferred one first.

    If a request names no response type, the response has plain samples.
    """

    questions: tuple[SeriesQuery, ...]
    accepted: tuple[int, ...]


def read_request(data: bytes) -> ReadRequest:
    """Return the request that is serialized in `data`.

    Raises DecodeError if it is malformed, and QueryError if the regular expression of a matcher is invalid.
    """
    request = parse("ReadRequest", data)
    return ReadRequest(tuple(map(_query, request.queries)), tuple(request.accepted_response_types))


def _query(query: Any) -> SeriesQuery:
    matchers = tuple(_matcher(one) for one in query.matchers)
    only_series = query.hints.func == SERIES_ALONE
    return SeriesQuery(matchers, query.start_timestamp_ms, query.end_timestamp_ms, series_alone=only_series)


def _matcher(matcher: Any) -> Matcher:
    if matcher.type not in set(MatchType):
        raise DecodeError(f"the request has an unknown matcher type: {matcher.type}")
    return Matcher(MatchType(matcher.type), matcher.name, matcher.value)


def read_response(answers: Iterable[Sequence[Series]]) -> bytes:
    """Return the serialized response with plain samples.

    It has one result for each query, in the order of the queries.
    """
    response = MESSAGES["ReadResponse"]()
    for series in answers:
        response.results.add(timeseries=map(_time_series, series))
    data: bytes = response.SerializeToString()
    return data


def _time_series(series: Series) -> bytes:
    # A concatenation of serialized messages is the message with the fields of both.
    head: bytes = MESSAGES["SeriesHead"](labels=labels_of(series)).SerializeToString()
    return head + _samples(series.times_ms, series.values)


def labels_of(series: Series) -> list[bytes]:
    """Return the labels of a series, each as a serialized message."""
    return [label_bytes(name, value) for name, value in series.labels]


def _samples(times: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> bytes:
    """Return the samples as serialized fields of a TimeSeries message.

    If the times take six bytes each, all encoded samples have the same length and are written as columns of one array.
    """
    if len(times) and not _SIX_BYTES_FROM <= times.min() <= times.max() < _SIX_BYTES_BELOW:
        sample = MESSAGES["Sample"]
        pairs = zip(times.tolist(), values.tolist(), strict=True)
        samples = [sample(timestamp=ms, value=value) for ms, value in pairs]
        data: bytes = MESSAGES["TimeSeries"](samples=samples).SerializeToString()
        return data
    rows = np.empty((len(times), 18), np.uint8)
    rows[:, :3] = _SAMPLE_HEAD
    rows[:, 3:11] = np.ascontiguousarray(values, "<f8").view(np.uint8).reshape(-1, 8)
    rows[:, 11] = _TIME_TAG
    for place in range(6):
        rows[:, 12 + place] = times >> 7 * place & 0x7F | (0x80 if place < 5 else 0)
    return rows.tobytes()
