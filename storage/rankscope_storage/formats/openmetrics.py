"""Export as OpenMetrics text with timestamps, from which `promtool` creates Prometheus blocks.

The exported history has the same names and labels as live data. OpenMetrics requires samples ordered by family, series
and time. A run is therefore read once per family and never held in memory.

A family is written from queries of the store that return the rows in the order of the lines of the family.

Each (attempt, step, time) of a rank gets a different millisecond, which is the resolution of Prometheus. In rows from
an imported log with times in whole seconds, several steps have the same time. The times of the later steps are moved by
one millisecond each, so that no step is lost. Only moved timestamps are held in memory.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_contract.wire.escaping import label_value
from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.escaping import sql_identifier, sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.formats.export import (
    ExportOptions,
    ExportReport,
    Progress,
    Selection,
    count_progress,
    no_progress,
    require_rows,
    staged_file,
)
from rankscope_storage.prometheus import names
from rankscope_storage.prometheus.names import NULL, PLACEMENT, STAGE_EXTRAS, TENSOR_EXTRAS, Scalar

BATCH_ROWS: Final = 100_000

DOUBLED: Final = "samples of one series at one time: only the first is written"

_MOMENT: Final = "rank, attempt, step, epoch_us(ts) AS us"
_IN_ORDER: Final = "ts, attempt NULLS FIRST, step NULLS FIRST"


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


class FamilyWriter:
    """Writer of metric families to `file`. It also counts the rows that cannot be written."""

    def __init__(
        self, selection: Selection, timeline: Timeline, file: BinaryIO, written: Callable[[int], None]
    ) -> None:
        self.omitted: Counter[str] = Counter()
        self.families: set[str] = set()
        self._selection = selection
        self._timeline = timeline
        self._file = file
        self._written = written
        self._pending = b""
        self._last: tuple[str, int] = ("", -1)

    def info(self, family: str, labels: Mapping[str, str], datasets: Sequence[str]) -> None:
        """Write one `info` sample with `labels`, which describe the exported file.

        The time of the sample is the latest time of the exported rows.
        """
        union = " UNION ALL ".join(
            f"SELECT max(ts) AS ts FROM {self._selection.source(name)} AND {SHOWN}" for name in datasets
        )
        latest = self._selection.query(f"SELECT epoch_us(max(ts)) AS us FROM ({union})")["us"]
        if latest[0].as_py() is None:
            return
        self._head(family, "info", "Rows of a Rankscope store, one sample for each number.")
        series = pa.array([f"{family}_info{{{label_text(labels)}}}"])
        self._put(series, pa.array([1.0]), np.asarray(latest, np.int64))

    def moments(self, spec: MetricSpec, column: str, datasets: Sequence[str]) -> None:
        """Write the metric `spec`: one sample for each rank and time, with the value of `column` (attempt or step)."""
        union = " UNION ".join(
            f"SELECT rank, attempt, step, ts FROM {self._selection.source(name)} AND {SHOWN}" for name in datasets
        )
        query = (
            f"SELECT {_MOMENT}, {self._identity()} AS labels, {column}::DOUBLE AS value FROM ({union}) "
            f"WHERE {column} IS NOT NULL ORDER BY rank NULLS FIRST, {_IN_ORDER}"
        )
        self._write(spec, [query])

    def kind_steps(self, spec: MetricSpec) -> None:
        """Write one sample per rank, kind and time: the step at which the kind was sampled."""
        source = self._selection.source("tensor_stats")
        query = (
            f"SELECT {_MOMENT}, {self._identity()} || {sql_label('kind')} AS labels, step::DOUBLE AS value "
            f"FROM (SELECT DISTINCT rank, attempt, step, ts, kind FROM {source} AND {SHOWN} AND step IS NOT NULL) "
            f"ORDER BY rank NULLS FIRST, kind, {_IN_ORDER}"
        )
        self._write(spec, [query])

    def scalar_families(self) -> Iterator[tuple[MetricSpec, list[Scalar]]]:
        """Yield each metric of scalars that has rows, with the list of the scalars that are samples of this metric."""
        source = self._selection.source("scalars")
        rows = self._selection.query(
            f"SELECT DISTINCT name, unit, labels FROM {source} AND {SHOWN} ORDER BY ALL NULLS FIRST"
        ).to_pylist()
        by_name: dict[str, list[Scalar]] = {}
        general = []
        for row in rows:
            scalar = Scalar(**row)
            spec = names.own_metric(scalar)
            if (
                spec is None or spec.type == "counter"
            ):  # values that a counter cannot have are written to the general metric
                general.append(scalar)
            if spec is not None:
                by_name.setdefault(scalar.name, []).append(scalar)
        for name, scalars in by_name.items():
            yield catalogue.SCALARS_WITH_OWN_METRIC[name], scalars
        yield catalogue.SCALAR, general

    def scalars(self, spec: MetricSpec, scalars: Iterable[Scalar]) -> None:
        """Write the values of `scalars` as samples of the metric `spec`."""
        self._write(spec, self._scalar_queries(spec, scalars), count=True)

    def _scalar_queries(self, spec: MetricSpec, scalars: Iterable[Scalar]) -> Iterator[str]:
        source = self._selection.source("scalars")
        extras = " || ".join(sql_label(name) for name in STAGE_EXTRAS)
        order = ", ".join(f"{name} NULLS FIRST" for name in ("rank", *STAGE_EXTRAS))
        for scalar in scalars:
            own = names.own_metric(scalar)
            shown = own if spec is not catalogue.SCALAR else None
            labels = label_text(names.scalar_labels(scalar, shown))
            which = " AND ".join(
                _equals(*pair) for pair in zip(("name", "unit", "labels"), astuple(scalar), strict=True)
            )
            countable = "(value >= 0 AND NOT isnan(value))"
            if spec.type == "counter":
                which += f" AND {countable}"
            elif own is not None and own.type == "counter":
                which += f" AND NOT {countable}"
            text = sql_string(labels + "," if labels else "")
            yield (
                f"SELECT {_MOMENT}, {self._identity()} || {text} || {extras} AS labels, value "
                f"FROM {source} AND {SHOWN} AND value IS NOT NULL AND {which} ORDER BY {order}, {_IN_ORDER}"
            )

    def tensors(self, spec: MetricSpec, ops: Sequence[str], suffix: str) -> None:
        """Write the statistics `ops` of all tensors as samples of the metric `spec`.

        The column of a statistic has the name of its op, followed by `suffix`.
        """
        self._write(spec, self._tensor_queries(ops, suffix))

    def _tensor_queries(self, ops: Sequence[str], suffix: str) -> Iterator[str]:
        unusual = f"nullif(coalesce(placement, '{NULL}'), '{PLACEMENT}')"
        extras = " || ".join(sql_label(name, "shown" if name == "placement" else None) for name in TENSOR_EXTRAS)
        keys = ("rank", "tensor", "kind", *TENSOR_EXTRAS)
        order = ", ".join(f"{sql_identifier(name)} NULLS FIRST" for name in keys)
        columns = ", ".join(sql_identifier(name) for name in ("attempt", "step", "ts", *keys))
        values = ", ".join(f"{sql_identifier(op + suffix)}::DOUBLE" for op in ops)
        op_names = ", ".join(map(sql_string, ops))
        for first, last in self._selection.windows("tensor_stats", SHOWN, column="tensor"):
            source = self._selection.source("tensor_stats")
            within = f"tensor BETWEEN {sql_string(first)} AND {sql_string(last)}"
            yield (
                f"SELECT {_MOMENT}, {self._identity()} || {sql_label('kind')} || {sql_label('tensor')} || "
                f"'op=\"' || op || '\",' || {extras} AS labels, value, op "
                f"FROM (SELECT {columns}, {unusual} AS shown, unnest([{op_names}]) AS op, "
                f"unnest(range({len(ops)})) AS place, unnest([{values}]) AS value "
                f"FROM {source} AND {SHOWN} AND {within}) "
                f"WHERE value IS NOT NULL ORDER BY {order}, place, {_IN_ORDER}"
            )
            if not suffix:
                self._written(self._selection.count("tensor_stats", f"{SHOWN} AND {within}"))

    def samples(self, metric: str) -> None:
        """Write samples that were scraped from other exporters, with their original names and labels."""
        self._head(metric, "unknown", "")
        source = self._selection.source("samples")
        query = (
            f"SELECT epoch_us(ts) AS us, target, labels, value FROM {source} AND {SHOWN} "
            f"AND metric = {sql_string(metric)} AND value IS NOT NULL ORDER BY target, labels NULLS FIRST, ts"
        )
        texts: dict[tuple[str, str | None], str | None] = {}
        for batch in self._selection.stream(query, BATCH_ROWS):
            keys = list(zip(batch.column("target").to_pylist(), batch.column("labels").to_pylist(), strict=True))
            for key in set(keys) - texts.keys():
                texts[key] = _sample_labels(*key)
            usable = [texts[key] for key in keys]
            self.omitted["samples whose labels cannot be written"] += usable.count(None)
            kept = batch.append_column("text", pa.array(usable, pa.string())).filter(pc.field("text").is_valid())
            series = pc.binary_join_element_wise(metric, kept.column("text"), "")
            self._put(series, kept.column("value"), np.asarray(kept.column("us"), np.int64))
            self._written(batch.num_rows)

    def _identity(self) -> str:
        """Return an SQL expression for the labels that identify a rank in Prometheus."""
        run = self._selection.run
        fixed = label_text({"job": names.JOB, "run": run})
        instance = label_text({"instance": f"{run}/"}).removesuffix('"')
        rank = sql_label("rank")
        behind = sql_string(f'",{fixed},')
        return f"({sql_string(instance)} || coalesce(rank::VARCHAR, '') || {behind} || {rank})"

    def _head(self, family: str, type_: str, help_: str, unit: str | None = None) -> None:
        self.families |= {family, f"{family}_total", f"{family}_info"}
        self._pending = family_head(family, type_, help_, unit)  # written with the first sample, if there is one
        self._last = ("", -1)

    def _write(self, spec: MetricSpec, queries: Iterable[str], *, count: bool = False) -> None:
        """Write a family: the rows of `queries`, which are in the order of the lines of the family."""
        family = spec.name.removesuffix("_total") if spec.type == "counter" else spec.name
        self._head(family, spec.type, spec.help, spec.unit)
        for batch in itertools.chain.from_iterable(self._selection.stream(query, BATCH_ROWS) for query in queries):
            if not batch.num_rows:
                continue
            labels = pc.utf8_slice_codeunits(batch.column("labels"), 0, -1)  # the last comma
            series = pc.binary_join_element_wise(spec.name, "{", labels, "}", "")
            self._put(series, batch.column("value"), self._timeline.micros(batch))
            if count:
                self._written(batch.num_rows)

    def _put(self, series: pa.Array, values: pa.Array, micros: npt.NDArray[np.int64]) -> None:
        """Write samples that are sorted by series and time.

        Of several samples of one series in one millisecond, only the first is written.
        """
        if not len(series):
            return
        ms = micros // (MICROS // 1000)
        names_, times = series.to_pylist(), ms.tolist()
        fresh = np.ones(len(ms), np.bool_)
        fresh[1:] = ms[1:] != ms[:-1]
        if not fresh.all() or (names_[0], times[0]) == self._last:
            before = [self._last, *zip(names_, times, strict=True)]
            fresh = np.fromiter((there != here for there, here in itertools.pairwise(before)), np.bool_)
        self._last = (names_[-1], times[-1])
        doubled = int((~fresh).sum())
        if doubled:
            self.omitted[DOUBLED] += doubled
        mask = pa.array(fresh)
        self._file.write(self._pending + lines(series.filter(mask), values.filter(mask), micros[fresh]))
        self._pending = b""


def _equals(column: str, value: str | None) -> str:
    return f"{column} IS NULL" if value is None else f"{column} = {sql_string(value)}"


def _sample_labels(target: str, labels: str | None) -> str | None:
    """Return the label text `{…}` of a scraped sample, or None if its labels are not valid."""
    own = names.text_labels(labels)
    if own is None or "instance" in own or not all(LABEL_NAME.fullmatch(name) for name in own):
        return None
    return "{" + label_text({**own, **({"instance": target} if target else {})}) + "}"


RANKED: Final = ("tensor_stats", "scalars")
SAMPLES: Final = "samples"
LEFT_OUT: Final = ("events", "features", "histograms", "hashes", "collectives")


class OpenMetrics:
    """Export format `openmetrics`: one text file for `promtool`."""

    name = "openmetrics"
    help = "text for `promtool tsdb create-blocks-from openmetrics FILE DATA`"
    folder = False
    suffix = ".txt"

    def export(
        self, connection: Connection, run: str, target: Path, options: ExportOptions, progress: Progress = no_progress
    ) -> ExportReport:
        """Write `run` as OpenMetrics text to the file `target`. See `ExportFormat.export`."""
        if not run:
            raise ExportError("a run without a name has no label in Prometheus: choose another export format")
        with connection.pinned():
            selection = Selection(connection, run, options)
            counts = {name: selection.count(name, SHOWN) for name in (*RANKED, SAMPLES)}
            omitted = _omitted(selection)
            if not any(counts.values()) and any(selection.count(name) for name in counts):
                raise ExportError(
                    f"run {run} was imported from logs without times, but each sample of Prometheus needs a time: "
                    "choose another export format"
                )
            require_rows(selection, counts)
            timeline = Timeline(selection, RANKED)
            written = count_progress(progress, sum(counts.values()))
            with staged_file(target) as path, path.open("wb") as file:
                writer = FamilyWriter(selection, timeline, file, written)
                _write(writer, selection, file)
            omitted += writer.omitted
        return ExportReport(files=(target,), rows=counts, omitted=omitted)


def _write(writer: FamilyWriter, selection: Selection, file: BinaryIO) -> None:
    writer.info(names.EXPORT, {"run": selection.run, "schema": str(SCHEMA_VERSION)}, RANKED)
    writer.moments(catalogue.STEP, "step", RANKED)
    writer.moments(_ATTEMPT, "attempt", RANKED)
    writer.kind_steps(catalogue.KIND_STEP)
    for spec, scalars in writer.scalar_families():
        writer.scalars(spec, scalars)
    writer.tensors(catalogue.TENSOR_VALUE, names.VALUE_OPS_SHOWN, "")
    writer.tensors(catalogue.TENSOR_BASELINE, names.BASELINES_SHOWN, names.BASELINE_SUFFIX)
    for metric in _sample_metrics(selection):
        if METRIC_NAME.fullmatch(metric) and metric not in writer.families:
            writer.samples(metric)
        else:
            writer.omitted[f"samples of {metric!r}: not a valid metric name"] += 1
    file.write(END)


_ATTEMPT: Final = MetricSpec(name=names.ATTEMPT, type="gauge", help="Attempt of the run at this time.")


def _sample_metrics(selection: Selection) -> Iterator[str]:
    query = f"SELECT DISTINCT metric FROM {selection.source(SAMPLES)} AND {SHOWN} ORDER BY metric"
    yield from selection.query(query)["metric"].to_pylist()


def _omitted(selection: Selection) -> Counter[str]:
    timeless = sum(selection.count(name, f"(ts IS NULL OR NOT {SHOWN})") for name in (*RANKED, SAMPLES))
    found = {"rows without a time": timeless}
    found |= {f"{name}: not a number over time": selection.count(name) for name in LEFT_OUT}
    return Counter(found)


EXPORT_FORMAT = OpenMetrics()
