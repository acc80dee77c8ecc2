"""Lines of OpenMetrics text, made in columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.escaping import label_value, sql_identifier, sql_string

METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

MICROS: Final = 1_000_000
_MILLI: Final = 1_000

END: Final = b"# EOF\n"


def family_head(name: str, type_: str, help_: str, unit: str | None = None) -> bytes:
    """Return the lines that begin a family; `name` is without `_total` or `_info`.

    The unit may be told only where the name ends in it.
    """
    lines = [f"# TYPE {name} {type_}"]
    if unit and name.endswith(f"_{unit}"):
        lines.append(f"# UNIT {name} {unit}")
    if help_:
        lines.append(f"# HELP {name} {label_value(help_)}")
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def label_text(labels: Mapping[str, str]) -> str:
    """Return `a="x",b="y"`, escaped, without braces."""
    text = ",".join(f'{name}="{label_value(value)}"' for name, value in labels.items())
    return text.encode("utf-8", "replace").decode()


def sql_label(name: str, column: str | None = None) -> str:
    r"""Return an SQL expression for `name="<value>",` with the value escaped; empty where the column is null."""
    text = f"{sql_identifier(column or name)}::VARCHAR"
    for raw, escaped in (("\\", "\\\\"), ("\n", "\\n"), ('"', '\\"')):
        text = f"replace({text}, {sql_string(raw) if raw != chr(10) else 'chr(10)'}, {sql_string(escaped)})"
    return f"coalesce({sql_string(name + '=' + chr(34))} || {text} || {sql_string(chr(34) + ',')}, '')"


def lines(series: pa.Array, values: pa.Array, micros: npt.NDArray[np.int64]) -> bytes:
    """Return one line per sample: series, value, time."""
    if not len(series):
        return b""
    joined = pc.binary_join_element_wise(series, " ", number_texts(values), " ", time_texts(micros), "\n", "")
    _, offsets, data = joined.buffers()
    return bytes(data.slice(0, memoryview(offsets).cast("i")[len(joined)]))


def number_texts(values: pa.Array) -> pa.Array:
    """Return numbers as OpenMetrics writes them: shortest exact form, NaN, +Inf, -Inf."""
    wide = values.cast(pa.float64())
    texts = wide.cast(pa.string())
    infinite = pc.if_else(pc.greater(wide, 0.0), "+Inf", "-Inf")
    return pc.if_else(pc.is_nan(wide), "NaN", pc.if_else(pc.is_inf(wide), infinite, texts))


def time_texts(micros: npt.NDArray[np.int64]) -> pa.Array:
    """Return times as seconds with as many digits as needed.

    Prometheus multiplies the seconds by 1000 and cuts, so that half of all milliseconds would land in the one before;
    such a time gets a seventh digit, which no microsecond notices.
    """
    seconds, rest = np.divmod(micros, MICROS)
    cut = (micros / MICROS * 1000).astype(np.int64) != micros // _MILLI
    digits = pc.utf8_lpad(pa.array(rest).cast(pa.string()), 6, "0")
    digits = pc.binary_join_element_wise(digits, pc.if_else(pa.array(cut), "3", ""), "")
    digits = pc.utf8_rtrim(digits, "0")
    whole = pa.array(seconds).cast(pa.string())
    return pc.if_else(pc.equal(digits, ""), whole, pc.binary_join_element_wise(whole, digits, "."))
