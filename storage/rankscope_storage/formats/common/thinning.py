"""Selection of the points that a format with large rows contains, so that an export is not much larger than the store.

TensorBoard's event files repeat the tag of a series in every value, so that a value takes about 60 bytes, while the
store needs a few bits. The steps are divided into ranges of equal width. Of each series and range, the rows with the
lowest and the highest value are kept, or a row with a NaN or Inf instead of the highest. The first and the last step
are kept completely. If the ranges would be too wide, fewer statistics of each tensor are kept. Two points of the norm
of each tensor are always kept. Of histograms, every n-th step is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rankscope_contract.msprobe.csv_layout import OPS as MSPROBE_OPS
from rankscope_contract.security.escaping import sql_identifier
from rankscope_storage.formats.common.selection import Selection

SIZE_RATIO: Final = 4
"""Largest size of an export, as a multiple of the size of the exported rows in the store."""
SMALL_BYTES: Final = 1_000_000
"""Size up to which an export is complete in any case."""
MAIN_OPS: Final = ("norm", "nans")

_MARGIN: Final = 0.9  # the sizes of rows are estimated
_MIN_RANGES: Final = 10  # with fewer ranges of steps, a curve is too coarse: statistics are omitted instead
_VALUE_BYTES: Final = 30  # of one value, without the names of its tensor and kind
_SERIES_BYTES: Final = 300  # of the description of a series, in its first value
_HISTOGRAM_BYTES: Final = 700  # of a histogram of 30 bins and its tag
_SERIES: Final = {
    "tensor_stats": ("kind", "tensor", "index", "vpp_stage", "micro_step", "placement", "shard_group", "call_seq"),
    "scalars": ("name", "labels", "unit", "vpp_stage", "micro_step"),
    "features": ("kind", "module", "index", "vpp_stage", "micro_step"),
}
_NAMES: Final = {"tensor_stats": ("kind", "tensor"), "scalars": ("name", "labels"), "features": ("kind", "module")}
_SHARES: Final = {"scalars": 0.5, "features": 0.5, "tensor_stats": 1.0}  # of the bytes that remain, in this order


@dataclass(frozen=True, slots=True)
class Thinning:
    """Selection of the points to export. `widths` has the width of the ranges of steps of each dataset.

    Width 1 keeps all rows. `ops` are the exported statistics of tensors. `ends` has the first and the last step of the
    export. The first range begins at the first step.
    """

    ops: tuple[str, ...]
    widths: Mapping[str, int] = field(default_factory=dict)
    ends: tuple[int, int] = (0, 0)

    def begin(self, step: int) -> int:
        """Return the first step of the range that contains `step`, for the dataset with the widest ranges."""
        width = max(self.widths.values(), default=1)
        return self.ends[0] + (step - self.ends[0]) // width * width

    def sql(self, dataset: str) -> str:
        """Return the SQL clause that follows the predicates of a query and keeps only the selected rows."""
        width = self.widths.get(dataset, 1)
        if width == 1:
            return ""
        if dataset == "histograms":  # the parts of a histogram have no order: every step of this width
            return f" AND (step - {self.ends[0]}) % {width} = 0"
        value = "norm" if dataset == "tensor_stats" else sql_identifier("value")
        broken = "coalesce(nans, 0) + coalesce(infs, 0) > 0 DESC, " if dataset == "tensor_stats" else ""
        first, last = self.ends
        place = f"row_number() OVER (PARTITION BY {_key(dataset)}, (step - {first}) // {width} ORDER BY"
        kept = f" QUALIFY {place} {broken}{value} DESC NULLS FIRST, step) = 1 OR {place} {value} NULLS LAST, step) = 1"
        return kept if width > last - first else f"{kept} OR step IN ({first}, {last})"


def thinning(selection: Selection, counts: Mapping[str, int], ops: tuple[str, ...]) -> Thinning:
    """Return the selection with which an export of `selection` does not exceed its largest size.

    `counts` has the number of exported rows of each dataset. `ops` are all statistics that the format contains.
    """
    left = _MARGIN * max(
        SMALL_BYTES, SIZE_RATIO * _stored_bytes(selection, {name: counts.get(name, 0) for name in _SHARES})
    )
    present = [name for name in (*_SHARES, "histograms") if counts.get(name)]
    steps = " UNION ALL ".join(f"SELECT step FROM {selection.source(name)}" for name in present)
    row = selection.query(f"SELECT min(step) AS low, max(step) AS high FROM ({steps})").to_pylist()[0]
    ends = (row["low"] or 0, row["high"] or 0)
    rows = counts.get("histograms", 0)
    most = max(SMALL_BYTES, SIZE_RATIO * _stored_bytes(selection, {"histograms": rows}))
    every = math.ceil(rows * _HISTOGRAM_BYTES / most)
    kept = Thinning(ops, {"histograms": every} if every > 1 else {}, ends)
    for dataset in [name for name in present if name in _SHARES]:
        limit, span = left * _SHARES[dataset], ends[1] - ends[0] + 1
        coarse = max(1, span // _MIN_RANGES)
        tiers = ((ops, coarse), (MSPROBE_OPS, coarse), (MAIN_OPS, coarse), (("norm",), span))
        for used, widest in tiers if dataset == "tensor_stats" else ((ops, span),):
            width, size = 1, _size(selection, dataset, Thinning(used, {dataset: 1}, ends))
            while size > limit and width < widest:
                width = min(widest, width + 1 + width // 4)
                size = _size(selection, dataset, Thinning(used, {dataset: width}, ends))
            kept = Thinning(used, {**kept.widths, dataset: width}, ends)
            if size <= limit:
                break
        left = max(0.0, left - size)
    return kept


def _size(selection: Selection, dataset: str, kept: Thinning) -> float:
    """Return the estimated size in bytes of the rows of `dataset` that `kept` selects."""
    (first, last), width = kept.ends, kept.widths[dataset]
    series = f"rank, attempt, {_key(dataset)}"
    names = " + ".join(f"coalesce(octet_length(encode({name})), 0)" for name in _NAMES[dataset])
    numbers, described = "1", "1"
    if dataset == "tensor_stats":
        numbers = " + ".join(f"({sql_identifier(op)} IS NOT NULL)::INTEGER" for op in kept.ops)
        described = "(coalesce(placement, '') <> 'full' OR call_seq IS NOT NULL)::INTEGER"
    rows = f"count(*) AS rows, sum(({names} + {_VALUE_BYTES}) * ({numbers})) AS bytes"
    once = f"any_value(({numbers}) * ({_SERIES_BYTES} * {described} + 30)) AS once"
    count = "rows" if width == 1 else "least(rows, 2)"
    ends = 0 if width > last - first else 2  # rows of the first and the last step
    sizes = f"least(sum(bytes), sum(bytes * {count} / rows) + {ends} * sum(bytes) / sum(rows))"
    found = selection.query(
        f"SELECT sum(size) + sum(once) AS size FROM (SELECT {sizes} AS size, max(once) AS once FROM ("
        f"SELECT {series}, {rows}, {once} FROM {selection.source(dataset)} AND step IS NOT NULL "
        f"GROUP BY {series}, (step - {first}) // {width}) GROUP BY {series})"
    )
    return float(found["size"][0].as_py() or 0)


def _key(dataset: str) -> str:
    return ", ".join(map(sql_identifier, _SERIES[dataset]))


def _stored_bytes(selection: Selection, counts: Mapping[str, int]) -> float:
    """Return the size of the exported rows in the files of the store, which may also contain other rows."""
    total = 0.0
    for dataset, count in counts.items():
        files = selection.connection.files_table(dataset, run=selection.run, steps=selection.options.steps)
        rows = sum(files["rows"].to_pylist())
        total += sum(files["size_bytes"].to_pylist()) * min(1.0, count / rows) if rows else 0
    return total
