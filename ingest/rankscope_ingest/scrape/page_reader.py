"""Parse exporter pages into samples. If possible, only the numbers of a page are parsed.

The layout of a page is all its bytes except the numbers. A layout is cached for each target. If a new page of the
target has the same layout, only its numbers are parsed, together with those of other pages. Otherwise, the page is
parsed completely. The module is not thread-safe. Memory is bounded by the size of the pages of the current targets: the
layout of a removed target is deleted.

A layout is derived from a page that was parsed exactly. It contains the comments, too. It is used for a later page only
if all these bytes are equal and each series has a plain number. Any difference, such as another series, a time or an
exemplar, requires exact parsing. Spaces and escapes in labels are part of the compared bytes and need no parsing. NumPy
and Arrow do the work and release the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.redaction import redacted_name
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.scrape.exposition_parser import Sample, parse_exactly

_NEWLINE: Final = 10
_LONGEST_NAN: Final = 4  # "-NaN"; Arrow also accepts nan(7), as C does, which no exposition format allows
_EVERY_OTHER: Final = 0b0101_0101
_OF_A_BYTE: Final = 4  # that many bits are set in it
_WORD: Final = 8  # bytes
_VIEW: Final = np.dtype([("length", "<i4"), ("prefix", "<u4"), ("buffer", "<i4"), ("offset", "<i4")])
_VIEW_BYTES: Final = 12
"""Maximum size in bytes of a text that Arrow stores inside an element (a view of 16 bytes) of a string view array.

The view of a longer text contains only the first four bytes and a reference to the text.
"""

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The layout of a page: all bytes of the page except its numbers, and the line numbers of these numbers.

    The fixed part of a line is the series with the space after it, or a whole comment. `long` has the fixed parts of
    more than 12 bytes, which Arrow views refer to without a copy; `short` has the others. `numbers` are the lines with
    a number, and `others` are the lines without one. `taken` has the positions of the samples to store; samples that
    repeat a series are dropped.
    """

    fixed_lengths: Positions
    long: pa.Array
    long_lines: Positions
    short: pa.Array
    short_lines: Positions
    numbers: Positions
    others: Positions
    taken: Positions


def learn(body: bytes, samples: Sequence[Sample], taken: Sequence[int]) -> Layout | None:
    """Return the layout of the page `body`: all its bytes except the numbers of its samples.

    `samples` are the samples of the page; those at the positions `taken` are stored. Return None if a line with a
    sample has more than a series, one space and a number, or if the page does not end with a newline.
    """
    if not body.endswith(b"\n") or any(sample.ts is not None for sample in samples):
        return None
    fixed, numbers = [], []
    for place, line in enumerate(body[:-1].split(b"\n")):
        bare = line.decode().strip()
        if bare and not bare.startswith("#"):
            numbers.append(place)
            line = line[: line.rfind(b" ") + 1]  # noqa: PLW2901 - only the fixed part
        fixed.append(line)
    if len(numbers) != len(samples):
        return None
    lengths = np.array([len(line) for line in fixed], np.int32)
    others = np.setdiff1d(np.arange(len(fixed), dtype=np.int32), numbers)
    long_lines, short_lines = np.flatnonzero(lengths > _VIEW_BYTES), np.flatnonzero(lengths <= _VIEW_BYTES)
    layout = Layout(
        fixed_lengths=lengths,
        long=pa.array([fixed[place] for place in long_lines], pa.binary_view()),
        long_lines=long_lines.astype(np.int32),
        short=pa.array([fixed[place] for place in short_lines], pa.binary()),
        short_lines=short_lines.astype(np.int32),
        numbers=np.array(numbers, np.int32),
        others=others,
        taken=np.array(taken, np.int32),
    )
    expected = np.array([samples[place].value for place in taken])
    values = read_numbers(body, layout)
    # The layout must return the numbers of the exact parser, which it does not for a page with exemplars.
    return layout if values is not None and np.array_equal(values, expected, equal_nan=True) else None


