"""The series that were ever written: known again by the bytes of their labels, and named by a small number since.

Labels of a series are the same bytes in every request of one sender, so that they are understood once, and found by a
look into a dictionary from then on. A book only grows: whoever keeps it begins a new one when it is full.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.records import canonical_labels
from rankscope_ingest.errors import DecodeError
from rankscope_ingest.exposition.targets import INSTANCE
from rankscope_ingest.remote_write.exact import read_labels

Numbers = npt.NDArray[np.int64]

UNTOLD: Final = -1
"""In place of a number: labels beyond what is taken."""

_NAME: Final = "__name__"
_MOST_LABELS: Final = 128
_MOST_BYTES: Final = 65_536
_NO_TIME: Final = np.iinfo(np.int64).min


class SeriesBook:
    """Numbers of series, from 0, and the columns that they have in `samples`. One thread at a time adds."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._by_labels: dict[tuple[str, str, str | None], int] = {}
        self.number_of = self._numbers.get
        self.targets, self.metrics, self.labels = _Column(), _Column(), _Column()
        self.latest_ms = _Growing(_NO_TIME)
        self.latest_bits = _Growing(0)

    def __len__(self) -> int:
        """Return how many ways to say a series are known."""
        return len(self._numbers)

    def learn(self, labels: bytes) -> int:
        """Return the number of a series by the label fields of its message; UNTOLD beyond what is taken.

        Raises DecodeError for labels that cannot be.
        """
        number = self._numbers.get(labels)
        if number is None:
            number = UNTOLD if len(labels) > _MOST_BYTES else self._learn(dict_of(labels))
            if len(labels) <= _MOST_BYTES:
                self._numbers[labels] = number
        return number

    def _learn(self, labels: dict[str, str]) -> int:
        if len(labels) > _MOST_LABELS:
            return UNTOLD
        metric = labels.pop(_NAME, "")
        if not metric:
            raise DecodeError(f"a series has no {_NAME}: {str(labels)[:200]}")
        key = (labels.pop(INSTANCE, ""), metric, canonical_labels(labels))
        number = self._by_labels.setdefault(key, len(self._by_labels))
        if number == len(self.metrics):
            for column, text in zip((self.targets, self.metrics, self.labels), key, strict=True):
                column.add(text)
            self.latest_ms.add()
            self.latest_bits.add()
        return number


def dict_of(labels: bytes) -> dict[str, str]:
    """Return the labels that have a value: one without is none. Raises DecodeError where a name is empty or doubled."""
    found: dict[str, str] = {}
    for name, value in read_labels(labels):
        if not name:
            raise DecodeError(f"a label has no name, only the value {value[:100]!r}")
        if name in found:
            raise DecodeError(f"a series has the label {name[:100]!r} twice")
        found[name] = value
    return {name: value for name, value in found.items() if value}


class _Growing:
    """Integers, one for each series."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._values: Numbers = np.full(1024, first, np.int64)
        self._count = 0

    def add(self, value: int | None = None) -> None:
        if self._count == len(self._values):
            self._values = np.concatenate([self._values, np.full_like(self._values, self._first)])
        if value is not None:
            self._values[self._count] = value
        self._count += 1

    @property
    def values(self) -> Numbers:
        """Return all of them; whoever sets one sets it here."""
        return self._values[: self._count]


class _Column:
    """A text for each series, of which few are different. Another thread may read what it knows to be there."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._texts: list[str] = []
        self._of_series = _Growing(UNTOLD)
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

    def of(self, numbers: Numbers) -> pa.DictionaryArray:
        """Return the texts of series, in a dictionary that has no others: the store sorts it at every flush."""
        codes, places = np.unique(self._of_series.values[numbers], return_inverse=True)
        absent = int(codes[0] == UNTOLD) if len(codes) else 0
        if len(codes) and codes[-1] >= len(self._array):
            self._array = pa.array(self._texts, pa.string())
        indices = pa.array((places - absent).astype(np.int32), mask=(places < absent) if absent else None)
        return pa.DictionaryArray.from_arrays(indices, self._array.take(pa.array(codes[absent:])))
