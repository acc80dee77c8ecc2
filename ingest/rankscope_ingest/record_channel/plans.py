"""The names behind a record's numbers, turned into Arrow columns once per plan and kept for all ranks that share it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankscope_contract.model.schema import Plan, PlanEntry, plan_hash
from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.base.tables import coded_schema, rows_table

NAME_COLUMNS: Final = ("kind", "tensor", "index", "placement", "shard_group", "call_seq", "vpp_stage", "micro_step")
"""Columns of `tensor_stats` that a plan supplies."""

KEPT_PLANS: Final = 256

ASKED_AT_ONCE: Final = 4
"""Ranks that are asked for a plan at the same time: a thousand that begin together mostly share theirs."""


class PlanColumns:
    """One plan as columns. `order` sorts its entries as the store does; `sorted_columns` are their names so sorted."""

    def __init__(self, plan: Plan) -> None:
        self.entries: tuple[PlanEntry, ...] = plan.entries
        self.value_ops, self.count_ops = plan.value_ops, plan.count_ops
        ordered = sorted(range(len(plan.entries)), key=lambda number: _sort_key(plan.entries[number]))
        self.order: npt.NDArray[np.intp] = np.array(ordered, np.intp)
        schema = coded_schema("tensor_stats")
        self.sorted_columns: dict[str, pa.Array] = {
            name: _column([getattr(plan.entries[number], name) for number in ordered], schema.field(name).type)
            for name in NAME_COLUMNS
        }

    def __len__(self) -> int:
        return len(self.entries)

    def dimension_rows(self, common: Callable[[], dict[str, Any]]) -> pa.Table:
        """Return the plan as rows of `tensors`; `common` gives run, attempt, rank and the like of the next row."""
        return rows_table("tensors", (common() | _dimension(entry) for entry in self.entries))


def _sort_key(entry: PlanEntry) -> tuple[str, str]:
    return entry.tensor, entry.kind


def _column(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(arrow_type):
        return pa.array(values, arrow_type.value_type).dictionary_encode()
    return pa.array(values, arrow_type)


def _dimension(entry: PlanEntry) -> dict[str, Any]:
    numel = 1
    for size in entry.shape:
        numel *= size
    return {
        "kind": entry.kind,
        "tensor": entry.tensor,
        "index": entry.index,
        "vpp_stage": entry.vpp_stage,
        "shape": list(entry.shape),
        "dtype": entry.dtype or None,
        "numel": numel if entry.dtype else None,  # a plan that tells no dtype tells no shape either
        "module": entry.module,
        "aliases": list(entry.aliases),
    }


class PlanCache:
    """Plans by hash, the longest unused leaving first. Plans never change, so a hit is always right."""

    def __init__(self, size: int = KEPT_PLANS) -> None:
        self._size = size
        self._plans: OrderedDict[str, PlanColumns] = OrderedDict()
        self.asking = asyncio.Semaphore(ASKED_AT_ONCE)

    def get(self, plan_id: str) -> PlanColumns | None:
        """Return the plan, or None when it has to be fetched."""
        if plan_id in self._plans:
            self._plans.move_to_end(plan_id)
        return self._plans.get(plan_id)

    def add(self, plan_id: str, text: str) -> PlanColumns:
        """Keep and return the plan in `text`. Raises DecodeError when the text does not have this hash."""
        if plan_hash(text) != plan_id:
            raise DecodeError(f"plan {plan_id} does not have the hash under which the rank serves it")
        try:
            columns = PlanColumns(Plan.from_json(text))
        except (ValueError, pa.ArrowException, OverflowError, TypeError) as error:
            raise DecodeError(f"plan {plan_id}: {error}") from error
        self._plans[plan_id] = columns
        while len(self._plans) > self._size:
            self._plans.popitem(last=False)
        return columns
