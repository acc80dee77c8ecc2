"""Decode remote write requests into samples, and drop samples that repeat the latest sample of their series.

google.protobuf parses the message. In version 1.0, one sender encodes the labels of a series as the same bytes in every
request; in version 2.0, the symbols of a series are joined to one text, which is the same in every request. The labels
are decoded once and then found in a cache by these bytes or this text. Compression is left to `base.protobuf`, HTTP and
tables to `handler`.

In version 2.0, labels are pairs of references to the symbol table: name, value, name, value.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google.protobuf.unknown_fields import UnknownFieldSet

from rankscope_contract.model.redaction import MAX_LABEL, redacted_name
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.protobuf import MESSAGES, WRITE_2_MESSAGES, label_bytes, parse
from rankscope_ingest.scrape.discovery import INSTANCE

MAX_SYMBOLS: Final = 500_000
"""Maximum number of symbols of one request. Short symbols of this number take about 60 MB of memory."""

_KEY_CHARACTERS: Final = 131_072  # of one symbol
_KEY_REFERENCES: Final = 260  # of one series
"""Limits of the part of a series that is in its key.

Both exceed the limits of series that are stored (64 KiB of labels, 128 labels). Without them, the keys of a small
request could have gigabytes, because each series may refer to the same long symbol many times.
"""

MAX_KNOWN_SERIES: Final = 500_000
"""Capacity of the cache of series.

A series with less than 256 bytes of labels counts as one and takes about 800 bytes of memory. A series with longer
labels counts several times.
"""

_BYTES_PER_SERIES: Final = 256  # of labels; a series with longer labels counts several times
_SWEEP_ROUNDS: Final = 4
"""Number of series to receive between two sweeps of a full cache, as a multiple of its capacity.

It is sufficient for every active series to be received in between.
"""

_MAX_LABELS: Final = 128
_MAX_LABEL_BYTES: Final = 65_536
_MAX_DAYS: Final = 62
_MAX_TIME_MS: Final = 253_402_300_799_000  # the end of year 9999, the latest time of Python and Arrow dates
_NEVER_MS: Final = -(1 << 63)
_LAST_FIELD: Final = 4  # of a TimeSeries in remote write 1.0
_LAST_FIELD_2: Final = 5  # of a Request in remote write 2.0
_METRIC_NAME: Final = "__name__"


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


@dataclass(slots=True, eq=False)
class KnownSeries:
    """One series: the values of its columns in `samples`, and its latest sample, which detects repeated samples.

    `labels` is sorted JSON without the metric name and without the label `instance`, which becomes the column `target`.
    """

    target: str
    metric: str
    labels: str | None
    latest_ms: int = _NEVER_MS
    latest_value: float = 0.0
    received_at: int = 0  # number of received series, of all requests, when it was last received


_OVERSIZED: Final = KnownSeries("", "", None)
"""A placeholder for every series that is not stored because it has too many or too long labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRequest:
    """The samples of one request, and the numbers of dropped items by reason, the label of their counter."""

    series: Sequence[KnownSeries]
    times_ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    dropped: Counter[str]
    repeats: Sequence[tuple[KnownSeries, int]]
    """Series and times of the samples that repeat the latest sample of their series, and are not in `series`."""

    @property
    def rows(self) -> int:
        """Return the number of samples of this request."""
        return len(self.series)

    @property
    def written(self) -> int:
        """Return the number of samples that are in the store after the commit.

        Repeated samples are included, because they are stored already, or are committed before or with this request.
        """
        return len(self.series) + len(self.repeats)

    def forget(self) -> frozenset[tuple[KnownSeries, int]]:
        """Note that these samples are not stored, so that they are not dropped when they are received again.

        Returns their series and times.
        """
        lost = frozenset(zip(self.series, self.times_ms.tolist(), strict=True))
        for one, ms in lost:
            if one.latest_ms == ms:
                one.latest_ms = _NEVER_MS
        return lost


