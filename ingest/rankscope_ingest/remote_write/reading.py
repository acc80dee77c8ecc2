"""Requests in, numbers of series with times and values out: by what is known of the series, else by the rules.

Nearly every message of a series ends in samples of a fixed form, behind labels that are known. So where messages end
is guessed from where such samples do, and the guess is proved: the lengths before the messages must lead from each to
the next, to the end of the request. Then labels are one slice and one look-up each, and numbers are read as columns.
A message of another form is read by the rules; a request that is not a chain of such messages is taken apart by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope_ingest.errors import DecodeError
from rankscope_ingest.remote_write.exact import frames, read_series
from rankscope_ingest.remote_write.series import UNTOLD, Numbers, SeriesBook

MOST_KNOWN: Final = 500_000
"""Series in a book: about half a kilobyte each."""

_LONGEST_DAYS: Final = 62
_LATEST_MS: Final = 253_402_300_799_000  # the end of year 9999, as far as times are understood everywhere
_SERIES, _SAMPLE, _NUMBER, _TIME = 0x0A, 0x12, 0x09, 0x10
_WITH_VALUE, _WITHOUT_VALUE = 18, 9
"""Bytes of a sample: tag, length, value, and a time of six bytes (1971 to 2109); a value of 0 is left out."""

_NOT_KNOWN: Final = UNTOLD - 1
_MOST_ROUNDS: Final = 64  # as many samples of one series as are read as columns

_PLACES: Final = np.arange(6)
_MORE: Final = np.array([0x80] * 5 + [0], np.uint8)

Values = npt.NDArray[np.float64]
Octets = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The samples of one request; what was left out of it is counted."""

    book: SeriesBook
    numbers: Numbers
    times_ms: Numbers
    values: Values
    metadata: int = 0
    exemplars: int = 0
    histograms: int = 0
    oversized: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where the messages of a request begin and end."""

    begins: Numbers
    ends: Numbers


class WriteReader:
    """Reads requests, and remembers series. One thread at a time."""

    def __init__(self, most_known: int = MOST_KNOWN) -> None:
        self._most_known = most_known
        self._book = SeriesBook()

    def read(self, data: bytes) -> Written:
        """Return what the request `data` brings. Raises DecodeError, and then nothing of it counts."""
        if len(self._book) >= self._most_known:
            self._book = SeriesBook()  # who still holds rows of the former one keeps it alive
        chain = _guessed(np.frombuffer(data, np.uint8))
        metadata = 0
        if chain is None:
            messages, metadata = frames(data)
            ends = np.cumsum([len(message) for message in messages], dtype=np.int64)
            data = b"".join(messages)
            chain = _Chain(np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)], ends)
        written = _samples(data, chain, self._book, metadata)
        _check_times(written.times_ms)
        return _fresh(written)


def _check_times(times: Numbers) -> None:
    """Raise DecodeError for times that cannot be, or that would make a file a day for years."""
    first, last = (int(times.min()), int(times.max())) if len(times) else (0, 0)
    if first < 0 or last > _LATEST_MS:
        raise DecodeError("a sample has a time before 1970 or after 9999")
    if last - first > _LONGEST_DAYS * 86_400_000:
        raise DecodeError(f"samples of more than {_LONGEST_DAYS} days are in one request: send each month by itself")


def _guessed(octets: Octets) -> _Chain | None:
    """Return the messages, if all end in a sample of the usual form, and prove to be the whole request."""
    tags = np.flatnonzero(octets[: max(0, len(octets) - _WITHOUT_VALUE + 1)] == _SAMPLE)
    lengths = octets[tags + 1].astype(np.int64)
    usual = (lengths == _WITH_VALUE - 2) | (lengths == _WITHOUT_VALUE - 2)
    ends = np.unique((tags + 2 + lengths)[usual])  # what looks like a sample may lie within one, and end with it
    ends = ends[ends <= len(octets)]
    if not len(ends) or ends[-1] != len(octets):
        return None
    ends = ends[np.append(octets[ends[:-1]] == _SERIES, True)]
    ends = ends[octets[ends - 7] == _TIME]
    if not len(ends) or ends[-1] != len(octets):
        return None
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    low = octets[begins + 1].astype(np.int64)
    high = octets[begins + 2].astype(np.int64)
    is_long = low >= 0x80
    size = np.where(is_long, (low & 0x7F) | (high << 7), low)
    begins_of_messages = begins + 2 + is_long
    proved = (octets[begins] == _SERIES) & ~(is_long & (high >= 0x80)) & (begins_of_messages + size == ends)
    return _Chain(begins_of_messages, ends) if proved.all() else None


def _samples(data: bytes, chain: _Chain, book: SeriesBook, metadata: int) -> Written:
    told, rounds = _by_known_labels(data, chain, book)
    rest = _Rest(book)
    for place in np.flatnonzero(told == _NOT_KNOWN).tolist():
        rest.take(data[chain.begins[place] : chain.ends[place]])
    of_rounds = [_Round(told[one.places], one.times_ms, one.values) for one in reversed(rounds)]  # the oldest first
    kept = [one.places >= 0 for one in of_rounds]
    oversized = sum(int(np.count_nonzero(one.places == UNTOLD)) for one in of_rounds)
    return Written(
        book=book,
        numbers=_joined([one.places[those] for one, those in zip(of_rounds, kept, strict=True)], rest.numbers),
        times_ms=_joined([one.times_ms[those] for one, those in zip(of_rounds, kept, strict=True)], rest.times_ms),
        values=np.concatenate([*(one.values[those] for one, those in zip(of_rounds, kept, strict=True)), rest.values]),
        metadata=metadata,
        exemplars=rest.exemplars,
        histograms=rest.histograms,
        oversized=rest.oversized + oversized,
    )


def _joined(parts: list[Numbers], rest: list[int]) -> Numbers:
    return np.concatenate([*parts, np.array(rest, np.int64)])


@dataclass(frozen=True, slots=True)
class _Round:
    """One sample each of some messages."""

    places: Numbers
    times_ms: Numbers
    values: Values


def _by_known_labels(data: bytes, chain: _Chain, book: SeriesBook) -> tuple[Numbers, list[_Round]]:
    """Return the number of each message's series, and the samples behind its labels, the last of each first.

    Samples are taken off the ends of messages until what is left are labels that are known. Only then they count.
    """
    octets = np.frombuffer(data, np.uint8)
    numbers = np.full(len(chain.ends), _NOT_KNOWN, np.int64)
    rounds: list[_Round] = []
    places, ends = np.arange(len(chain.ends)), chain.ends
    number_of = book.number_of
    while len(places) and len(rounds) < _MOST_ROUNDS:
        begins = chain.begins[places]
        sizes, times, values = _last_samples(octets, begins, ends)
        if not sizes.all():
            usual = sizes > 0
            places, begins, ends, sizes = places[usual], begins[usual], ends[usual], sizes[usual]
            times, values = times[usual], values[usual]
        rounds.append(_Round(places, times, values))
        ends = ends - sizes
        bounds = zip(begins.tolist(), ends.tolist(), strict=True)
        found = [number_of(data[begin:end], _NOT_KNOWN) for begin, end in bounds]
        numbers[places] = found
        left = numbers[places] == _NOT_KNOWN
        places, ends = places[left], ends[left]
    return numbers, rounds


def _last_samples(octets: Octets, begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers, Values]:
    """Return the bytes of the sample in which each message ends, 0 where that is of no usual form; and what it says."""
    if len(octets) < _WITHOUT_VALUE:
        return np.zeros_like(ends), np.zeros_like(ends), np.zeros(len(ends), np.float64)
    room = ends - begins

    def back(count: int) -> Octets:
        return octets[np.maximum(ends - count, 0)]

    times = octets[np.maximum(ends[:, None] - 6, 0) + _PLACES]
    ends_in_time = (back(7) == _TIME) & ((times & 0x80) == _MORE).all(axis=1)
    with_value = ends_in_time & (room >= _WITH_VALUE) & (back(16) == _NUMBER)
    with_value &= (back(18) == _SAMPLE) & (back(17) == _WITH_VALUE - 2)
    without = ends_in_time & ~with_value & (room >= _WITHOUT_VALUE)
    without &= (back(9) == _SAMPLE) & (back(8) == _WITHOUT_VALUE - 2)
    sizes = np.where(with_value, _WITH_VALUE, np.where(without, _WITHOUT_VALUE, 0))
    values = np.zeros(len(ends), np.float64)
    eight = octets[(ends[with_value] - 15)[:, None] + np.arange(8)]
    values[with_value] = np.ascontiguousarray(eight).view("<f8").ravel()
    return sizes, ((times & 0x7F).astype(np.int64) << (7 * _PLACES)).sum(axis=1), values


class _Rest:
    """What is read by the rules."""

    def __init__(self, book: SeriesBook) -> None:
        self._book = book
        self.numbers: list[int] = []
        self.times_ms: list[int] = []
        self.values: list[float] = []
        self.exemplars = self.histograms = self.oversized = 0

    def take(self, message: bytes) -> None:
        one = read_series(message)
        number = self._book.learn(one.labels)
        self.exemplars += one.exemplars
        self.histograms += one.histograms
        if number == UNTOLD:
            self.oversized += len(one.values)
            return
        self.numbers += [number] * len(one.values)
        self.times_ms += one.times_ms
        self.values += one.values


def _fresh(written: Written) -> Written:
    """Return `written` without samples that are the latest of their series already, with this very value."""
    book, bits = written.book, written.values.view(np.int64)
    latest_ms, latest_bits = book.latest_ms.values, book.latest_bits.values
    known_ms = latest_ms[written.numbers]
    repeated = (known_ms == written.times_ms) & (latest_bits[written.numbers] == bits)
    newer = written.times_ms >= known_ms
    latest_ms[written.numbers[newer]] = written.times_ms[newer]
    latest_bits[written.numbers[newer]] = bits[newer]
    if not repeated.any():
        return written
    kept = ~repeated
    return replace(
        written,
        numbers=written.numbers[kept],
        times_ms=written.times_ms[kept],
        values=written.values[kept],
        repeated=int(np.count_nonzero(repeated)),
    )
