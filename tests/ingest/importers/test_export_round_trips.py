"""Tests that an export and an import restore the rows that a format can represent."""

from __future__ import annotations

import datetime as dt
import itertools
import subprocess

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, VALUE_OPS, Kind
from rankscope_contract.model.schema import DATASETS, canonical_labels
from rankscope_ingest.importers import find_importer, import_records
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.formats import ExportOptions, export_formats

START = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
COMMON = ("attempt", "rank", "step", "micro_step", "vpp_stage", "ts")
COLUMNS = {
    "scalars": (*COMMON, "name", "value", "unit", "labels"),
    "tensor_stats": (
        *COMMON,
        *("kind", "tensor", "index", "placement", "shard_group", "call_seq"),
        *(*VALUE_OPS, *COUNT_OPS, *BASELINE_OPS),
    ),
    "features": (*COMMON, "kind", "module", "index", "value"),
    "samples": ("ts", "target", "metric", "labels", "value"),
}

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
small = st.integers(0, 3)
stage = st.none() | small
doubles = st.floats() | st.sampled_from([0.1, -0.0, 1e300, 5e-324])
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
singles = st.none() | finite
counts = st.none() | st.integers(0, 1 << 50)
labels = st.none() | st.dictionaries(text, text, min_size=1, max_size=2).map(canonical_labels)