class WriteReader:
    """Decoder of remote write requests with a bounded cache of series. Calls must not overlap.

    When the cache is full, new series are decoded at each request until inactive series are removed. Evicting the
    oldest entries would be worse. Senders send all series in turn, so with one series more than the capacity, every
    entry would be evicted before it is used again.
    """

    def __init__(self, max_known_series: int = MAX_KNOWN_SERIES) -> None:
        self._max_known = max_known_series
        self._by_head: dict[bytes | str, KnownSeries] = {}  # bytes: version 1.0; text: version 2.0
        self._by_identity: dict[tuple[str, str, str | None], KnownSeries] = {}
        self._used = 0  # capacity in use, in the unit of MAX_KNOWN_SERIES
        self._received = 0  # series, over all requests
        self._swept_at = 0

    def read(self, data: bytes) -> DecodedRequest:
        """Return the samples of the serialized request `data` of remote write 1.0.

        Raises DecodeError if the request is invalid; the cache of series is then not changed.
        """
        request = parse("WriteRequest", data)
        if unknown := UnknownFieldSet(request):
            number = unknown[0].field_number
            raise DecodeError(f"field {number} does not exist in remote write 1.0 (prometheus.WriteRequest)")
        dropped = Counter(metadata=len(request.metadata))
        return self._decoded(len(request.timeseries), self._received_series(request, dropped), dropped)

    def read_2(self, data: bytes, max_label_bytes: int) -> DecodedRequest:
        """Return the samples of the serialized request `data` of remote write 2.0.

        Raises DecodeError if the request is invalid, or if the labels of all its series have more than
        `max_label_bytes`. In such a request, a few symbols occur in very many series.
        """
        request = parse("Request", data, WRITE_2_MESSAGES)
        _check_fields_2(request)
        dropped: Counter[str] = Counter()
        received = self._received_series_2(request, SymbolTable(request.symbols), max_label_bytes, dropped)
        return self._decoded(len(request.timeseries), received, dropped)

    def _received_series(self, request: Any, dropped: Counter[str]) -> Iterator[tuple[KnownSeries, Sequence[Any]]]:
        known = self._by_head.get
        for received in request.timeseries:
            samples = received.samples[:]
            received.ClearField("samples")
            head = received.SerializeToString()  # the other fields, which are unknown fields of this message
            yield known(head) or self._learn(head, dropped), samples

    def _received_series_2(
        self, request: Any, symbols: SymbolTable, max_label_bytes: int, dropped: Counter[str]
    ) -> Iterator[tuple[KnownSeries, Sequence[Any]]]:
        known, size = self._by_head.get, 0
        for received in request.timeseries:
            references = received.labels_refs
            key = symbols.key(references)
            if (size := size + len(key)) > max_label_bytes:
                raise DecodeError(
                    f"the labels of all series have more than {max_label_bytes} bytes: send fewer series per request"
                )
            one = known(key) or self._learn_2(key, symbols.labels(references))
            dropped["metadata"] += symbols.has_metadata(received.metadata)
            dropped["histogram"] += len(received.histograms)
            for exemplar in received.exemplars:
                symbols.labels(exemplar.labels_refs)
                dropped["exemplar"] += 1
            yield one, received.samples

    def _decoded(
        self, count: int, received: Iterable[tuple[KnownSeries, Sequence[Any]]], dropped: Counter[str]
    ) -> DecodedRequest:
        """Return the request with the samples of `count` series, without those that repeat the latest of their series.

        `dropped` has the numbers of items that are not stored, which rise while `received` is read. Raises DecodeError
        if a time is invalid.
        """
        if self._used >= self._max_known and self._received - self._swept_at >= _SWEEP_ROUNDS * self._max_known:
            self._sweep()
        self._received += count
        series: list[KnownSeries] = []
        times: list[int] = []
        values: list[float] = []
        for one, samples in received:
            if one is _OVERSIZED:
                dropped["oversized"] += len(samples)
                continue
            one.received_at = self._received
            for sample in samples:
                series.append(one)
                times.append(sample.timestamp)
                values.append(sample.value)
        if times:
            _check_times(min(times), max(times))
        repeated = _repeated(series, times, values)
        repeats = [(series[place], times[place]) for place in repeated]
        if repeated:
            kept = [place for place in range(len(series)) if place not in repeated]
            series = [series[place] for place in kept]
            times, values = [times[place] for place in kept], [values[place] for place in kept]
        return DecodedRequest(
            series=series,
            times_ms=np.array(times, np.int64),
            values=np.array(values, np.float64),
            repeats=repeats,
            dropped=dropped + Counter(repeated=len(repeats)),
        )

    def _learn(self, head: bytes, dropped: Counter[str]) -> KnownSeries:
        """Return the series whose labels are serialized in `head`, and count its exemplars and histograms in `dropped`.

        The series is added to the cache if there is capacity. The key in the cache excludes exemplars and histograms,
        which change. Raises DecodeError if `head` is malformed.
        """
        fields = parse("SeriesHead", head)
        for unknown in UnknownFieldSet(fields):
            if unknown.field_number <= _LAST_FIELD:  # fields of later versions of the protocol have higher numbers
                raise DecodeError(
                    f"field {unknown.field_number} of a TimeSeries has the unexpected wire type {unknown.wire_type}"
                )
        if fields.exemplars or fields.histograms:
            dropped.update(exemplar=len(fields.exemplars), histogram=len(fields.histograms))
            fields.ClearField("exemplars")
            fields.ClearField("histograms")
            head = fields.SerializeToString()
        if (one := self._by_head.get(head)) is not None:
            return one
        if len(fields.labels) > _MAX_LABELS or len(head) > _MAX_LABEL_BYTES:
            return _OVERSIZED
        return self._add(head, _pairs(fields.labels))

    def _learn_2(self, key: str, labels: Sequence[tuple[str, str]]) -> KnownSeries:
        """Return the series with these labels of version 2.0, whose symbols are joined in `key`.

        Raises DecodeError if the labels are not sorted by name, or if a name occurs twice.
        """
        for (one, _), (following, _) in itertools.pairwise(labels):
            if one >= following:
                why = f"has the label {one[:100]!r} twice"
                if one > following:
                    why = f"has labels that are not sorted: {one[:100]!r} comes before {following[:100]!r}"
                raise DecodeError(f"a series {why}")
        # A key has at most 12 characters per label that are not part of its text.
        is_long = len(labels) > _MAX_LABELS or len(key) > 2 * _MAX_LABEL_BYTES or _size(labels) > _MAX_LABEL_BYTES
        return _OVERSIZED if is_long else self._add(key, labels)

    def _add(self, key: bytes | str, labels: Iterable[tuple[str, str]]) -> KnownSeries:
        """Return the series with `labels`, and add it to the cache if there is capacity."""
        identity = _identity(labels)
        one = self._by_identity.get(identity) or KnownSeries(*identity)
        if self._used < self._max_known:
            self._by_head[key] = self._by_identity[identity] = one
            self._used += 1 + len(key) // _BYTES_PER_SERIES
        return one

    def _sweep(self) -> None:
        """Remove from the cache all series that were not received since the last sweep."""
        oldest, self._swept_at = self._swept_at, self._received
        self._by_head = {key: one for key, one in self._by_head.items() if one.received_at > oldest}
        self._by_identity = {key: one for key, one in self._by_identity.items() if one.received_at > oldest}
        self._used = sum(1 + len(key) // _BYTES_PER_SERIES for key in self._by_head)


def _check_fields_2(request: Any) -> None:
    """Raise DecodeError if a request of version 2.0 has a reserved field, or a field with a wrong wire type.

    A reserved field is one of version 1.0. Fields of later minor versions have higher numbers and are ignored.
    """
    for unknown in UnknownFieldSet(request):
        if unknown.field_number <= _LAST_FIELD_2:
            raise DecodeError(
                f"field {unknown.field_number} with wire type {unknown.wire_type} does not exist in remote write 2.0"
                " (io.prometheus.write.v2.Request)"
            )


def _size(labels: Sequence[tuple[str, str]]) -> int:
    """Return the number of bytes that the labels have in version 1.0: both versions have the same limit."""
    size: int = MESSAGES["SeriesHead"](labels=[label_bytes(*label) for label in labels]).ByteSize()
    return size


def _pairs(labels: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    for data in labels:
        label: Any = parse("Label", data)
        yield label.name, label.value


def _identity(labels: Iterable[tuple[str, str]]) -> tuple[str, str, str | None]:
    """Return (target, metric, other labels as JSON) of a series; labels with an empty value are dropped.

    Raises DecodeError if a label has no name or occurs twice, or if there is no metric name.
    """
    found: dict[str, str] = {}
    for name, value in labels:
        if not name:
            raise DecodeError(f"a label with the value {value[:100]!r} has no name")
        if name in found:
            raise DecodeError(f"a series has the label {name[:100]!r} twice")
        found[name] = value
    found = {name: value for name, value in found.items() if value}
    metric = found.pop(_METRIC_NAME, "")
    if not metric:
        raise DecodeError(f"a series has no label {_METRIC_NAME}: {str(found)[:200]}")
    return redacted_name(found.pop(INSTANCE, ""), MAX_LABEL), redacted_name(metric), canonical_labels(found)


def _check_times(first_ms: int, last_ms: int) -> None:
    """Raise DecodeError if a time is before 1970 or after 9999, or if the times are more than 62 days apart.

    The store writes a separate file for each day, so such a request would write too many files.
    """
    if first_ms < 0 or last_ms > _MAX_TIME_MS:
        raise DecodeError("a sample has a time before 1970 or after 9999")
    if last_ms - first_ms > _MAX_DAYS * 86_400_000:
        raise DecodeError(
            f"the samples of one request are more than {_MAX_DAYS} days apart: send one request for each month"
        )


def _repeated(series: Sequence[KnownSeries], times: Sequence[int], values: Sequence[float]) -> set[int]:
    """Return the positions of samples that are equal to the latest sample of their series.

    The latest sample of each series is updated.
    """
    repeated = set()
    for place, (one, ms, value) in enumerate(zip(series, times, values, strict=True)):
        if ms > one.latest_ms:
            one.latest_ms, one.latest_value = ms, value
        elif ms == one.latest_ms:
            if struct.pack("<d", value) == struct.pack("<d", one.latest_value):  # by bits: NaN has several values
                repeated.add(place)
            one.latest_value = value
    return repeated
