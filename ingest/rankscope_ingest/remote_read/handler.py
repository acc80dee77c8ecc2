"""Respond to remote read requests from the store: one query at a time, in a thread.

A response may have `max_samples` samples, so memory is bounded by running one query at a time. Up to three responses
are sent at the same time. If a client accepts no data for 60 s, its response is aborted. A query is cancelled when it
takes too long or its client has disconnected, so that the next query need not wait for it.

Responses contain plain samples or streamed XOR chunks. The chunks have the same bytes as those of Prometheus' package
tsdb/chunkenc. The format is that of Facebook's Gorilla: a chunk is a stream of bits, in which each sample is written as
its difference from the previous sample. The chunks of several series are encoded together as NumPy arrays. Only the
choice of the bits that are written for each value depends on all previous samples of the chunk. A loop makes this
choice sample by sample, for all chunks at the same time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt
from aiohttp import web

from rankscope_ingest.base.config import RemoteReadSection
from rankscope_ingest.base.errors import DecodeError, RegistrationError
from rankscope_ingest.base.protobuf import MESSAGES, as_varint, label_bytes, packed, parse, unpacked
from rankscope_storage.base.errors import LimitError, QueryError, StoreError
from rankscope_storage.connection import Connection, connect
from rankscope_storage.prometheus.query import Matcher, MatchType, SeriesQuery
from rankscope_storage.prometheus.read import CancelToken, read
from rankscope_storage.prometheus.series import Series

SAMPLES, STREAMED_XOR_CHUNKS = 0, 1
MAX_REQUEST_BYTES: Final = 1 << 20
SERIES_ALONE: Final = "series"
"""The function name in the hints of a remote read query that asks only for the labels of series, without samples.

Prometheus sends such queries when it lists series, for example for the menus of Grafana.
"""

_ONE_VALUE: Final = frozenset({
    "", "sum", "avg", "min", "max", "count", "group", "topk", "bottomk", "quantile", "stddev", "stdvar", "count_values",
    "abs", "ceil", "floor", "round", "sgn", "exp", "ln", "log2", "log10", "sqrt", "clamp", "clamp_min", "clamp_max",
    "label_replace", "label_join", "sort", "sort_desc", "scalar",
})  # fmt: skip
"""Function names in the hints of queries that need one value of each series at each time of evaluation.

These are aggregations over series, functions of each sample or of labels, and "" for no function."""

_LOOKBACK_MS: Final = 300_000
"""Prometheus' default lookback period in ms, by which the range of an instant query begins before its time."""

_COARSE_MS: Final = 15_000
"""Smallest step in ms for which a response has only the last sample of each step. Smaller steps save nothing."""

_SIX_BYTES_FROM, _SIX_BYTES_BELOW = 1 << 35, 1 << 42  # ms since 1970: from 1971 to 2109
_SAMPLE_HEAD: Final = (2 << 3 | 2, 16, 1 << 3 | 1)  # field 2 of 16 bytes; its field 1, a double
_TIME_TAG: Final = 2 << 3
SAMPLES_PER_CHUNK: Final = 120
_HEADER_BITS: Final = 16
_NO_WINDOW: Final = 255
_MAX_LEADING: Final = 31  # largest value of five bits
CONTENT_TYPE: Final = "application/x-streamed-protobuf; proto=prometheus.ChunkedReadResponse"
FRAME_BYTES: Final = 1 << 20
"""Size in bytes at which a frame of a streamed response ends, as in Prometheus.

Prometheus rejects frames that are 50 times larger.
"""

SAMPLES_PER_GROUP: Final = 1 << 17
_XOR: Final = 1  # encoding of a chunk

Integers = npt.NDArray[np.int64]

Words = npt.NDArray[np.uint64]

READ_SECONDS: Final = 45.0
"""Time limit of one query in seconds.

The limit is below 60 s, after which Prometheus by default cancels a remote read without showing a reason.
"""

SEND_SECONDS: Final = 60.0
_CHECK_SECONDS: Final = 0.5  # interval of checks for a disconnected client and the time limit
_MAX_RESPONSES: Final = 3
_KEPT_ANSWERS: Final = 4
_KEPT_SAMPLES: Final = 500_000  # of one answer: 8 MB
_PLAIN: Final = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
_STREAMED: Final = {"Content-Type": CONTENT_TYPE}

_Answer = tuple[dict[str, str], Iterator[bytes]]
"""The headers and the pieces of the body of a response."""


