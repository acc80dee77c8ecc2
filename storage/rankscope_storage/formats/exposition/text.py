"""Lines of OpenMetrics text, created from columns, and the timestamps of samples.

Each (attempt, step, time) of a rank gets a different millisecond, which is the resolution of Prometheus. In rows from
an imported log with times in whole seconds, several steps have the same time. The times of the later steps are moved by
one millisecond each, so that no step is lost. Only moved timestamps are held in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.wire.escaping import label_value
from rankscope_storage.base.escaping import sql_identifier, sql_string
from rankscope_storage.formats.common.selection import Selection

METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

MICROS: Final = 1_000_000
_MILLI: Final = 1_000

END: Final = b"# EOF\n"


def family_head(name: str, type_: str, help_: str, unit: str | None = None) -> bytes:
    """Return the first lines of a metric family: type, unit and help text.

    `name` is the name without `_total` or `_info`. The unit is written only if the name ends with it, as OpenMetrics
    requires.
    """
    lines = [f"# TYPE {name} {type_}"]
    if unit and name.endswith(f"_{unit}"):
        lines.append(f"# UNIT {name} {unit}")
    if help_:
        lines.append(f"# HELP {name} {label_value(help_)}")
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def label_text(labels: Mapping[str, str]) -> str:
    """Return the labels in the form `a="x",b="y"`, with escaped values and without braces."""
    text = ",".join(f'{name}="{label_value(value)}"' for name, value in labels.items())
    return text.encode("utf-8", "replace").decode()


def sql_label(name: str, column: str | None = None) -> str:
    r"""Return an SQL expression that results in `name="<value>",` with the value escaped; a null results in ''."""
    text = f"{sql_identifier(column or name)}::VARCHAR"
    for raw, escaped in (("\\", "\\\\"), ("\n", "\\n"), ('"', '\\"')):
        text = f"replace({text}, {sql_string(raw) if raw != chr(10) else 'chr(10)'}, {sql_string(escaped)})"
    return f"coalesce({sql_string(name + '=' + chr(34))} || {text} || {sql_string(chr(34) + ',')}, '')"


def lines(series: pa.Array, values: pa.Array, micros: npt.NDArray[np.int64]) -> bytes:
    """Return one line of text per sample: series, value and time."""
    if not len(series):
        return b""
    joined = pc.binary_join_element_wise(series, " ", number_texts(values), " ", time_texts(micros), "\n", "")
    _, offsets, data = joined.buffers()
    return bytes(data.slice(0, memoryview(offsets).cast("i")[len(joined)]))


def number_texts(values: pa.Array) -> pa.Array:
    """Return numbers as OpenMetrics text: the shortest exact decimal form, NaN, +Inf or -Inf."""
    wide = values.cast(pa.float64())
    texts = wide.cast(pa.string())
    infinite = pc.if_else(pc.greater(wide, 0.0), "+Inf", "-Inf")
    return pc.if_else(pc.is_nan(wide), "NaN", pc.if_else(pc.is_inf(wide), infinite, texts))


def time_texts(micros: npt.NDArray[np.int64]) -> pa.Array:
    """Return times in seconds with as many digits as needed.

    Prometheus multiplies the seconds by 1000 and truncates the product. Because of rounding errors, half of all times
    would get the previous millisecond. Such a time gets a seventh digit, which is smaller than a microsecond.
    """
    seconds, rest = np.divmod(micros, MICROS)
    cut = (micros / MICROS * 1000).astype(np.int64) != micros // _MILLI
    digits = pc.utf8_lpad(pa.array(rest).cast(pa.string()), 6, "0")
    digits = pc.binary_join_element_wise(digits, pc.if_else(pa.array(cut), "3", ""), "")
    digits = pc.utf8_rtrim(digits, "0")
    whole = pa.array(seconds).cast(pa.string())
    return pc.if_else(pc.equal(digits, ""), whole, pc.binary_join_element_wise(whole, digits, "."))


_MOVED: Final = """\
WITH moment AS (
  SELECT DISTINCT rank, attempt, step, ts FROM ({union})
), numbered AS (
  SELECT *, epoch_us(ts) // 1000 AS ms, row_number() OVER (
    PARTITION BY rank ORDER BY ts, attempt NULLS FIRST, step NULLS FIRST) AS place
  FROM moment
), placed AS (
  SELECT *, place + max(ms - place) OVER (
    PARTITION BY rank ORDER BY place ROWS UNBOUNDED PRECEDING) AS moved
  FROM numbered
)
SELECT rank, attempt, step, epoch_us(ts) AS us, moved FROM placed WHERE moved <> ms
"""


class Timeline:
    """Times with which the rows of a selection are exported. Rows without a time or before 1970 are not exported."""

    def __init__(self, selection: Selection, datasets: Sequence[str]) -> None:
        union = " UNION ".join(
            f"SELECT rank, attempt, step, ts FROM {selection.source(name)} AND {SHOWN}" for name in datasets
        )
        rows = selection.query(_MOVED.format(union=union)).to_pydict()
        keys = zip(rows["rank"], rows["attempt"], rows["step"], rows["us"], strict=True)
        self._moved = {key: ms * _MILLI for key, ms in zip(keys, rows["moved"], strict=True)}

    @property
    def moved(self) -> int:
        """Number of times that are exported with a later time than the stored one."""
        return len(self._moved)

    def micros(self, batch: pa.RecordBatch | pa.Table) -> npt.NDArray[np.int64]:
        """Return the exported time of each row of `batch` in microseconds since 1970.

        The batch must have the columns rank, attempt, step and us; `us` is the stored time in microseconds since 1970.
        """
        micros = np.asarray(batch.column("us"), np.int64)
        if not self._moved:
            return micros
        names = ("rank", "attempt", "step", "us")
        keys = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
        moved = self._moved
        return np.fromiter((moved.get(key, key[3]) for key in keys), np.int64, len(micros))


SHOWN: Final = "ts >= TIMESTAMPTZ '1970-01-01 00:00:00+00'"
"""SQL predicate that selects the rows that can be exported: those with a time in 1970 or later."""
