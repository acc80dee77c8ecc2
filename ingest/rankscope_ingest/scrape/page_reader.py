"""Parse exporter pages into samples. If possible, only the numbers of a page are parsed.

The layout of a page is all its bytes except the numbers. A layout is cached for each target. If a new page of the
target has the same layout, only its numbers are parsed, together with those of other pages. Otherwise, the page is
parsed completely. The module is not thread-safe. Memory is bounded by the size of the pages of the current targets: the
layout of a removed target is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.model.redaction import redacted_name
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.scrape.exposition_parser import Sample, parse_exactly
from rankscope_ingest.scrape.page_layout import Layout, join, learn, read_numbers

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
