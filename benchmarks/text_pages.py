"""Text pages of exporters to columns: by the cached layout, alone and joined, beside prometheus_client's parser."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from _rows import Row, cpu_seconds
from prometheus_client.parser import text_string_to_metric_families

from rankscope_ingest.exposition.pages import Page, PageReader

SAMPLES = 300_000
"""Read for every figure, however large the pages are."""


def run() -> list[Row]:
    rows = []
    for series in (300, 2_000, 15_000):
        alone, together, library = _figures(series)
        rows += [
            Row(f"{series:,} series, page by page", alone, "CPU s/M samples", f"{library / alone:.0f}x less"),
            Row(f"{series:,} series, 32 pages at once", together, "CPU s/M samples", f"{library / together:.0f}x less"),
            Row(f"{series:,} series, prometheus_client", library, "CPU s/M samples", "labels as dictionaries"),
        ]
    return rows


def _figures(series: int) -> tuple[float, float, float]:
    """Return CPU seconds a million samples: page by page, many at once, and by the library."""
    targets = [f"host-{number}:9100" for number in range(32)]
    first, second = ([_page(target, series, seed) for target in targets] for seed in (1, 2))
    reader = PageReader()
    reader.read(first)
    rounds = max(1, SAMPLES // (series * len(second)))
    millions = rounds * series * len(second) / 1e6
    assert not any(rows.exact for rows in reader.read(second))  # type: ignore[union-attr]
    alone = cpu_seconds(lambda: [_one_by_one(reader, second) for _ in range(rounds)])
    together = cpu_seconds(lambda: [reader.read(second) for _ in range(rounds)])
    text = second[0].body.decode()
    library = cpu_seconds(lambda: list(text_string_to_metric_families(text)), rounds=3)
    return alone / millions, together / millions, library / series * 1e6


def _one_by_one(reader: PageReader, pages: Sequence[Page]) -> None:
    for page in pages:
        reader.read([page])


def _page(target: str, series: int, seed: int) -> Page:
    """Return a page as DCGM's exporter makes them, spaces in labels included."""
    values = np.random.default_rng(seed).normal(100, 30, series)
    lines = ["# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).\n# TYPE DCGM_FI_DEV_POWER_USAGE gauge\n"]
    lines += [
        f'DCGM_FI_DEV_POWER_USAGE{{gpu="{number}",UUID="GPU-{number:08x}",modelName="NVIDIA H100 80GB HBM3",'
        f'Hostname="{target}"}} {value:.6f}\n'
        for number, value in enumerate(values)
    ]
    return Page(target=target, body="".join(lines).encode())
