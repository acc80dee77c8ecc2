"""Keep the rows of a log apart from the rows that the ranks of the same run reported.

Rows of a log never replace rows of ranks. The scalars of the log get the label `imported_from`, which the scalars of
the ranks do not have. Rows of the log in other datasets cannot be distinguished by a label and are left out, except
events and samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_contract.model.schema import IMPORT_PREFIX, IMPORTED_FROM, canonical_labels
from rankscope_storage.connection import Connection

_KEPT: Final = ("scalars", "events", "samples")
_LIVE: Final = """\
SELECT 1 FROM attempts_history WHERE run = $run AND source_kind = 'live'
UNION ALL SELECT 1 FROM runs_history WHERE run = $run AND source_kind = 'live'
UNION ALL SELECT 1 FROM scalars WHERE run = $run AND NOT starts_with(incarnation, $prefix)
LIMIT 1
"""


def is_live(connection: Connection, run: str) -> bool:
    """Return whether the store contains data of `run` that its ranks reported, now or earlier."""
    return bool(connection.query(_LIVE, {"run": run, "prefix": IMPORT_PREFIX}).num_rows)


def label_of(path: Path) -> str:
    """Return the value of the label `imported_from` for the log at `path`: the last two parts of the path."""
    return "/".join(path.absolute().parts[-2:]).encode(errors="replace").decode()


def kept_apart(tables: Mapping[str, pa.Table], imported_from: str) -> tuple[dict[str, pa.Table], int]:
    """Return the rows of a log that can be stored next to rows of ranks, and the number of the log's other rows."""
    kept = {name: table for name, table in tables.items() if name in _KEPT}
    if "scalars" in kept:
        kept["scalars"] = _labelled(kept["scalars"], imported_from)
    return kept, sum(table.num_rows for name, table in tables.items() if name not in _KEPT)


def _labelled(scalars: pa.Table, imported_from: str) -> pa.Table:
    column = scalars.column("labels").combine_chunks().cast(pa.string()).dictionary_encode(null_encoding="encode")
    texts = [
        canonical_labels({**json.loads(text or "{}"), IMPORTED_FROM: imported_from})
        for text in column.dictionary.to_pylist()
    ]
    labels = pa.DictionaryArray.from_arrays(column.indices, pa.array(texts, pa.string()))
    field = scalars.schema.field("labels")
    return scalars.set_column(scalars.schema.names.index("labels"), field, labels.cast(field.type))
