"""Export as Parquet: one file per dataset with all columns, readable without the store's Delta log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.errors import ExportError
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import Connection
from rankscope_storage.files.encoding import ROW_GROUP_ROWS, counted_columns
from rankscope_storage.formats.export import (
    ExportOptions,
    ExportReport,
    Progress,
    Selection,
    columns,
    count_progress,
    no_progress,
    require_rows,
    staged_folder,
)

_BATCH_ROWS: Final = ROW_GROUP_ROWS


class Parquet:
    """Export format `parquet`: a folder with one file per dataset."""

    name = "parquet"
    help = "a folder with one Parquet file per dataset, all columns"
    folder = True
    suffix = ""

    def export(
        self, connection: Connection, run: str, target: Path, options: ExportOptions, progress: Progress = no_progress
    ) -> ExportReport:
        """Write `<dataset>.parquet` for each dataset that has rows of `run`. See `ExportFormat.export`."""
        if target.is_dir() and any(target.iterdir()):
            raise ExportError(
                f"{target} is not empty: choose another folder, so that the files of two exports do not mix"
            )
        with connection.pinned():
            selection = Selection(connection, run, options)
            counts = {name: selection.count(name) for name in DATASETS}
            require_rows(selection, counts)
            present = [name for name, count in counts.items() if count]
            written = count_progress(progress, sum(counts.values()))
            with staged_folder(target) as folder:
                for name in present:
                    _write(selection, name, folder / f"{name}.parquet", written)
        files = tuple(target / f"{name}.parquet" for name in present)
        return ExportReport(files=files, rows={name: counts[name] for name in present})


def _write(selection: Selection, dataset: str, path: Path, written: Callable[[int], None]) -> None:
    schema = dataset_schema(dataset)
    query = f"SELECT {columns(dataset)} FROM {selection.source(dataset)}"
    footer = list(counted_columns(dataset))
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, write_statistics=footer) as writer:
        for batch in selection.stream(query, _BATCH_ROWS):
            # DuckDB gives the items of lists other names; the cast restores the names of the schema.
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
            written(batch.num_rows)


EXPORT_FORMAT = Parquet()
