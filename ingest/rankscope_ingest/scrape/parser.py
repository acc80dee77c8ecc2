"""Parse pages into samples: by the cached layout of their target, many pages together, otherwise exactly.

Not thread-safe. Memory is bounded by the pages of the known targets: a layout is deleted when its target is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.scrape.reference_parser import Sample, parse_exactly
from rankscope_ingest.scrape.template_parser import Layout, join, learn, read_numbers

BATCH_BYTES: Final = 1 << 18  # bytes of pages that are parsed together: more do not fit into the processor's cache
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The response of one scrape. `labels` are those of the target, which take precedence over those of a sample."""

    target: str
    labels: tuple[tuple[str, str], ...] = ()
    body: bytes
    openmetrics: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRows:
    """The samples of one page.

    `ts` is null for samples without a time on the page. `doubled` and `out_of_bounds` count samples that were dropped.
    `exact` is false if the page was parsed by its layout.
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
        """Return the number of samples."""
        return len(self.values)


@dataclass(frozen=True, slots=True)
class _Known:
    """The layout of a target's page, and the samples of the page from which it was learnt."""

    layout: Layout
    target_labels: tuple[tuple[str, str], ...]
    rows: PageRows

    def with_values(self, values: npt.NDArray[np.float64]) -> PageRows:
        """Return the samples of another page with this layout."""
        return replace(self.rows, values=pa.array(values), exact=False)


@dataclass(slots=True)
class PageReader:
    """Parser with a cache of layouts by target."""

    _known: dict[str, _Known] = field(default_factory=dict)

    def forget(self, targets: set[str]) -> None:
        """Delete the layouts of all targets except `targets`."""
        for name in self._known.keys() - targets:
            del self._known[name]

    def read(self, pages: Sequence[Page]) -> list[PageRows | DecodeError]:
        """Return the samples of each page, or the error that rejects it; an error affects only its own page."""
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
            metrics=pa.array([sample.metric for sample in chosen], pa.string()).dictionary_encode(),
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
    """Return whether a page has the line count of its layout, so that its lines can be joined with other pages."""
    return body.endswith(b"\n") and body.count(b"\n") == len(layout.fixed_lengths)


def _groups(places: Sequence[int], pages: Sequence[Page]) -> list[list[int]]:
    groups: list[list[int]] = []
    size = BATCH_BYTES
    for place in places:
        if size + len(pages[place].body) > BATCH_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(place)
        size += len(pages[place].body)
    return groups


def _numbers_of(bodies: Sequence[bytes], layouts: Sequence[Layout]) -> list[npt.NDArray[np.float64] | None]:
    """Return the numbers of each page. If a joined batch does not match its layouts, try its two halves."""
    if len(bodies) == 1:
        return [read_numbers(bodies[0], layouts[0])]
    fits = all(map(_has_lines_of, bodies, layouts))
    values = read_numbers(b"".join(bodies), join(layouts)) if fits else None
    if values is not None:
        return list(np.split(values, np.cumsum([len(layout.taken) for layout in layouts])[:-1]))
    middle = len(bodies) // 2
    return _numbers_of(bodies[:middle], layouts[:middle]) + _numbers_of(bodies[middle:], layouts[middle:])


def _merged(labels: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a series, without empty ones.

    A label whose name the target has, and `instance`, are renamed to `exported_…`, as in Prometheus.
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
    """Return the positions of samples, without those that repeat a series with the same time."""
    seen: dict[tuple[str, str | None, int | None], int] = {}
    for place, (sample, text) in enumerate(zip(samples, labels, strict=True)):
        seen.setdefault((sample.metric, text, sample.ts), place)
    return list(seen.values())
