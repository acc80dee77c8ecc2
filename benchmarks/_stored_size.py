"""Bytes of a sample in a store: whole files divided by six changing numbers per row, and the bytes of each column."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
from _noise import SIX

_TAGS = ("ts", "step", "run", "rank", "kind", "tensor")


def prototype(paths: Iterable[Path]) -> float:
    """Return the bytes of a sample as the first prototype wrote them: its columns, encodings and row groups."""
    size, rows = 0, 0
    for path in paths:
        table = pq.ParquetFile(path).read().select([*_TAGS, *SIX])
        kept = io.BytesIO()
        encodings = dict.fromkeys(SIX[:4], "BYTE_STREAM_SPLIT") | dict.fromkeys(
            ("ts", "step", *SIX[4:]), "DELTA_BINARY_PACKED"
        )
        pq.write_table(
            table,
            kept,
            row_group_size=122_880,
            compression="zstd",
            compression_level=1,
            use_dictionary=["run", "rank", "kind", "tensor"],
            column_encoding=encodings,
        )
        size, rows = size + kept.tell(), rows + table.num_rows
    return size / (len(SIX) * rows)


def stored_files(root: Path) -> list[Path]:
    """Return the files of tensor statistics in the store at `root`, replaced ones too."""
    return list(root.glob("dataset=tensor_stats/*/*.parquet"))


def bytes_per_sample(paths: Iterable[Path]) -> float:
    """Return the bytes of all of the files, every column and the footer, for each of six samples a row."""
    sizes = [(path.stat().st_size, pq.read_metadata(path).num_rows) for path in paths]
    return sum(size for size, _ in sizes) / (len(SIX) * sum(rows for _, rows in sizes))


def dearest(paths: Iterable[Path]) -> list[tuple[str, float]]:
    """Return the dearest columns, in bytes a row."""
    sizes: Counter[str] = Counter()
    rows = 0
    for path in paths:
        metadata = pq.read_metadata(path)
        rows += metadata.num_rows
        for group in range(metadata.num_row_groups):
            for place in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(place)
                sizes[chunk.path_in_schema] += chunk.total_compressed_size
    return [(name, size / rows) for name, size in sizes.most_common(8)]
