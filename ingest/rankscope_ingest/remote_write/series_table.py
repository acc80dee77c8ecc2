"""The series that were ever written: known again by the bytes of their labels, and named by a small number since.

Labels of a series are the same bytes in every request of one sender, so that they are understood once, and found by a
look into a dictionary from then on. A book only grows, as rows that wait for a commit are numbers in it: whoever keeps
it goes on with a smaller one, of the series that were seen lately, when it is full.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.remote_write.reference_decoder import read_labels
from rankscope_ingest.scrape.discovery import INSTANCE

Numbers = npt.NDArray[np.int64]
Kept = npt.NDArray[np.bool_]

UNKNOWN: Final = -1
"""In place of a number: labels beyond what is taken."""

_NAME: Final = "__name__"
_MOST_LABELS: Final = 128
_MOST_BYTES: Final = 65_536
_USUAL_BYTES: Final = 256  # of labels; a series with more takes the room of several
_LONGEST_SHORT: Final = 0x7F  # bytes whose number is one byte itself
_NAME_TAG, _VALUE_TAG = 0x0A, 0x12
_NO_TIME: Final = np.iinfo(np.int64).min


class SeriesTable:
    """Numbers of series, from 0, and the columns that they have in `samples`. One thread at a time adds."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._by_labels: dict[tuple[str, str, str | None], int] = {}
        self.number_of = self._numbers.get
        self.targets, self.metrics, self.labels = _Column(), _Column(), _Column()
        self.latest_ms = _Growing(_NO_TIME)
        self.latest_bits = _Growing(0)
        self.seen_in = _Growing(0)
        self.size = 0
        """How much room is taken, in series of usual length: about 800 bytes each."""

    def __len__(self) -> int:
        """Return how many ways to say a series are known."""
        return len(self._numbers)

    def only(self, kept: Kept) -> SeriesTable:
        """Return a book of the series that are `kept`, with all that is known of them; this one stays as it is."""
        places = np.where(kept, np.cumsum(kept) - 1, UNKNOWN).tolist()
        book = SeriesTable()
        for labels, number in self._numbers.items():
            if number != UNKNOWN and places[number] != UNKNOWN:
                book._remember(labels, places[number])
        numbers = self._by_labels.items()
        book._by_labels.update((key, places[number]) for key, number in numbers if places[number] != UNKNOWN)
        book.targets, book.metrics, book.labels = (one.only(kept) for one in (self.targets, self.metrics, self.labels))
        book.latest_ms, book.latest_bits = self.latest_ms.only(kept), self.latest_bits.only(kept)
        book.seen_in = self.seen_in.only(kept)
        return book

    def learn(self, labels: bytes) -> int:
        """Return the number of a series by the label fields of its message; UNTOLD beyond what is taken.

        Raises DecodeError for labels that cannot be.
        """
        number = self._numbers.get(labels)
        if number is None:
            number = UNKNOWN if len(labels) > _MOST_BYTES else self._learn(dict_of(labels))
            if len(labels) <= _MOST_BYTES:
                self._remember(labels, number)
        return number

    def _remember(self, labels: bytes, number: int) -> None:
        self._numbers[labels] = number
        self.size += 1 + len(labels) // _USUAL_BYTES

    def _learn(self, labels: dict[str, str]) -> int:
        if len(labels) > _MOST_LABELS:
            return UNKNOWN
        metric = labels.pop(_NAME, "")
        if not metric:
            raise DecodeError(f"a series has no {_NAME}: {str(labels)[:200]}")
        key = (labels.pop(INSTANCE, ""), metric, canonical_labels(labels))
        number = self._by_labels.setdefault(key, len(self._by_labels))
        if number == len(self.metrics):
            for column, text in zip((self.targets, self.metrics, self.labels), key, strict=True):
                column.add(text)
            for one in (self.latest_ms, self.latest_bits, self.seen_in):
                one.add()
        return number


