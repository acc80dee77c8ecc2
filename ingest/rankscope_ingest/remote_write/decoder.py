"""Requests in, numbers of series with times and values out: by what is known of the series, else by the rules.

Nearly every message of a series ends in samples of a fixed form, behind labels that are known. So where messages end
is guessed from where such samples do, and the guess is proved: the lengths before the messages must lead from each to
the next, to the end of the request. Then labels are one slice and one look-up each, and numbers are read as columns.
A message of another form is read by the rules; a request that is not a chain of such messages is taken apart by them.

What is known of series is bounded, and senders go round and round: if the oldest went for the newest, one series too
many would have each gone before it comes again. So a full book keeps what it has, and only what was not seen for long
leaves it; those that find no room pass through a small book of their own, and are read by the rules where that is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.remote_write.reference_decoder import frames, read_series
from rankscope_ingest.remote_write.series_table import UNKNOWN, Numbers, SeriesTable

MOST_KNOWN: Final = 500_000
"""Series of usual length in the book: about 800 bytes each; one with long labels takes the room of several."""

_PASSING: Final = 8
"""One for so many of them may be known besides: those that found no room."""

_ROUNDS: Final = 4
"""A generation has so many messages for each place in the book, so that whatever is sent steadily is in each."""

_LONGEST_DAYS: Final = 62
_LATEST_MS: Final = 253_402_300_799_000  # the end of year 9999, as far as times are understood everywhere
_SERIES, _LABEL, _SAMPLE, _NUMBER, _TIME = 0x0A, 0x0A, 0x12, 0x09, 0x10
_WITH_VALUE, _WITHOUT_VALUE = 18, 9
"""Bytes of a sample: tag, length, value, and a time of six bytes (1971 to 2109); a value of 0 is left out."""

_NOT_KNOWN: Final = UNKNOWN - 1
_MOST_ROUNDS: Final = 64  # as many samples of one series as are read as columns

_PLACES: Final = np.arange(6)
_MORE: Final = np.array([0x80] * 5 + [0], np.uint8)

Values = npt.NDArray[np.float64]
Octets = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples of series that stand in one book."""

    book: SeriesTable
    numbers: Numbers
    times_ms: Numbers
    values: Values

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Return the samples of `parts`, which have one book."""
        return cls(
            book=parts[0].book,
            numbers=np.concatenate([part.numbers for part in parts]),
            times_ms=np.concatenate([part.times_ms for part in parts]),
            values=np.concatenate([part.values for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The samples of one request, by the book of their series; what was left out of it is counted."""

    parts: tuple[Part, ...]
    metadata: int = 0
    exemplars: int = 0
    histograms: int = 0
    oversized: int = 0
    repeated: int = 0

    @property
    def rows(self) -> int:
        """Return how many samples there are."""
        return sum(len(part.numbers) for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where the messages of a request begin and end."""

    begins: Numbers
    ends: Numbers


class WriteReader:
    """Reads requests, and remembers `most_known` series, and an eighth as many more. One thread at a time."""

    def __init__(self, most_known: int = MOST_KNOWN) -> None:
        self._most_known = most_known
        self._book = SeriesTable()
        self._passing = SeriesTable()
        self._messages = 0
        self._tidied_in = 0

    @property
    def is_to_tidy(self) -> bool:
        """Whether the next request has to wait until a full book was gone through, which takes a moment."""
        return self._book.size >= self._most_known and self._generation > self._tidied_in

    def read(self, data: bytes) -> Written:
        """Return what the request `data` brings. Raises DecodeError, and then nothing of it counts."""
        if self.is_to_tidy:
            self._tidy()
        data, chain, metadata = _messages(data)
        self._messages += len(chain.ends)
        parts, oversized, unknown = _known(data, chain, (self._book, self._passing))
        rest = _Rest(self._learner() if len(unknown.ends) else self._book)
        for begin, end in zip(unknown.begins.tolist(), unknown.ends.tolist(), strict=True):
            rest.take(data[begin:end])
        written = Written(
            parts=_with(parts, rest),
            metadata=metadata,
            exemplars=rest.exemplars,
            histograms=rest.histograms,
            oversized=oversized + rest.oversized,
        )
        _check_times(written.parts)
        fresh = replace(written, parts=tuple(_fresh(part, self._generation) for part in written.parts))
        return replace(fresh, repeated=written.rows - fresh.rows)

    @property
    def _generation(self) -> int:
        return self._messages // (_ROUNDS * self._most_known)

    def _tidy(self) -> None:
        """Make room by what was seen neither in this generation nor in the one before."""
        self._tidied_in = self._generation
        kept = self._book.seen_in.values >= self._generation - 1
        if np.count_nonzero(kept) < len(self._book):
            self._book = self._book.only(kept)  # who still holds rows of the former one keeps it alive

    def _learner(self) -> SeriesTable:
        """Return the book for a series that is not known."""
        if self._book.size < self._most_known:
            return self._book
        if self._passing.size * _PASSING >= self._most_known:
            self._passing = SeriesTable()
        return self._passing


def _check_times(parts: Sequence[Part]) -> None:
    """Raise DecodeError for times that cannot be, or that would make a file a day for years."""
    first = min((int(part.times_ms.min()) for part in parts), default=0)
    last = max((int(part.times_ms.max()) for part in parts), default=0)
    if first < 0 or last > _LATEST_MS:
        raise DecodeError("a sample has a time before 1970 or after 9999")
    if last - first > _LONGEST_DAYS * 86_400_000:
        raise DecodeError(f"samples of more than {_LONGEST_DAYS} days are in one request: send each month by itself")


def _messages(data: bytes) -> tuple[bytes, _Chain, int]:
    """Return where the messages of a request stand, in which bytes, and how many metrics it only describes."""
    chain = _guessed(np.frombuffer(data, np.uint8))
    if chain is not None:
        return data, chain, 0
    messages, metadata = frames(data)
    ends = np.cumsum([len(message) for message in messages], dtype=np.int64)
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
    return b"".join(messages), _Chain(begins, ends), metadata


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


def _known(data: bytes, chain: _Chain, books: Sequence[SeriesTable]) -> tuple[list[Part], int, _Chain]:
    """Return the samples of series that a book knows, how many were oversized, and the messages of other series."""
    parts, oversized = [], 0
    for book in books:
        if not len(chain.ends):
            break
        told, rounds = _by_known_labels(data, chain, book)
        samples = [_of_round(book, told[one.places], one) for one in reversed(rounds)]  # the oldest first
        parts.append(Part.joined(samples))
        oversized += sum(int(np.count_nonzero(told[one.places] == UNKNOWN)) for one in rounds)
        left = told == _NOT_KNOWN
        chain = _Chain(chain.begins[left], chain.ends[left])
    return parts, oversized, chain


def _of_round(book: SeriesTable, numbers: Numbers, one: _Round) -> Part:
    kept = numbers >= 0
    return Part(book=book, numbers=numbers[kept], times_ms=one.times_ms[kept], values=one.values[kept])


def _with(parts: Sequence[Part], rest: _Rest) -> tuple[Part, ...]:
    """Return `parts` that hold samples, with the rest in that of its book: each book is asked once what repeats."""
    if len(rest.numbers):
        more = [part for part in parts if part.book is rest.book] + [rest.part()]
        parts = [*(part for part in parts if part.book is not rest.book), Part.joined(more)]
    return tuple(part for part in parts if len(part.numbers))


@dataclass(frozen=True, slots=True)
class _Round:
    """One sample each of some messages."""

    places: Numbers
    times_ms: Numbers
    values: Values


def _by_known_labels(data: bytes, chain: _Chain, book: SeriesTable) -> tuple[Numbers, list[_Round]]:
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


def _behind_labels(message: bytes) -> int:
    """Return where the labels end that a message begins with, as far as they are short."""
    place = 0
    while place + 1 < len(message) and message[place] == _LABEL and message[place + 1] < 0x80:
        place += 2 + message[place + 1]
    return place if place <= len(message) else 0  # cut off, as the rules will say


class _Rest:
    """What is read by the rules."""

    def __init__(self, book: SeriesTable) -> None:
        self.book = book
        self.numbers: list[int] = []
        self.times_ms: list[int] = []
        self.values: list[float] = []
        self.exemplars = self.histograms = self.oversized = 0

    def take(self, message: bytes) -> None:
        behind = _behind_labels(message)
        one = read_series(message[behind:])
        number = self.book.learn(message[:behind] + one.labels)
        self.exemplars += one.exemplars
        self.histograms += one.histograms
        if number == UNKNOWN:
            self.oversized += len(one.values)
            return
        self.numbers += [number] * len(one.values)
        self.times_ms += one.times_ms
        self.values += one.values

    def part(self) -> Part:
        return Part(
            book=self.book,
            numbers=np.array(self.numbers, np.int64),
            times_ms=np.array(self.times_ms, np.int64),
            values=np.array(self.values, np.float64),
        )


def _fresh(part: Part, generation: int) -> Part:
    """Return `part` without samples that are the latest of their series already, with this very value."""
    book, bits = part.book, part.values.view(np.int64)
    latest_ms, latest_bits = book.latest_ms.values, book.latest_bits.values
    book.seen_in.values[part.numbers] = generation
    known_ms = latest_ms[part.numbers]
    repeated = (known_ms == part.times_ms) & (latest_bits[part.numbers] == bits)
    newer = part.times_ms >= known_ms
    latest_ms[part.numbers[newer]] = part.times_ms[newer]
    latest_bits[part.numbers[newer]] = bits[newer]
    if not repeated.any():
        return part
    kept = ~repeated
    return Part(book=book, numbers=part.numbers[kept], times_ms=part.times_ms[kept], values=part.values[kept])
