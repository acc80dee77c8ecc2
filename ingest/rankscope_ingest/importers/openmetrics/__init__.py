"""Import OpenMetrics text, pages of exporters, and the output of `promtool tsdb dump` and `dump-openmetrics`.

Metrics of other exporters become `samples`. Rankscope's metrics (`rankscope_loss`, `rankscope_tensor_value`, …) become
rows of the datasets that they were made from, with the step of their rank at the same time. A dump of several runs is
not separated: everything becomes samples. Dump one run with promtool's `--match '{run="…"}'` instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_contract.metrics import catalogue
from rankscope_ingest.base.tables import table_schema
from rankscope_ingest.importers.common.importer import (
    FROM_FILE,
    NOT_MINE,
    RECORD_COLUMN,
    Detection,
    Faults,
    Imported,
    ImportedBlock,
    ImportedRun,
)
from rankscope_ingest.importers.common.lines import read_lines, shown
from rankscope_ingest.importers.openmetrics.lines import LineError, meaning, parse_series, parse_value, split_series
from rankscope_ingest.importers.openmetrics.pivot import Pivot

_COMMENT: Final = re.compile(r"#\s*(HELP|TYPE|UNIT|EOF)\b")
_END: Final = "# EOF"
_KNOWN_SERIES: Final = 200_000
_SAMPLED_LINES: Final = 200
_MAX_INT32: Final = (1 << 31) - 1


class OpenMetrics:
    """The importer of OpenMetrics text."""

    name = "openmetrics"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Count the lines that are samples, and the TYPE and HELP lines, which raise the confidence."""
        if path.is_dir():
            return NOT_MINE
        text = head.decode("utf-8-sig", "replace")
        # Not splitlines(): a label may contain other characters that Python treats as line ends.
        lines = [line.rstrip("\r") for line in text.split("\n")[:_SAMPLED_LINES] if line.strip()]
        whole = lines[:-1] or lines
        described = sum(bool(_COMMENT.match(line)) for line in whole)
        samples = sum(_is_sample(line) for line in whole if not line.startswith("#"))
        # Many texts have lines of a word and a number, so other lines are accepted only in a file with TYPE lines.
        if not samples + described or samples + described < (0.5 if described else 0.9) * len(whole):
            return NOT_MINE
        if described:
            return Detection(
                0.95, f"{described} TYPE or HELP lines and {samples} samples in its first {len(whole)} lines"
            )
        return Detection(0.85, f"{samples} of its first {len(whole)} lines are samples of metrics")

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield rows in order of time, whatever the order of the file: a grown file yields the same rows first."""
        with Pivot.temporary() as pivot:
            _fill(pivot, path, faults)
            pivot.close()
            runs = pivot.runs()
            yield _facts(pivot, runs)
            if len(runs) <= 1:
                yield from _blocks("scalars", pivot.scalars())
                yield from _blocks("tensor_stats", pivot.tensors())
            yield from _blocks("samples", pivot.samples(with_rankscope=len(runs) > 1))


def _fill(pivot: Pivot, path: Path, faults: Faults) -> None:
    known: dict[str, int] = {}
    ended = False
    for number, raw in read_lines(path, faults):
        line = raw.decode("utf-8", "replace").strip()
        if not line or line.startswith("#"):
            ended = ended or line == _END
            continue
        if ended:
            ended = False
            faults.add(number, f"text after {_END}; it is read nevertheless")
        try:
            series, rest = split_series(line)
            value, ts = parse_value(rest)
            if series not in known:
                if len(known) >= _KNOWN_SERIES:
                    known.clear()  # ids are derived from the text, so a series that returns gets the same id
                known[series] = pivot.series(series, meaning(parse_series(series)))
        except LineError as error:
            faults.add(number, f"{error}: {shown(raw)}")
            continue
        pivot.add(known[series], number, ts, value)


def _blocks(dataset: str, batches: Iterable[pa.RecordBatch]) -> Iterator[ImportedBlock]:
    """Yield the rows of one dataset as blocks. Each dataset is a source, because it may grow independently."""
    schema = table_schema(dataset)
    for batch in batches:
        columns = {RECORD_COLUMN: pa.array(range(batch.num_rows), pa.int32())}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            columns[name] = column.cast(schema.field(name).type)
        origin = pa.array([FROM_FILE] * batch.num_rows, pa.string())
        columns["ts_origin"] = pa.compute.if_else(columns["ts"].is_valid(), origin, pa.scalar(None, pa.string()))
        yield ImportedBlock(records=batch.num_rows, tables={dataset: pa.table(columns)}, source=dataset)


def _facts(pivot: Pivot, runs: list[str]) -> ImportedRun:
    if len(runs) > 1:
        some = ", ".join(runs[:5])
        return ImportedRun(reason=f"contains metrics of {len(runs)} runs ({some}): stored as samples, not separated")
    planned = pivot.greatest(catalogue.STEPS_PLANNED.name)
    worlds = [_world_size(labels) for labels in pivot.label_sets(catalogue.RUN_INFO.name)]
    return ImportedRun(
        planned_steps=None if planned is None or abs(planned) > 1 << 53 else int(planned),
        world_size=max((size for size in worlds if size is not None), default=None),
    )


def _world_size(labels: str) -> int | None:
    text = json.loads(labels).get("world_size", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= _MAX_INT32 else None


def _is_sample(line: str) -> bool:
    try:
        series, rest = split_series(line.strip())
        parse_value(rest)
        parse_series(series)
    except LineError:
        return False
    return True


IMPORTER = OpenMetrics()
