"""Convert imported records to rows of the store, each with its sequence number and its place on the axis of the run.

Usually, the position is the step. If the steps of a log restart with each epoch, the last steps of the earlier epochs
are added. A record without a step has the position of the record before it plus 1. If such records do not fit between
two steps, or if the log has no steps, the positions are numbers of records, after those of earlier logs of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.base.tables import cleaned, constant, table_schema
from rankscope_ingest.importers.common.decisions import LOSS
from rankscope_ingest.importers.common.importer import RECORD_COLUMN, ImportedBlock
from rankscope_ingest.importers.common.log_names import EPOCH

Integers = npt.NDArray[np.int64]


class Positions:
    """The axis of one log, from its first record on.

    Earlier records determine the axis of later ones. Records that are stored together are placed together: the first
    ones of a log may be placed by a record that follows them.
    """

    def __init__(self, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        """Continue behind the logs of the run whose `state` is in `earlier`."""
        self._epochs: dict[int, tuple[int, int]] = {}  # first and last step of the training
        self._restarts = False  # steps restart with each epoch
        self._has_loss = False
        self._epoch: int | None = None  # of the newest record with an epoch
        self._trained: tuple[int, int] | None = None  # attempt and epoch of the newest record of the training
        self._before = 0  # highest number of a record of an earlier log
        self._has_steps = False
        self._has_stepless = False
        self._is_numbered = False  # from now on, positions are numbers of records
        self._last: dict[int | None, int] = {}  # the newest position of each rank
        self._stepless: dict[tuple[Any, ...], int] = {}  # position of the last record of a scalar, if it has no step
        for state in earlier:
            self._restarts |= bool(state["restarts"])
            self._before = max(self._before, int(state["records"]))
            for epoch, first, last in state["epochs"]:
                self._see(int(epoch), int(first), int(last))

    @property
    def state(self) -> dict[str, Any]:
        """The facts that the axis of a later log of the run depends on, as a JSON object."""
        epochs = [[epoch, first, last] for epoch, (first, last) in sorted(self._epochs.items())]
        is_numbered = self._is_numbered or not self._has_steps
        numbers = max(self._last.values(), default=0) if is_numbered else 0
        return {"epochs": epochs, "restarts": self._restarts, "records": max(numbers, self._before)}

    def placed(self, scalars: pa.Table) -> pa.Table:
        """Return the next rows of the log with the column `position`; it is null in all rows if the steps are it."""
        steps = scalars.column("step")
        is_epoch = pc.any(pc.equal(scalars.column("name"), EPOCH)).as_py()
        if not (steps.null_count or self._has_stepless or self._restarts or is_epoch):
            self._has_steps = True
            self._last[scalars.column("rank")[-1].as_py()] = steps[-1].as_py()
            return scalars
        order = np.argsort(scalars.column("seq").to_numpy(), kind="stable")
        rows = scalars.take(order)
        seq, has_step = rows.column("seq").to_numpy(), rows.column("step").is_valid().to_numpy()
        position = rows.column("step").fill_null(0).to_numpy().copy()
        self._see_epochs(rows, seq, position)
        position += self._steps_before(rows, seq)
        if self._has_stepless or not has_step.all():
            position = self._between_steps(rows, seq, position, has_step)
        else:
            self._last[rows.column("rank")[-1].as_py()] = int(position[-1])
        self._has_steps |= bool(has_step.any())
        placed = np.empty_like(position)
        placed[order] = position
        return scalars.set_column(scalars.schema.get_field_index("position"), "position", pa.array(placed))

    def _see_epochs(self, scalars: pa.Table, seq: Integers, step: Integers) -> None:
        """Note the steps of each epoch, and whether they restart.

        An evaluation may count its own batches: if the log has a loss, the steps of the loss decide.
        """
        is_epoch = self._epoch_rows(scalars)
        if not is_epoch.any():
            return
        of_loss = seq[pc.equal(scalars.column("name"), LOSS).to_numpy(zero_copy_only=False)]
        trained = is_epoch & np.isin(seq, of_loss)
        self._has_loss |= bool(trained.any())
        chosen = np.flatnonzero(trained if self._has_loss else is_epoch)
        if not len(chosen):
            return
        attempt = scalars.column("attempt").fill_null(0).to_numpy()[chosen]
        epoch, step = self._floor(scalars, chosen), step[chosen]
        begins = np.flatnonzero(np.diff(epoch, prepend=epoch[:1] - 1) | np.diff(attempt, prepend=attempt[:1]))
        for first, last in zip(begins.tolist(), [*begins[1:].tolist(), len(epoch)], strict=True):
            part, key = step[first:last], (int(attempt[first]), int(epoch[first]))
            before = self._trained
            if before is not None and before[0] == key[0] and before[1] < key[1]:
                self._restarts |= int(part.min()) <= self._epochs[before[1]][1]
            self._see(key[1], int(part.min()), int(part.max()))
            self._trained = key

    def _see(self, epoch: int, first: int, last: int) -> None:
        known = self._epochs.get(epoch, (first, last))
        self._epochs[epoch] = min(known[0], first), max(known[1], last)

    def _steps_before(self, scalars: pa.Table, seq: Integers) -> Integers:
        """Return, for each row, the number of steps of the epochs before that of its record."""
        rows = np.flatnonzero(self._epoch_rows(scalars))
        epochs = self._floor(scalars, rows)
        place = np.searchsorted(seq[rows], seq, side="right")
        current = np.concatenate(([-1 if self._epoch is None else self._epoch], epochs))
        self._epoch = self._epoch if not len(rows) else int(epochs[-1])
        if not self._restarts:
            return np.zeros(len(seq), np.int64)
        begins_at_0 = int(min(first for first, _ in self._epochs.values()) == 0)
        before, total = {}, 0
        for epoch, (_, last) in sorted(self._epochs.items()):
            before[epoch] = total
            total += last + begins_at_0
        return np.array([before.get(epoch, 0) for epoch in current.tolist()], np.int64)[place]

    @staticmethod
    def _epoch_rows(scalars: pa.Table) -> npt.NDArray[np.bool_]:
        found = pc.and_(pc.equal(scalars.column("name"), EPOCH), pc.is_finite(scalars.column("value")))
        rows: npt.NDArray[np.bool_] = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
        rows &= scalars.column("step").is_valid().to_numpy()
        return rows

    @staticmethod
    def _floor(scalars: pa.Table, rows: Integers) -> Integers:
        values = scalars.column("value").to_numpy(zero_copy_only=False)[rows]
        epochs: Integers = np.floor(values).astype(np.int64)
        return epochs

    def _between_steps(
        self, rows: pa.Table, seq: Integers, position: Integers, has_step: npt.NDArray[np.bool_]
    ) -> Integers:
        """Return the positions of rows of which some have no step."""
        is_begin, self._has_stepless = not self._last, True
        if not self._has_steps and not has_step.any():
            self._last[None] = self._before + int(seq[-1]) + 1
            return self._before + seq + 1
        ranks, *others = (rows.column(name).to_pylist() for name in ("rank", "attempt", "name", "labels"))
        series = list(zip(ranks, *others, strict=True))
        begins = np.flatnonzero(np.diff(seq, prepend=-1))
        ends = np.append(begins[1:], len(seq))
        if is_begin:  # the records before the first step are directly before it
            first = int(np.argmax(has_step[begins]))
            self._last = dict.fromkeys(ranks, int(position[begins[first]]) - first - 1)
        placed = np.empty(len(seq), np.int64)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            at = self._place(series[begin:end], int(position[begin]) if has_step[begin] else None)
            placed[begin:end] = self._last[ranks[begin]] = at
        # Records that are not the beginning keep the positions that they have, and later ones are behind them.
        return self._before + seq + 1 if is_begin and self._is_numbered else placed

    def _place(self, series: Sequence[tuple[Any, ...]], step: int | None) -> int:
        """Return the position of a record with rows of these series."""
        if step is not None and not self._is_numbered:
            self._is_numbered = max(self._stepless.pop(one, step - 1) for one in series) >= step
            if not self._is_numbered:
                return step
        at: int = self._last.get(series[0][0], self._before) + 1
        if step is None:
            self._stepless |= dict.fromkeys(series, at)
        return at


_CODED: Final = pa.dictionary(pa.int32(), pa.string())


class Numbering:
    """Numbers the records of one source, and adds to their rows the columns that are equal in all rows.

    A source is a log file, or a file or a rank of a log folder. Each source is one incarnation in the store.
    """

    def __init__(self, *, run: str, incarnation: str, positions: Positions | None = None) -> None:
        self.run = run
        self.incarnation = incarnation
        self.records = 0
        self.positions = positions or Positions()

    def block(self, block: ImportedBlock) -> dict[str, pa.Table]:
        """Return the tables of `block` with all columns of their datasets.

        Each record gets the next sequence number of the source. The next call continues after the sequence number of
        the last record of this call.
        """
        arrived = time.time_ns() // 1000
        tables = {
            name: _clean(self._full(name, table, arrived)) for name, table in block.tables.items() if table.num_rows
        }
        self.records += block.records
        if "scalars" in tables:
            tables["scalars"] = self.positions.placed(tables["scalars"])
        return tables

    def _full(self, dataset: str, table: pa.Table, arrived: int) -> pa.Table:
        """Return `table` with all columns of `dataset`; columns that the table lacks are null.

        Text columns may be dictionary-encoded.
        """
        count = table.num_rows
        seq = pc.add(pc.cast(table.column(RECORD_COLUMN), pa.int64()), self.records)
        given = {name: table.column(name) for name in table.column_names if name != RECORD_COLUMN}
        given |= {
            "run": constant(self.run, count),
            "incarnation": constant(self.incarnation, count),
            "seq": seq,
            "ordinal": pc.add(seq, arrived),
            "attempt": pc.fill_null(given["attempt"], 0) if "attempt" in given else pa.array(np.zeros(count, np.int32)),
        }
        schema = table_schema(dataset)
        if unknown := given.keys() - set(schema.names):
            raise KeyError(f"dataset {dataset} has no columns {sorted(unknown)}, which the importer returned")
        columns, fields = [], []
        for field in schema:
            column = given.get(field.name)
            if column is None:
                column = pa.nulls(count, _CODED if pa.types.is_string(field.type) else field.type)
            elif not pa.types.is_dictionary(column.type):
                column = pc.cast(column, field.type)
            columns.append(column)
            fields.append(field.with_type(column.type))
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _clean(table: pa.Table) -> pa.Table:
    """Return `table` with secrets masked in its texts, and long texts cut."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_dictionary(field.type):
            table = table.set_column(place, field, cleaned(table.column(place).combine_chunks(), field.name))
    return table