def read_request(data: bytes) -> tuple[tuple[SeriesQuery, ...], tuple[int, ...]]:
    """Return the queries of the request in `data`, and the accepted response types, the preferred one first.

    If a request names no response type, the response has plain samples. Raises DecodeError if the request is malformed,
    and QueryError if the regular expression of a matcher is invalid.
    """
    request = parse("ReadRequest", data)
    return tuple(map(_query, request.queries)), tuple(request.accepted_response_types)


def _query(query: Any) -> SeriesQuery:
    matchers = tuple(_matcher(one) for one in query.matchers)
    hints, start, end = query.hints, query.start_timestamp_ms, query.end_timestamp_ms
    if hints.end_ms > 0:
        start, end = max(start, hints.start_ms), min(end, hints.end_ms)
    is_window = 0 <= hints.range_ms - (hints.end_ms - hints.start_ms) <= 1 < hints.range_ms
    return SeriesQuery(
        matchers,
        start,
        end,
        series_alone=hints.func == SERIES_ALONE,
        last_alone=_is_of_one_moment(hints) or (is_window and hints.func == "last_over_time"),
        largest_alone=is_window and hints.func == "max_over_time",
        step_ms=_period(hints),
        with_ends=not hints.range_ms,
    )


def _is_of_one_moment(hints: Any) -> bool:
    """Return whether the hints are those of a selector that Prometheus evaluates once, with the newest sample alone.

    A subquery and a range query have a step, and a range vector has a range. A selector that also needs the next sample
    has a longer period.
    """
    is_lookback = _LOOKBACK_MS - 1 <= hints.end_ms - hints.start_ms <= _LOOKBACK_MS
    return is_lookback and not hints.step_ms and not hints.range_ms and hints.func in _ONE_VALUE


def _period(hints: Any) -> int:
    """Return the time in ms between two evaluations of a selector, if all of them are at multiples of it, otherwise 0.

    Grafana and subqueries evaluate at such times. The first time is later than the start by the lookback period. If the
    default period does not lead to a multiple, the period is another one, or the times are others.
    """
    first = hints.start_ms + _LOOKBACK_MS
    is_coarse = hints.step_ms >= _COARSE_MS and not hints.range_ms and hints.end_ms - hints.start_ms > _LOOKBACK_MS
    return int(hints.step_ms) if is_coarse and first % hints.step_ms <= 1 else 0


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
    """Return the labels of a series, each as a serialized Label message."""
    return [label_bytes(name, value) for name, value in series.labels]


