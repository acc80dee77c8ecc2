"""Keep the rows of a log apart from the rows that the ranks of the same run reported.

Rows of a log never replace rows of ranks. The scalars of the log get the label `imported_from`, which the scalars of
the ranks do not have. Rows of the log in other datasets cannot be distinguished by a label and are left out, except
events and samples.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.log_identity import any_of
from rankscope_storage.base.datasets import IMPORT_PREFIX, IMPORTED_FROM
from rankscope_storage.connection import Connection

_KEPT: Final = ("scalars", "events", "samples")
_BY_STATE: Final = """\
SELECT run FROM attempts_history WHERE {condition} AND source_kind = 'live'
UNION SELECT run FROM runs_history WHERE {condition} AND source_kind = 'live'
"""
_BY_SCALARS: Final = "SELECT DISTINCT run FROM scalars WHERE {condition} AND NOT starts_with(incarnation, $prefix)"


def is_live(connection: Connection, run: str) -> bool:
    """Return whether the store contains data of `run` that its ranks reported, now or earlier."""
    return run in live_runs(connection, [run])


def live_runs(connection: Connection, runs: Collection[str]) -> frozenset[str]:
    """Return those of `runs` of which the store contains data that their ranks reported, now or earlier."""
    found: set[str] = set()
    # The second query reads many rows, and is needed only for runs that the first one has not found.
    for query, more in ((_BY_STATE, {}), (_BY_SCALARS, {"prefix": IMPORT_PREFIX})):
        if others := [run for run in runs if run not in found]:
            condition, parameters = any_of(others)
            rows = connection.query(query.format(condition=condition), parameters | more)
            found.update(rows["run"].to_pylist())
    return frozenset(found)


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