def join(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of one long page that consists of pages with `layouts`, in the same order.

    A layout is all bytes of a page except the numbers.
    """
    if len(layouts) == 1:
        return layouts[0]
    lines = np.cumsum([0, *(len(layout.fixed_lengths) for layout in layouts)], dtype=np.int32).tolist()
    numbers = np.cumsum([0, *(len(layout.numbers) for layout in layouts)], dtype=np.int32).tolist()
    return Layout(
        fixed_lengths=np.concatenate([layout.fixed_lengths for layout in layouts]),
        long=pa.concat_arrays([layout.long for layout in layouts]),
        long_lines=_shifted([layout.long_lines for layout in layouts], lines),
        short=pa.concat_arrays([layout.short for layout in layouts]),
        short_lines=_shifted([layout.short_lines for layout in layouts], lines),
        numbers=_shifted([layout.numbers for layout in layouts], lines),
        others=_shifted([layout.others for layout in layouts], lines),
        taken=_shifted([layout.taken for layout in layouts], numbers),
    )


def _shifted(places: Sequence[Positions], starts: Sequence[int]) -> Positions:
    return np.concatenate([one + start for one, start in zip(places, starts, strict=False)])


def read_numbers(body: bytes, layout: Layout) -> npt.NDArray[np.float64] | None:
    """Return the numbers of the samples to store from a page as float64, in the order of the page.

    Return None if the page differs in more than the numbers from the earlier page with this layout.
    """
    ends = _line_ends(body)
    if len(ends) != len(layout.fixed_lengths) or not body.endswith(b"\n"):
        return None
    starts = np.empty_like(ends)
    starts[:1], starts[1:] = 0, ends[:-1] + 1
    behind = starts + layout.fixed_lengths
    spare = ends - behind
    if (spare < 0).any() or spare[layout.others].any():
        return None
    long, short = layout.long_lines, layout.short_lines
    if not _views(body, _of(starts, long), _of(layout.fixed_lengths, long)).equals(layout.long):
        return None
    if len(short) and not _cut(body, starts[short], behind[short]).equals(layout.short):
        return None
    values = _floats(body, _of(behind, layout.numbers), _of(ends, layout.numbers))
    return values if values is None or len(layout.taken) == len(values) else values[layout.taken]


def _of(positions: Positions, lines: Positions) -> Positions:
    return positions if len(lines) == len(positions) else positions[lines]


def _line_ends(body: bytes) -> Positions:
    """Return the positions of all newlines in `body`.

    For speed, the search is by words of eight bytes; only words that contain a newline are examined by byte.
    """
    marks = np.empty(-(-len(body) // _WORD) * _WORD, np.bool_)
    np.equal(np.frombuffer(body, np.uint8), _NEWLINE, out=marks[: len(body)])
    marks[len(body) :] = False
    words = marks.view("<u8")
    found = np.flatnonzero(words != 0)
    marked = words[found]
    if (marked & (marked - np.uint64(1))).any():  # two ends in one word
        return np.flatnonzero(marks).astype(np.int32)
    # Such a word is a power of two. Its exponent is the number of bits before the marked byte, plus one.
    return (found * _WORD).astype(np.int32) + (np.frexp(marked.astype(np.float64))[1] >> 3)  # eight bits per byte


def _views(body: bytes, starts: Positions, lengths: Positions) -> pa.Array:
    """Return the parts of `body` that begin at `starts` and have these `lengths` as Arrow views, without copies.

    All parts must be longer than 12 bytes.
    """
    views = np.zeros(len(starts), _VIEW)
    if len(starts):
        fours = np.ndarray(len(body) - 3, "<u4", body, strides=(1,))
        views["length"], views["prefix"], views["offset"] = lengths, fours[starts], starts
    return pa.Array.from_buffers(pa.binary_view(), len(starts), [None, pa.py_buffer(views), pa.py_buffer(body)])


def _cut(body: bytes, starts: Positions, ends: Positions) -> pa.Array:
    """Return copies of the parts of `body` from `starts` to `ends`."""
    pieces = pa.Array.from_buffers(pa.binary(), *_divided(body, starts, ends, None))
    return pieces.take(pa.array(np.arange(0, len(pieces), 2, dtype=np.int32)))


def _floats(body: bytes, starts: Positions, ends: Positions) -> npt.NDArray[np.float64] | None:
    """Return the numbers in `body` between each of `starts` and `ends`; None if any of them is not a number.

    The numbers are parsed in place: in the Arrow array, the parts of `body` between the numbers are null.
    """
    if not len(starts):
        return np.empty(0)
    others_are_null = pa.py_buffer(np.full(-(-len(starts) // _OF_A_BYTE), _EVERY_OTHER, np.uint8))
    try:
        read = pc.cast(pa.Array.from_buffers(pa.string(), *_divided(body, starts, ends, others_are_null)), pa.float64())
    except pa.ArrowInvalid:
        return None
    values: npt.NDArray[np.float64] = np.frombuffer(read.buffers()[1], np.float64, len(read))[::2].copy()
    nans = np.flatnonzero(np.isnan(values))
    return values if (ends[nans] - starts[nans] <= _LONGEST_NAN).all() else None


def _divided(
    body: bytes, starts: Positions, ends: Positions, is_valid: pa.Buffer | None
) -> tuple[int, list[pa.Buffer | None]]:
    """Return length and buffers of an Arrow array whose elements are the parts of `body` from `starts` to `ends`.

    The parts between them are elements too, so every second element is a wanted part.
    """
    offsets = np.empty(2 * len(starts), np.int32)
    offsets[::2], offsets[1::2] = starts, ends
    return max(len(offsets) - 1, 0), [is_valid, pa.py_buffer(offsets), pa.py_buffer(body)]


BATCH_BYTES: Final = 1 << 18  # bytes of pages that are parsed together: more do not fit into the processor's cache
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The response of one scrape.

    `labels` are the labels of the target, which take precedence over labels of the samples with the same name.
    """

    target: str
    labels: tuple[tuple[str, str], ...] = ()
    body: bytes
    openmetrics: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRows:
    """The samples of one page, as columns.

    `ts` is null for samples that have no time on the page; the whole column is None if no sample has a time. `doubled`
    is the number of samples that were dropped because they repeat a series and time of the page. `out_of_bounds` is the
    number of samples that were dropped because their time is too old or in the future. `exact` is false if only the
    numbers were parsed, because all other bytes of the page were those of an earlier page.
    """

    metrics: pa.Array
    labels: pa.Array
    values: pa.Array
    ts: pa.Array | None
    doubled: int
    exact: bool
    out_of_bounds: int = 0

    @property
    def rows(self) -> int:
        """Return the number of samples of this page."""
        return len(self.values)


@dataclass(frozen=True, slots=True)
class _Known:
    """The cached layout of a target's page (all bytes except the numbers), and the samples of that page."""

    layout: Layout
    target_labels: tuple[tuple[str, str], ...]
    rows: PageRows

    def with_values(self, values: npt.NDArray[np.float64]) -> PageRows:
        """Return the samples of a page that has the numbers `values` and is otherwise equal to the cached page."""
        return replace(self.rows, values=pa.array(values), exact=False)


@dataclass(slots=True)
class PageReader:
    """Parser of exporter pages. It caches the layout of a page (all bytes except the numbers) for each target."""

    _known: dict[str, _Known] = field(default_factory=dict)

    def forget(self, targets: set[str]) -> None:
        """Delete the cached data about the pages of all targets that are not in `targets`."""
        for name in self._known.keys() - targets:
            del self._known[name]

    def read(self, pages: Sequence[Page]) -> list[PageRows | DecodeError]:
        """Return, for each page, its samples or the error because of which the page is rejected.

        An invalid page does not affect the other pages.
        """
        found = self._by_layout(pages)
        return [self._exactly(page) if rows is None else rows for page, rows in zip(pages, found, strict=True)]

    def _by_layout(self, pages: Sequence[Page]) -> list[PageRows | None]:
        known = [self._layout_of(page) for page in pages]
        usable = [place for place, one in enumerate(known) if one is not None]
        result: list[PageRows | None] = [None] * len(pages)
        for group in _groups(usable, pages):
            chosen = [one for place in group if (one := known[place]) is not None]
            numbers = _numbers_of([pages[place].body for place in group], [one.layout for one in chosen])
            for place, one, values in zip(group, chosen, numbers, strict=True):
                result[place] = None if values is None else one.with_values(values)
        return result

    def _layout_of(self, page: Page) -> _Known | None:
        known = self._known.get(page.target)
        return None if known is None or page.openmetrics or known.target_labels != page.labels else known

    def _exactly(self, page: Page) -> PageRows | DecodeError:
        try:
            text = page.body.removeprefix(_BOM).decode()
            samples = parse_exactly(text, openmetrics=page.openmetrics)
        except UnicodeDecodeError as error:
            return DecodeError(f"the page is not UTF-8 at byte {error.start}")
        except DecodeError as error:
            return error
        own = dict(page.labels)
        labels = [canonical_labels(_merged(sample.labels, own)) for sample in samples]
        taken = _first_ones(samples, labels)
        chosen = [samples[place] for place in taken]
        times = [sample.ts for sample in chosen]
        rows = PageRows(
            metrics=pa.array([redacted_name(sample.metric) for sample in chosen], pa.string()).dictionary_encode(),
            labels=pa.array([labels[place] for place in taken], pa.string()).dictionary_encode(),
            values=pa.array([sample.value for sample in chosen], pa.float64()),
            ts=None if all(ts is None for ts in times) else pa.array(times, pa.timestamp("us", "UTC")),
            doubled=len(samples) - len(taken),
            exact=True,
        )
        self._known.pop(page.target, None)
        layout = None if page.openmetrics or page.body.startswith(_BOM) else learn(page.body, samples, taken)
        if layout is not None:
            self._known[page.target] = _Known(layout, page.labels, rows)
        return rows


def _has_lines_of(body: bytes, layout: Layout) -> bool:
    """Return whether the page `body` has as many lines as the earlier page from which `layout` was derived.

    Pages for which the result is false are not parsed together with other pages.
    """
    return body.endswith(b"\n") and body.count(b"\n") == len(layout.fixed_lengths)


def _groups(places: Sequence[int], pages: Sequence[Page]) -> list[list[int]]:
    groups: list[list[int]] = []
    size = 0
    for place in places:
        if not groups or size + len(pages[place].body) > BATCH_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(place)
        size += len(pages[place].body)
    return groups


def _numbers_of(bodies: Sequence[bytes], layouts: Sequence[Layout]) -> list[npt.NDArray[np.float64] | None]:
    """Return the numbers of each page; None for a page that differs from its layout in more than the numbers.

    A layout is all bytes of an earlier page except the numbers. The pages are parsed together. If any page differs from
    its layout, each half of the pages is tried separately.
    """
    if len(bodies) == 1:
        return [read_numbers(bodies[0], layouts[0])]
    fits = all(map(_has_lines_of, bodies, layouts))
    values = read_numbers(b"".join(bodies), join(layouts)) if fits else None
    if values is not None:
        return list(np.split(values, np.cumsum([len(layout.taken) for layout in layouts])[:-1]))
    middle = len(bodies) // 2
    return _numbers_of(bodies[:middle], layouts[:middle]) + _numbers_of(bodies[middle:], layouts[middle:])


def _merged(labels: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a series together with `own`, the labels of the target. Empty labels are left out.

    As in Prometheus, a label of the series is renamed to `exported_…` if its name is `instance` or a label of the
    target.
    """
    merged = dict(own)
    for name, value in labels.items():
        if value:
            merged[_free_name(name, {*own, "instance"}, labels)] = value
    return merged


def _free_name(name: str, taken: set[str], labels: Mapping[str, str]) -> str:
    if name not in taken:
        return name
    while name in taken or name in labels:
        name = f"exported_{name}"
    return name


def _first_ones(samples: Sequence[Sample], labels: Sequence[str | None]) -> list[int]:
    """Return the positions of the samples to store.

    A sample is left out if its series and time already occurred on the page.
    """
    seen: dict[tuple[str, str | None, int | None], int] = {}
    for place, (sample, text) in enumerate(zip(samples, labels, strict=True)):
        seen.setdefault((sample.metric, text, sample.ts), place)
    return list(seen.values())