def _samples(times: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> bytes:
    """Return the samples as serialized fields of a TimeSeries message.

    If several times take six bytes each, all encoded samples have the same length and are written as columns of one
    array.
    """
    if len(times) == 1 or (len(times) and not _SIX_BYTES_FROM <= times.min() <= times.max() < _SIX_BYTES_BELOW):
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


@dataclass(frozen=True, slots=True)
class _Bits:
    """The bits that are written to the chunk for each sample: a number, and how many of its low bits (0 to 64)."""

    values: Words
    counts: Integers


def chunks(times: Integers, values: npt.NDArray[np.float64], starts: Integers) -> list[bytes]:
    """Return one encoded chunk for each range of samples; `starts` has the position at which each range begins.

    A range has at most 65,535 samples. `times` are in milliseconds and increase within a range.
    """
    lengths = np.diff(starts, append=len(times))
    within = np.arange(len(times)) - np.repeat(starts, lengths)
    parts = (*_times(times, within), *_values(np.ascontiguousarray(values).view(np.uint64), within, starts, lengths))
    counts = np.stack([part.counts for part in parts], axis=1)
    sizes = counts.sum(axis=1)
    chunk_bytes = _byte_counts(_HEADER_BITS + np.add.reduceat(sizes, starts), counts[starts + lengths - 1, -1])
    first_words = np.concatenate([[0], np.cumsum((chunk_bytes + 7) >> 3)])
    ends = np.cumsum(sizes)
    before = np.repeat(ends[starts] - sizes[starts], lengths)
    offsets = (np.repeat(first_words[:-1], lengths) << 6) + _HEADER_BITS + ends - sizes - before
    written = _packed(np.stack([part.values for part in parts], axis=1), counts, offsets, int(first_words[-1]))
    written[first_words[:-1]] |= lengths.astype(np.uint64) << np.uint64(48)
    data = written.astype(">u8").tobytes()
    return [
        data[first << 3 : (first << 3) + size]
        for first, size in zip(first_words[:-1].tolist(), chunk_bytes.tolist(), strict=True)
    ]


def _byte_counts(bits: Integers, last: Integers) -> Integers:
    """Return, for each chunk of `bits` bits, the number of bytes that Prometheus writes.

    `last` is the number of bits that the last write added to each chunk. Prometheus' writer appends another byte after
    each complete byte, even if no bits follow.
    """
    is_open = (bits % 8 == 0) & (last > 0) & (last % 8 == 0)
    counts: Integers = ((bits + 7) >> 3) + is_open
    return counts


def _times(times: Integers, within: Integers) -> tuple[_Bits, _Bits]:
    """Return the encoded times: the first time, then the first difference, then the changes of the difference."""
    distances = np.diff(times, prepend=times[:1])
    change = np.diff(distances, prepend=distances[:1])
    bits, first = change.view(np.uint64), np.zeros(len(times), np.uint64)
    counts, more = np.full(len(times), 1), np.zeros(len(times), np.int64)
    is_wide = change != 0
    for prefix, size in ((0b10, 14), (0b110, 17), (0b1110, 20)):
        fits = is_wide & (change >= 1 - (1 << (size - 1))) & (change <= 1 << (size - 1))
        first[fits] = (np.uint64(prefix << size)) | (bits[fits] & np.uint64((1 << size) - 1))
        counts[fits] = prefix.bit_length() + size
        is_wide &= ~fits
    first[is_wide], counts[is_wide], more[is_wide] = 0b1111, 4, 64
    rest = bits.copy()
    for position, numbers in ((0, (times << 1) ^ (times >> 63)), (1, distances)):  # zigzag, as Go's signed varint
        here = np.flatnonzero(within == position)
        first[here], counts[here], rest[here], more[here] = _varints(numbers[here].view(np.uint64))
    return _Bits(first, counts), _Bits(rest, more)


def _varints(numbers: Words) -> tuple[Words, Integers, Words, Integers]:
    """Return `numbers`, each encoded as a varint of up to ten bytes.

    The result has four arrays: the first eight bytes of each varint and the number of bits in these bytes, then the
    last two bytes of each varint and the number of bits in those bytes.
    """
    sizes = np.maximum(1, (_bit_lengths(numbers) + 6) // 7)
    halves = [(np.zeros(len(numbers), np.uint64), np.zeros(len(numbers), np.int64)) for _ in range(2)]
    for place in range(10):
        bits, counts = halves[place >= 8]
        there = sizes > place
        octet = (numbers >> np.uint64(7 * place)) & np.uint64(0x7F)
        octet |= np.where(sizes > place + 1, np.uint64(0x80), np.uint64(0))
        bits[there] = (bits[there] << np.uint64(8)) | octet[there]
        counts[there] += 8
    (low, low_counts), (high, high_counts) = halves
    return low, low_counts, high, high_counts


def _values(bits: Words, within: Integers, starts: Integers, lengths: Integers) -> tuple[_Bits, _Bits]:
    """Return the encoded values: all 64 bits of the first value, then the XOR of each value with the previous value.

    Only a window of bits of each XOR is written. The previous window is used again if it covers all significant bits of
    the XOR; otherwise a new window begins.
    """
    changed = bits.copy()
    changed[1:] ^= bits[:-1]
    leading = np.minimum(64 - _bit_lengths(changed), _MAX_LEADING)
    trailing = np.maximum(_bit_lengths(changed & (~changed + np.uint64(1))) - 1, 0)
    is_new, leading, trailing = _windows(changed != 0, leading, trailing, starts, lengths)
    significant = 64 - leading - trailing
    control = np.where(changed == 0, 0, 0b10)
    counts = np.where(changed == 0, 1, 2)
    control[is_new] = 0b11 << 11 | leading[is_new] << 6 | significant[is_new] & 63
    counts[is_new] = 13
    payload = changed >> trailing.astype(np.uint64)
    sizes = np.where(changed == 0, 0, significant)
    first = within == 0
    payload[first], sizes[first], counts[first] = bits[first], 64, 0
    return _Bits(control.astype(np.uint64), counts), _Bits(payload, sizes)


def _windows(
    differs: npt.NDArray[np.bool_], leading: Integers, trailing: Integers, starts: Integers, lengths: Integers
) -> tuple[npt.NDArray[np.bool_], Integers, Integers]:
    """Return which samples begin a new window of significant bits, and the window of each sample.

    A window is the range of bits that is written to the chunk from the XOR of a value with the previous value. It is
    given by the numbers of leading and trailing bits that are not written.
    """
    is_new = np.zeros(len(differs), np.bool_)
    before, behind = leading.copy(), trailing.copy()
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    open_before, open_behind = np.full(len(starts), _NO_WINDOW), np.full(len(starts), _NO_WINDOW)
    for place in range(1, int(lengths[0]) if len(lengths) else 0):
        count = int(np.searchsorted(-lengths, -place, side="left"))
        here = starts[:count] + place
        opens = differs[here] & ((leading[here] < open_before[:count]) | (trailing[here] < open_behind[:count]))
        open_before[:count] = np.where(opens, leading[here], open_before[:count])
        open_behind[:count] = np.where(opens, trailing[here], open_behind[:count])
        is_new[here], before[here], behind[here] = opens, open_before[:count], open_behind[:count]
    before[~differs], behind[~differs] = 0, 0
    return is_new, before, behind


def _packed(values: Words, counts: Integers, offsets: Integers, words: int) -> Words:
    """Return `words` 64-bit words that contain the encoded times and values of all samples.

    `offsets` has the position, in bits, at which the encoded time and value of each sample begin.
    """
    places = (offsets[:, None] + np.cumsum(counts, axis=1) - counts).ravel()
    kept = np.flatnonzero(counts.ravel())
    places, sizes = places[kept], counts.ravel()[kept]
    aligned = values.ravel()[kept] << (64 - sizes).astype(np.uint64)
    word, shift = places >> 6, (places & 63).astype(np.uint64)
    written = np.zeros(words, np.uint64)
    firsts = np.flatnonzero(np.diff(word, prepend=-1))
    written[word[firsts]] = np.bitwise_or.reduceat(aligned >> shift, firsts)
    spills = (places & 63) + sizes > 64
    written[word[spills] + 1] |= aligned[spills] << (np.uint64(64) - shift[spills])
    return written


def _bit_lengths(numbers: Words) -> Integers:
    """Return the bit length of each 64-bit number.

    The upper 32 bits, or the lower 32 bits if the upper ones are 0, are converted to a float64, which is exact. The bit
    length follows from the exponent of this float64.
    """
    high = (numbers >> np.uint64(32)).astype(np.float64)
    low = (numbers & np.uint64(0xFFFF_FFFF)).astype(np.float64)
    return np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1]).astype(np.int64)


