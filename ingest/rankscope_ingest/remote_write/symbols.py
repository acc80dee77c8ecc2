"""The symbol table of a remote write 2.0 request, and the lists of references to its symbols.

Labels are pairs of references: name, value, name, value. The module decodes no message and stores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import WRITE_2_MESSAGES, parse

MAX_SYMBOLS: Final = 500_000
"""Maximum number of symbols of one request. Short symbols of this number take about 60 MB of memory."""

_KEY_CHARACTERS: Final = 131_072  # of one symbol
_KEY_REFERENCES: Final = 260  # of one series
"""Limits of the part of a series that is in its key.

Both exceed the limits of series that are stored (64 KiB of labels, 128 labels). Without them, the keys of a small
request could have gigabytes, because each series may refer to the same long symbol many times.
"""


class SymbolTable:
    """The symbols of one request.

    The constructor raises DecodeError if there are too many symbols, or if the first symbol is not the empty text, as
    the specification requires.
    """

    def __init__(self, symbols: Sequence[str]) -> None:
        if len(symbols) > MAX_SYMBOLS:
            raise DecodeError(f"the request has {len(symbols)} symbols; the limit is {MAX_SYMBOLS}")
        self._symbols = symbols[:]
        if self._symbols and self._symbols[0]:
            raise DecodeError("the first symbol of the request is not empty")
        # The length before each symbol makes the key of a list of symbols unambiguous.
        self._piece = [f"{len(symbol)}:{symbol[:_KEY_CHARACTERS]}" for symbol in self._symbols].__getitem__
        self._metadata: dict[bytes, bool] = {}

    def key(self, references: Sequence[int]) -> str:
        """Return a text that identifies the symbols at `references`, also in other requests.

        Raises DecodeError if a reference is invalid. The keys of different series that are too long to be stored may be
        equal.
        """
        try:
            return "".join(map(self._piece, references[:_KEY_REFERENCES]))
        except IndexError:
            raise self._missing(references) from None

    def labels(self, references: Sequence[int]) -> list[tuple[str, str]]:
        """Return the names and values of the labels at `references`.

        Raises DecodeError if a reference is invalid, or if the number of references is odd.
        """
        if len(references) % 2:
            raise DecodeError(f"a list of labels has {len(references)} references; their number must be even")
        try:
            found = [self._symbols[reference] for reference in references]
        except IndexError:
            raise self._missing(references) from None
        return list(zip(found[::2], found[1::2], strict=True))

    def has_metadata(self, data: bytes) -> bool:
        """Return whether the serialized message Metadata has a type, help or unit.

        Many series have the same metadata. Raises DecodeError if a reference is invalid.
        """
        if (found := self._metadata.get(data)) is None:
            metadata = parse("Metadata", data, WRITE_2_MESSAGES)
            references = (metadata.help_ref, metadata.unit_ref)
            if max(references) >= max(1, len(self._symbols)):
                raise self._missing(references)
            found = self._metadata[data] = bool(metadata.type or any(references))
        return found

    def _missing(self, references: Sequence[int]) -> DecodeError:
        return DecodeError(f"symbol {max(references)} does not exist: the request has {len(self._symbols)} symbols")
