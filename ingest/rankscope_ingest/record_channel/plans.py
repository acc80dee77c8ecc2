"""Plans as Arrow columns. A plan lists the tensors and statistics to which the numbers of a record refer.

Each plan is converted once and shared by all ranks that use it.
"""

from __future__ import annotations

import asyncio
import math
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
"""Columns of `tensor_stats` whose values come from the plan and not from the record."""

KEPT_PLANS: Final = 256

MAX_CONCURRENT_REQUESTS: Final = 4
"""Maximum number of concurrent plan requests.

A low limit is sufficient, because a thousand ranks that start together mostly use the same plan.
"""


class PlanColumns:
    """One plan as Arrow columns.

    `order` has the indices that sort the entries of the plan by tensor and then by kind, as in the store.
    `sorted_columns` has the columns of the plan in this order.
    """

    def __init__(self, plan: Plan) -> None:
        self.entries: tuple[PlanEntry, ...] = plan.entries
        self.value_ops, self.count_ops = plan.value_ops, plan.count_ops
        ordered = sorted(
            range(len(plan.entries)), key=lambda number: (plan.entries[number].tensor, plan.entries[number].kind)
        )
        self.order: npt.NDArray[np.intp] = np.array(ordered, np.intp)
        schema = coded_schema("tensor_stats")
        self.sorted_columns: dict[str, pa.Array] = {
            name: _column([getattr(plan.entries[number], name) for number in ordered], schema.field(name).type)
            for name in NAME_COLUMNS
        }
        self._dimensions = rows_table("tensors", map(_dimension, plan.entries))  # here: a wrong plan is refused

    def __len__(self) -> int:
        return len(self.entries)

    def dimension_rows(self, common: Callable[[], dict[str, Any]]) -> pa.Table:
        """Return the entries of the plan as rows of `tensors`.

        `common` is called for each row and returns the values of the columns that are not from the plan, such as the
        run.
        """
        rows, table = [common() for _ in self.entries], self._dimensions
        for name in rows[0] if rows else ():
            place, field = table.column_names.index(name), table.schema.field(name)
            table = table.set_column(place, field, pa.array([row[name] for row in rows], field.type))
        return table


def _column(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(arrow_type):
        return pa.array(values, arrow_type.value_type).dictionary_encode()
    return pa.array(values, arrow_type)


def _dimension(entry: PlanEntry) -> dict[str, Any]:
    has_shape = bool(entry.dtype) and not entry.shape_varies  # without a dtype, a plan has no shape either
    return {
        "kind": entry.kind,
        "tensor": entry.tensor,
        "index": entry.index,
        "vpp_stage": entry.vpp_stage,
        "shape": None if entry.shape_varies else list(entry.shape),
        "dtype": entry.dtype or None,
        "numel": math.prod(entry.shape) if has_shape else None,
        "module": entry.module,
        "aliases": list(entry.aliases),
    }


class PlanCache:
    """A cache of plans by hash. If it is full, the least recently used plan is evicted.

    A plan with a given hash never changes, so cached plans remain valid.
    """

    def __init__(self, size: int = KEPT_PLANS) -> None:
        self._size = size
        self._plans: OrderedDict[str, PlanColumns] = OrderedDict()
        self.requests = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    def get(self, plan_id: str) -> PlanColumns | None:
        """Return the plan with the hash `plan_id`, or None if it is not cached and must be requested."""
        if plan_id in self._plans:
            self._plans.move_to_end(plan_id)
        return self._plans.get(plan_id)

    def add(self, plan_id: str, text: str) -> PlanColumns:
        """Add the plan in `text` to the cache and return it.

        Raises DecodeError if the hash of the text is not `plan_id`, or if the text is not a plan.
        """
        if plan_hash(text) != plan_id:
            raise DecodeError(f"plan {plan_id}: the received text has another hash than the plan id")
        try:
            columns = PlanColumns(Plan.from_json(text))
        except (ValueError, pa.ArrowException, OverflowError, TypeError) as error:
            raise DecodeError(f"plan {plan_id} cannot be parsed: {error}") from error
        self._plans[plan_id] = columns
        while len(self._plans) > self._size:
            self._plans.popitem(last=False)
        return columns