def frames(
    answers: Sequence[Sequence[Series]], frame_bytes: int = FRAME_BYTES, group_samples: int = SAMPLES_PER_GROUP
) -> Iterator[bytes]:
    """Yield the streamed response in pieces that consist of whole frames, series by series.

    `answers` has the resulting series of each query. A frame ends at a size of `frame_bytes` bytes; about
    `group_samples` samples are encoded together.
    """
    for query, series in enumerate(answers):
        for group in _groups(series, group_samples):
            encoded = iter(_chunks_of(group))
            yield b"".join(frame for one in group for frame in _frames_of(one, query, encoded, frame_bytes))


def _groups(series: Sequence[Series], group_samples: int) -> Iterator[list[Series]]:
    """Yield groups of series to encode together: many small series together cost little more than one."""
    group: list[Series] = []
    samples = 0
    for one in series:
        group.append(one)
        samples += len(one.times_ms)
        if samples >= group_samples:
            yield group
            group, samples = [], 0
    if group:
        yield group


def _chunks_of(series: Sequence[Series]) -> list[bytes]:
    times = np.concatenate([one.times_ms for one in series])
    values = np.concatenate([one.values for one in series])
    ends = np.cumsum([0, *(len(one.times_ms) for one in series)])
    starts = [np.arange(first, end, SAMPLES_PER_CHUNK) for first, end in itertools.pairwise(ends)]
    return chunks(times, values, np.concatenate(starts).astype(np.int64)) if len(times) else []


