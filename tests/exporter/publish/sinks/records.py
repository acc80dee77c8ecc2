"""Records for sinks, made from a few numbers, and the rows that the importer reads of their output."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope_contract.model.identity import Identity
from rankscope_contract.model.kinds import COUNT_OPS
from rankscope_contract.model.schema import WIRE_VALUE_OPS, Plan, PlanEntry
from rankscope_exporter.records.plan import NamedPlan
from rankscope_exporter.records.record import Statistics, StepRecord
from rankscope_ingest.importers import importers
from rankscope_ingest.importers.common.importer import Faults, ImportedBlock

Numbers = Mapping[str, float | None]
FINITE: dict[str, float | None] = {"norm": 5.0, "min": -3.0, "max": 4.0, "mean": 0.5}
FINITE |= {"nans": 0, "infs": 0, "zeros": 1, "numel": 4}
ABSENT: dict[str, float | None] = dict.fromkeys(FINITE)


def identity(rank: int = 0) -> Identity:
    return Identity(run="r", launch_id="l", rank=rank, world_size=rank + 1, incarnation="5eed5eed" * 4)


def entry(tensor: str = "w", kind: str = "grad_reduced", **others: Any) -> PlanEntry:
    return PlanEntry(kind=kind, tensor=tensor, **{"shape": (4,), "dtype": "float32", **others})


def statistics(rows: Sequence[tuple[PlanEntry, Numbers]]) -> Statistics:
    values = [numbers.get(op) for op in WIRE_VALUE_OPS for _, numbers in rows]
    counts = [numbers.get(op) for op in COUNT_OPS for _, numbers in rows]
    plan = NamedPlan.of(Plan(tuple(entry for entry, _ in rows)))
    return Statistics(plan, pa.array(values, pa.float32()), pa.array(counts, pa.int64()))


def record(step: int | None, *rows: tuple[PlanEntry, Numbers], **others: Any) -> StepRecord:
    return StepRecord(ts=0, step=step, statistics=statistics(rows) if rows else None, **others)


def imported(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], Faults]:
    """Return the rows of each dataset, as dictionaries without nulls, and the faults."""
    faults = Faults()
    rows: dict[str, list[dict[str, Any]]] = {}
    for item in importers()["msprobe"].read(folder, faults):
        for name, table in item.tables.items() if isinstance(item, ImportedBlock) else ():
            rows.setdefault(name, []).extend(table.to_pylist())
    return rows, faults
