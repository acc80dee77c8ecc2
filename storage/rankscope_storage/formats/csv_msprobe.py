"""Export as CSV files in msprobe's layout, for msprobe's scripts and for scripts that read msprobe's files.

There is one folder for each rank of each attempt. Its name consists of the start time of the attempt, the rank, the
number of the attempt, and a hash of the run's name. The name is the same in every export, so that a second export of a
run adds rows to the folders of the first. The option `append_output` has two times. With it, the rows of a rank are
instead added to its latest folder with a time between these two in the folder name. The rows of a step then come from
the latest attempt of this step. In the files, a name that a spreadsheet would read as a formula starts with an
apostrophe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rankscope_msprobe.files.csv_layout import (
    FEATURES,
    MICRO_STEP_FAMILIES,
    SCALAR_COLUMNS,
    SCALARS,
    TENSOR_COLUMNS,
    TENSOR_FAMILIES,
)
from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.escaping import sql_string
from rankscope_storage.connection import Connection
from rankscope_storage.formats.common.base import ExportOptions, ExportReport, Progress, no_progress
from rankscope_storage.formats.common.selection import Selection, require_rows
from rankscope_storage.formats.msprobe.folders import Stream, streams, write_family
from rankscope_storage.formats.msprobe.rows import (
    FEATURE_COLUMNS,
    MsprobeSteps,
    descriptions,
    feature_cells,
    scalar_cells,
    tensor_cells,
)

HELD: Final = ("tensor_stats", "features", "scalars")
"""Datasets whose rows msprobe's layout can contain."""

ALREADY_THERE: Final = "rows that the files already contain"
HIDDEN: Final = "rows replaced by another row of the same step and name (an earlier attempt or call)"

_COUNTED: Final = ("events", "histograms", "hashes", "collectives")


class CsvMsprobe:
    """Export format `csv`: CSV files in the folder layout of msprobe."""

    name = "csv"
    help = "a folder per rank with CSV files per family and step, as the msprobe monitor writes them"
    folder = True
    suffix = ""

    def export(
        self, connection: Connection, run: str, target: Path, options: ExportOptions, progress: Progress = no_progress
    ) -> ExportReport:
        """Write the rows of `run` below `target`. See `ExportFormat.export`.

        Rows that an earlier export wrote to the same folders are not written again.
        """
        with connection.pinned():
            selection = Selection(connection, run, options)
            require_rows(selection, {name: selection.count(name) for name in HELD})
            files: list[Path] = []
            rows: Counter[str] = Counter()
            repeated: Counter[str] = Counter()
            try:
                listed = streams(selection, target)
                for done, stream in enumerate(listed, 1):
                    for dataset, path, new, old in _write_folder(selection, stream):
                        files += [path] if new else []
                        rows[dataset] += new
                        repeated[dataset] += old
                    progress(done, len(listed))  # streams instead of rows: they have about equally many
            except OSError as error:
                raise ExportError(f"cannot write to {target}: {error.strerror or error}") from error
            omitted = _omitted(selection, rows + repeated)
        omitted[ALREADY_THERE] = repeated.total()
        return ExportReport(files=tuple(files), rows=rows, omitted=omitted)


def _write_folder(selection: Selection, stream: Stream) -> Iterator[tuple[str, Path, int, int]]:
    """Write the folder of one rank; yield for each file its dataset, path and numbers of new and of repeated rows."""
    numbering = MsprobeSteps.of(selection.connection, selection.run)
    described = descriptions(selection.connection, selection.run)
    stream.folder.mkdir(parents=True, exist_ok=True)
    for dataset in HELD:
        only = stream.only(selection, dataset)
        present = _kinds(selection, dataset, only)
        for family, kinds in _families(dataset).items():
            if not present.keys() & kinds:
                continue
            columns: Sequence[str]
            if dataset == SCALARS:
                columns, cells = SCALAR_COLUMNS, scalar_cells(selection, only, numbering)
            elif dataset == "features":
                columns = tuple(FEATURES[family].columns) if family in FEATURES else TENSOR_COLUMNS
                cells = feature_cells(selection, family, only, numbering)
            else:
                columns, cells = TENSOR_COLUMNS, tensor_cells(selection, family, only, numbering, described)
            steps = selection.options.step_count_per_record
            micro_steps = family in MICRO_STEP_FAMILIES or any(present.get(kind) for kind in kinds)
            for file in write_family(stream.folder, family, columns, cells, steps=steps, micro_steps=micro_steps):
                yield dataset, *file


def _kinds(selection: Selection, dataset: str, only: str) -> dict[str, bool]:
    """Return a mapping with each kind that has rows; its value is true if the kind has rows of micro-batches.

    Scalars have no kind and are under the key `scalars`.
    """
    kind = sql_string(SCALARS) if dataset == SCALARS else "kind"
    rows = selection.query(
        f"SELECT {kind} AS kind, bool_or(micro_step IS NOT NULL) AS micro FROM {selection.source(dataset)} "
        f"AND {only} GROUP BY ALL"
    )
    return dict(zip(rows["kind"].to_pylist(), rows["micro"].to_pylist(), strict=True))


def _families(dataset: str) -> dict[str, frozenset[str]]:
    if dataset == SCALARS:
        return {SCALARS: frozenset([SCALARS])}
    if dataset == "tensor_stats":
        return {family: frozenset(map(str, kinds)) for family, kinds in TENSOR_FAMILIES.items()}
    return {family: frozenset(columns.values()) for family, columns in FEATURE_COLUMNS.items()}


def _omitted(selection: Selection, placed: Counter[str]) -> Counter[str]:
    """Return the numbers of rows that msprobe's layout cannot contain, by reason."""
    omitted: Counter[str] = Counter()
    for dataset in _COUNTED:
        omitted[f"{dataset}: not in msprobe's layout"] = selection.count(dataset)
    omitted["rows without a step"] = sum(selection.count(name, "step IS NULL") for name in HELD)
    known = ", ".join(sql_string(kind) for kinds in _families("features").values() for kind in sorted(kinds))
    omitted["features that msprobe does not have"] = selection.count("features", f"kind NOT IN ({known})")
    tensors = ", ".join(sql_string(kind) for kinds in _families("tensor_stats").values() for kind in sorted(kinds))
    unknown = selection.count("tensor_stats", f"step >= 0 AND kind NOT IN ({tensors})")
    omitted["tensors of kinds that msprobe does not have"] = unknown
    omitted["rows before the first step"] = sum(selection.count(name, "step < 0") for name in HELD)
    omitted[HIDDEN] = selection.count("tensor_stats", "step >= 0") - unknown - placed["tensor_stats"]
    return omitted


EXPORT_FORMAT = CsvMsprobe()
