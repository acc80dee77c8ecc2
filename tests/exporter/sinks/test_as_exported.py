"""Tests that the live CSV of a run and an export of the same run from the store have the same files and rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow as pa
from tests.exporter.sinks.records import FINITE, Numbers, entry, identity, record

from rankscope_contract.model.kinds import COUNT_OPS, Kind
from rankscope_contract.model.schema import WIRE_VALUE_OPS, PlanEntry
from rankscope_exporter.records.step_record import Scalar
from rankscope_exporter.sinks.csv_msprobe import Csv, CsvOptions
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.formats import ExportOptions, export_formats

ROWS: tuple[tuple[PlanEntry, Numbers], ...] = (
    *((entry("w" if kind.startswith(("grad", "param")) else "m", kind), FINITE) for kind in Kind),
    (entry("layers.0", Kind.ACT_IN, index=2, micro_step=1, vpp_stage=1), FINITE | {"mean": 1e-9, "norm": 1e30}),
    *(
        (entry("all_gather@a/b.py[7]", Kind.COMM_OUT, index=index, call_seq=call_seq), FINITE | {"norm": 7.5 + index})
        for call_seq in (None, 1, 2)
        for index in (0, 1)
    ),
    (entry('=a,"b"', Kind.GRAD_REDUCED, dtype="bfloat16"), FINITE | {"infs": 1}),
    (entry("n", Kind.GRAD_REDUCED), FINITE | {"nans": 1}),
    (entry("other", Kind.GRAD_REDUCED, shape=(7,)), FINITE),
    (entry("w", Kind.GRAD_UNREDUCED, micro_step=1), FINITE | {"norm": 0.1}),
)
FEATURES = (
    {"kind": "attention_entropy", "module": "core", "index": 0, "value": 0.1, "micro_step": 1},
    {"kind": "softmax_max", "module": "core", "index": 0, "value": 0.3, "micro_step": 1},
    {"kind": "stable_rank", "module": "head", "index": None, "value": 2.0, "micro_step": None},
    {"kind": "direction_agreement", "module": "w", "index": None, "value": 0.75, "micro_step": None},
)
SCALARS = (
    Scalar("loss", 2.5),
    Scalar("learning_rate", 1e-05, labels={"group": 'a"b', "b": "1,5"}),
    Scalar("=x", float("nan"), unit="s"),
)
ENTRY = ("kind", "tensor", "index", "micro_step", "vpp_stage", "call_seq", "placement", "shard_group")


def read(folder: Path) -> dict[str, list[list[str]]]:
    """Return the header and the sorted rows of each file in the only folder below `folder`."""
    (own,) = folder.iterdir()
    read = {}
    for path in own.iterdir():
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        read[path.name] = [header, *sorted([_number(cell) for cell in row] for row in rows)]
    return read


def _number(cell: str) -> str:
    """Return numbers in one spelling: both programs write the shortest exact text, one of them as 1e-05."""
    try:
        return repr(float(cell))
    except ValueError:
        return cell


def exported(folder: Path, steps: int) -> Path:
    """Store the rows as the service does, and export them."""
    own = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i"}
    tables: dict[str, list[dict[str, object]]] = {"tensor_stats": [], "features": [], "scalars": [], "tensors": []}
    for step in range(1, steps + 1):
        common = {**own, "step": step, "seq": step}
        for what, numbers in ROWS:
            said = {op: numbers.get(op) for op in (*WIRE_VALUE_OPS, *COUNT_OPS)}
            tables["tensor_stats"].append({**common, **{name: getattr(what, name) for name in ENTRY}, **said})
        tables["features"] += [{**common, **row} for row in FEATURES]
        for one in SCALARS:
            scalar = {"name": one.name, "value": one.value, "unit": one.unit, "labels": one.labels_text}
            tables["scalars"].append({**common, **scalar})
    for what, _ in ROWS:
        known = {name: getattr(what, name) for name in ("kind", "tensor", "index", "dtype")}
        tables["tensors"].append({**own, **known, "shape": [*what.shape]})
    made = {
        name: pa.Table.from_pylist([{**row, "ordinal": place} for place, row in enumerate(rows)], dataset_schema(name))
        for name, rows in tables.items()
    }
    with Store.open(folder / "store", create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=made, watermarks={"i": steps}))
    with connect(folder / "store") as connection:
        export_formats()["csv"].export(connection, "r", folder / "exported", ExportOptions(step_count_per_record=2))
    return folder / "exported"


def test_live_csv_equals_the_export_of_the_same_run(tmp_path):
    sink = Csv(CsvOptions(folder=str(tmp_path / "live"), steps_per_file=2), identity())
    for step in (1, 2, 3):
        sink.put(record(step, *ROWS, features=FEATURES, scalars=SCALARS))

    assert read(exported(tmp_path, 3)) == read(tmp_path / "live")
