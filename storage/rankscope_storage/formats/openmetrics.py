"""Export as OpenMetrics text with timestamps, from which `promtool` creates Prometheus blocks.

The exported history has the same names and labels as live data. OpenMetrics requires samples ordered by family, series
and time. A run is therefore read once per family and never held in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.catalogue import MetricSpec
from rankscope_storage.base.errors import ExportError
from rankscope_storage.connection import Connection
from rankscope_storage.formats.common.base import (
    ExportOptions,
    ExportReport,
    Progress,
    count_progress,
    no_progress,
    staged_file,
)
from rankscope_storage.formats.common.selection import Selection, require_rows
from rankscope_storage.formats.exposition.text import END, METRIC_NAME, SHOWN, Timeline
from rankscope_storage.formats.exposition.writer import FamilyWriter
from rankscope_storage.prometheus import names

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
        return ExportReport(files=(target,), rows=counts, omitted=dict(omitted))


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
    return Counter({reason: count for reason, count in found.items() if count})


EXPORT_FORMAT = OpenMetrics()