def _frames_of(series: Series, query: int, encoded: Iterator[bytes], frame_bytes: int) -> Iterator[bytes]:
    """Yield the frames of one series. Each frame repeats the labels of the series."""
    labels = labels_of(series)
    head_bytes = sum(map(len, labels))
    message, size = MESSAGES["ChunkedSeries"](labels=labels), head_bytes
    for first in range(0, len(series.times_ms), SAMPLES_PER_CHUNK):
        if size >= frame_bytes:
            yield _frame(message, query)
            message, size = MESSAGES["ChunkedSeries"](labels=labels), head_bytes
        times = series.times_ms[first : first + SAMPLES_PER_CHUNK]
        chunk = message.chunks.add(min_time_ms=times[0], max_time_ms=times[-1], type=_XOR, data=next(encoded))
        size += chunk.ByteSize()
    yield _frame(message, query)


def _frame(series: object, query: int) -> bytes:
    """Return one serialized frame: the length of the message as a varint, its CRC-32C, and the message."""
    message: bytes = MESSAGES["ChunkedReadResponse"](chunked_series=[series], query_index=query).SerializeToString()
    check_sum: int = google_crc32c.value(message)
    return as_varint(len(message)) + check_sum.to_bytes(4, "big") + message


class RemoteRead:
    """Serves remote read requests from the store at `path`."""

    def __init__(self, path: str, section: RemoteReadSection, *, read_seconds: float = READ_SECONDS) -> None:
        self._path = path
        self._section = section
        self._read_seconds = read_seconds
        self._slots = asyncio.Semaphore(_MAX_RESPONSES)
        self._turn = asyncio.Lock()  # the time limit of a query starts when it has its turn
        self._latest: dict[tuple[int, tuple[SeriesQuery, ...]], list[list[Series]]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Send the response to a remote read request.

        Raises RegistrationError, whose HTTP status and reason Prometheus shows, if the query fails.
        """
        body = await request.read()
        async with self._slots:
            headers, pieces = await self._read(request, body)
            response = web.StreamResponse(headers=headers)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                if not response.prepared:
                    await response.prepare(request)
                async with asyncio.timeout(SEND_SECONDS):
                    await response.write(piece)
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof()
            return response

    async def _read(self, request: web.Request, body: bytes) -> _Answer:
        """Run a query after all previous ones and return its response.

        The query is cancelled if it exceeds the time limit or if the client has disconnected.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            cancel = CancelToken()
            ends_at = loop.time() + self._read_seconds
            answering = loop.run_in_executor(None, self._answer, body, cancel)
            try:
                while not answering.done():
                    if _is_disconnected(request):
                        cancel.end("the client has disconnected")
                    elif loop.time() >= ends_at:
                        cancel.end(f"it took longer than {self._read_seconds:g} s")
                    await asyncio.wait([answering], timeout=_CHECK_SECONDS)
            except asyncio.CancelledError:
                while not answering.done():  # return only when the next query can run
                    cancel.end("the service is stopping")
                    await asyncio.wait([answering], timeout=_CHECK_SECONDS)
                answering.exception()
                raise
            return await answering

    def _answer(self, body: bytes, cancel: CancelToken) -> _Answer:
        try:
            questions, accepted = read_request(unpacked(body, MAX_REQUEST_BYTES))
            form = next((one for one in accepted or (SAMPLES,) if one in {SAMPLES, STREAMED_XOR_CHUNKS}), None)
            if form is None:
                raise RegistrationError(
                    400, "no accepted response type is supported: accept samples or streamed XOR chunks"
                )
            with connect(self._path) as connection:
                series = self._series(connection, questions, cancel)
        except (DecodeError, LimitError, QueryError) as error:
            raise RegistrationError(400, str(error)) from error
        except StoreError as error:
            raise RegistrationError(500, str(error)) from error
        if form == STREAMED_XOR_CHUNKS:
            return _STREAMED, frames(series)
        return _PLAIN, iter([packed(read_response(series))])

    def _series(
        self, connection: Connection, questions: tuple[SeriesQuery, ...], cancel: CancelToken
    ) -> list[list[Series]]:
        """Return the series of the queries: a panel asks for the same series several times, as in `max(x) - min(x)`."""
        if found := self._latest.get((connection.version, questions)):
            return found
        limits = {"max_series": self._section.max_series, "max_samples": self._section.max_samples}
        outside = self._section.external_labels
        found = read(connection, questions, **limits, external_labels=outside, patience=cancel)
        if sum(len(series.values) for series in itertools.chain(*found)) <= _KEPT_SAMPLES:
            kept = [one for one in self._latest.items() if one[0][0] == connection.version][1 - _KEPT_ANSWERS :]
            self._latest = {**dict(kept), (connection.version, questions): found}
        return found


def _is_disconnected(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