common = st.fixed_dictionaries({"rank": stage, "vpp_stage": stage, "micro_step": stage})
scalar = st.fixed_dictionaries(
    {
        "name": text | st.sampled_from(["loss", "learning_rate", "tokens_total", "step_seconds"]),
        "value": doubles,
        "unit": st.none() | st.sampled_from(["seconds", "tokens", "samples/s"]),
        "labels": labels | st.sampled_from(['{"group":"a"}', '{"loss":"lm"}', "no json", "[]"]),
    }
)
tensor = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([kind.value for kind in Kind]) | text,
        "tensor": text,
        "index": stage,
        "placement": st.sampled_from(["full", "shard", None]),
        "shard_group": st.none() | text,
        "call_seq": stage,
        "norm": st.floats(0, 1000, width=32),  # a row without any statistic cannot be restored
        **dict.fromkeys(("min", "max", "mean"), singles),
        **dict.fromkeys(BASELINE_OPS, finite),  # an import computes the baselines that are null
        **dict.fromkeys(COUNT_OPS, counts),
    }
)
feature = st.fixed_dictionaries(
    {"kind": text, "module": text, "index": stage, "value": st.floats(width=32, allow_nan=False)}
)
sample = st.fixed_dictionaries(
    {
        "target": st.just("") | text,
        "metric": st.sampled_from(["up", "node_load1", "a:b"]),
        "labels": st.none() | st.dictionaries(st.sampled_from("abc"), text, min_size=1).map(canonical_labels),
        "value": doubles,
    }
)
DATA = {"scalars": scalar, "tensor_stats": tensor, "features": feature}
relaxed = settings(
    max_examples=examples(6, at_least=3),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
numbers = itertools.count()


def stored(folder, rows):
    """Store rows by dataset in a new store. The n-th row is of step n, and each third row begins an attempt."""
    store = Store.open(folder, create=True)
    tables = {}
    for dataset, listed in rows.items():
        empty = dict.fromkeys(field.name for field in DATASETS[dataset])
        placed = [
            empty
            | {"run": "r", "incarnation": "i", "seq": place, "ordinal": place, "ts_origin": "file"}
            | {"step": place, "attempt": place // 3, "ts": START + dt.timedelta(milliseconds=137.003 * place)}
            | own
            for place, own in enumerate(listed)
        ]
        tables[dataset] = pa.Table.from_pylist(placed, schema=dataset_schema(dataset))
    with store.claim(owner="test") as writer:
        writer.append(Batch(tables=tables, watermarks={"i": 100}))
    return folder


def round_trip(folder, store, form):
    """Export the run of the store as `form`, import that into a new store, and return both stores."""
    target = folder / f"out{export_formats()[form].suffix}"
    with connect(store, locked=True) as connection:
        report = export_formats()[form].export(connection, "r", target, ExportOptions())
    return imported(folder, target), report


def imported(folder, target):
    back = folder / f"back{next(numbers)}"
    with Store.open(back, create=True).claim(owner="test") as writer:
        importer = find_importer(target)
        import_records(target, writer, importer, run="r", rules=())
    return back


def told(store, dataset):
    names = ", ".join(f'"{name}"' for name in COLUMNS[dataset])
    with connect(store) as connection:
        return sorted(map(repr, connection.query(f"SELECT {names} FROM {dataset}").to_pylist()))


@pytest.mark.thorough
@relaxed
@given(
    data=st.fixed_dictionaries(
        {name: st.lists(st.builds(dict.__or__, common, own), max_size=6) for name, own in DATA.items()}
    )
)
def test_event_files_restore_every_series_exactly(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("events")
    data = {name: rows for name, rows in data.items() if rows}
    if not data:
        return
    store = stored(folder / "store", data)
    back, report = round_trip(folder, store, "tensorboard")

    assert {} == report.omitted
    for dataset in data:
        assert told(store, dataset) == told(back, dataset)


@relaxed
@given(
    data=st.fixed_dictionaries(
        {name: st.lists(st.builds(dict.__or__, common, DATA[name]), max_size=6) for name in ("scalars", "tensor_stats")}
    ),
    samples=st.lists(sample, max_size=4),
)
def test_openmetrics_restores_every_series_exactly(tmp_path_factory, data, samples):
    """Rows have different steps here, because one series can have only one number at a time."""
    folder = tmp_path_factory.mktemp("metrics")
    data = {name: rows for name, rows in (data | {"samples": samples}).items() if rows}
    if not data:
        return
    store = stored(folder / "store", data)
    back, report = round_trip(folder, store, "openmetrics")

    assert {} == report.omitted
    for dataset in data:
        assert told(store, dataset) == told(back, dataset)


def test_history_is_restored_through_a_real_prometheus(tmp_path, require_server):
    """The path is OpenMetrics, TSDB blocks, a dump, an import. Prometheus rounds times to milliseconds."""
    promtool = require_server("promtool", "prometheus")
    ranks = [{"attempt": 0, "rank": rank} for rank in (0, 1)]
    rows = {
        "scalars": [
            {**who, "name": "loss", "value": 1 / (n + 1), "step": n, "ts": _second(n)}
            for n in range(50)
            for who in ranks
        ],
        "tensor_stats": [
            {
                **who,
                "kind": "exp_avg",
                "tensor": 'o"d\n',
                "placement": "full",
                "norm": n + 0.5,
                "nans": n,
                "norm_baseline": 0.5,
                "mean_baseline": 0.25,
                "step": n,
                "ts": _second(n),
            }
            for n in range(50)
            for who in ranks
        ],
    }
    store = stored(tmp_path / "store", rows)
    target = tmp_path / "out.txt"
    with connect(store, locked=True) as connection:
        export_formats()["openmetrics"].export(connection, "r", target, ExportOptions())
    blocks = tmp_path / "tsdb"
    subprocess.run([promtool, "tsdb", "create-blocks-from", "openmetrics", target, blocks], check=True, stdout=-3)
    (blocks / "wal").mkdir()
    dump = tmp_path / "dump.txt"
    dump.write_bytes(subprocess.run([promtool, "tsdb", "dump", blocks], check=True, capture_output=True).stdout)
    back = imported(tmp_path, dump)

    for dataset in rows:
        assert told(store, dataset) == told(back, dataset)
        assert 100 == len(told(back, dataset))


def _second(number):
    return START + dt.timedelta(seconds=number)


@pytest.mark.parametrize("form", ["tensorboard", "openmetrics"])
def test_second_import_of_an_export_adds_nothing(tmp_path, form):
    store = stored(tmp_path / "store", {"scalars": [{"attempt": 0, "rank": 0, "name": "loss", "value": 1.0}] * 5})
    target = tmp_path / f"out{export_formats()[form].suffix}"
    with connect(store, locked=True) as connection:
        export_formats()[form].export(connection, "r", target, ExportOptions())
    with Store.open(tmp_path / "back", create=True).claim(owner="test") as writer:
        new = [import_records(target, writer, find_importer(target), run="r").rows_stored for _ in range(2)]

    assert [5, 0] == new