def dict_of(labels: bytes) -> dict[str, str]:
    """Return the labels that have a value: one without is none. Raises DecodeError where a name is empty or doubled."""
    usual = _usual_labels(labels)
    if usual is not None:
        return usual
    found: dict[str, str] = {}
    for name, value in read_labels(labels):
        if not name:
            raise DecodeError(f"a label has no name, only the value {value[:100]!r}")
        if name in found:
            raise DecodeError(f"a series has the label {name[:100]!r} twice")
        found[name] = value
    return _with_value(found)


def _usual_labels(data: bytes) -> dict[str, str] | None:
    """Return labels of the form in which they nearly always are: a name, a value, both short; None for any other."""
    found: dict[str, str] = {}
    place = 0
    try:
        while place < len(data):
            size = data[place + 1]
            middle = place + 4 + data[place + 3]
            end = middle + 2 + data[middle + 1]
            is_usual = data[place] == data[place + 2] == _NAME_TAG and data[middle] == _VALUE_TAG
            if not is_usual or size > _LONGEST_SHORT or end != place + 2 + size:
                return None
            name = data[place + 4 : middle].decode()
            if not name or name in found:
                return None
            found[name] = data[middle + 2 : end].decode()
            place = end
    except (IndexError, UnicodeDecodeError):
        return None
    return _with_value(found) if place == len(data) else None


def _with_value(labels: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if value}


class _Growing:
    """Integers, one for each series."""

    def __init__(self, first: int, values: Numbers | None = None) -> None:
        room: Numbers = np.full(1024, first, np.int64)
        self._first = first
        self._values = room if values is None else np.concatenate([values, room])
        self._count = 0 if values is None else len(values)

    def add(self, value: int | None = None) -> None:
        if self._count == len(self._values):
            self._values = np.concatenate([self._values, np.full_like(self._values, self._first)])
        if value is not None:
            self._values[self._count] = value
        self._count += 1

    def only(self, kept: Kept) -> _Growing:
        """Return those that are `kept`, with room for more."""
        return _Growing(self._first, self.values[kept])

    @property
    def values(self) -> Numbers:
        """Return all of them; whoever sets one sets it here."""
        return self._values[: self._count]


class _Column:
    """A text for each series, of which few are different. Another thread may read what it knows to be there."""

    def __init__(self, texts: Iterable[str] = (), of_series: Numbers | None = None) -> None:
        self._texts = list(texts)
        self._codes = {text: code for code, text in enumerate(self._texts)}
        self._of_series = _Growing(UNKNOWN, of_series)
        self._array = pa.array([], pa.string())

    def __len__(self) -> int:
        return len(self._of_series.values)

    def add(self, text: str | None) -> None:
        """Take the text of the next series."""
        if text is None:
            self._of_series.add()
            return
        code = self._codes.setdefault(text, len(self._texts))
        if code == len(self._texts):
            self._texts.append(text)
        self._of_series.add(code)

    def only(self, kept: Kept) -> _Column:
        """Return the column of the series that are `kept`, without the texts of others."""
        codes, places = np.unique(self._of_series.values[kept], return_inverse=True)
        absent = int(codes[0] == UNKNOWN) if len(codes) else 0
        return _Column([self._texts[code] for code in codes[absent:].tolist()], places - absent)

    def of(self, numbers: Numbers) -> pa.DictionaryArray:
        """Return the texts of series, in a dictionary that has no others: the store sorts it at every flush."""
        codes, places = np.unique(self._of_series.values[numbers], return_inverse=True)
        absent = int(codes[0] == UNKNOWN) if len(codes) else 0
        if len(codes) and codes[-1] >= len(self._array):
            self._array = pa.array(self._texts, pa.string())
        indices = pa.array((places - absent).astype(np.int32), mask=(places < absent) if absent else None)
        return pa.DictionaryArray.from_arrays(indices, self._array.take(pa.array(codes[absent:])))
