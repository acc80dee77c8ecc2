"""An export and an import restore the rows that a format can represent."""

import datetime as dt
import itertools
import math
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, VALUE_OPS, Kind
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers import find_importer, import_records, importers
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.formats import ExportOptions, export_formats

START = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
COMMON = ("attempt", "rank", "step", "micro_step", "vpp_stage", "ts")
COLUMNS_OF = {
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
ROWS_OF = {"scalars": scalar, "tensor_stats": tensor, "features": feature}
relaxed = settings(
    max_examples=examples(6, at_least=3),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def stored_rows(folder, rows):
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


def exported(folder, store, form):
    """Export the run of the store as `form`, and return the file and the report."""
    target = folder / f"out{export_formats()[form].suffix}"
    with connect(store, locked=True) as connection:
        return target, export_formats()[form].export(connection, "r", target, ExportOptions())


def imported(folder, target):
    with Store.open(folder / "back", create=True).claim(owner="test") as writer:
        import_records(target, writer, find_importer(target), run="r", rules=())
    return folder / "back"


def assert_restored(folder, data, form):
    """Store the rows, export them as `form`, and check that an import into a new store restores them."""
    data = {name: rows for name, rows in data.items() if rows}
    if not data:
        return
    store = stored_rows(folder / "store", data)
    target, report = exported(folder, store, form)
    back = imported(folder, target)

    assert {} == report.omitted
    for dataset in data:
        assert told(store, dataset) == told(back, dataset)


def told(store, dataset):
    names = ", ".join(f'"{name}"' for name in COLUMNS_OF[dataset])
    with connect(store) as connection:
        return sorted(map(repr, connection.query(f"SELECT {names} FROM {dataset}").to_pylist()))


@pytest.mark.thorough
@relaxed
@given(
    data=st.fixed_dictionaries(
        {name: st.lists(st.builds(dict.__or__, common, own), max_size=6) for name, own in ROWS_OF.items()}
    )
)
def test_event_files_restore_every_series_exactly(tmp_path_factory, data):
    assert_restored(tmp_path_factory.mktemp("events"), data, "tensorboard")


@relaxed
@example(data={"scalars": [{"name": "0", "value": 0.0, "labels": "[]"}], "tensor_stats": []}, samples=[])
@given(
    data=st.fixed_dictionaries(
        {
            name: st.lists(st.builds(dict.__or__, common, ROWS_OF[name]), max_size=6)
            for name in ("scalars", "tensor_stats")
        }
    ),
    samples=st.lists(sample, max_size=4),
)
def test_openmetrics_restores_every_series_exactly(tmp_path_factory, data, samples):
    """Rows have different steps here, because one series can have only one number at a time."""
    assert_restored(tmp_path_factory.mktemp("metrics"), data | {"samples": samples}, "openmetrics")


def test_history_is_restored_through_a_real_prometheus(tmp_path, require_server):
    """The path is OpenMetrics, TSDB blocks, a dump, an import. Prometheus rounds times to milliseconds."""
    promtool = require_server("promtool", "prometheus")
    ranks = [{"attempt": 0, "rank": rank} for rank in (0, 1)]
    of_tensor = {"kind": "exp_avg", "tensor": 'o"d\n', "placement": "full", "norm_baseline": 0.5, "mean_baseline": 0.25}
    rows = {
        "scalars": [
            {**who, "name": "loss", "value": 1 / (n + 1), "step": n, "ts": _second(n)}
            for n in range(50)
            for who in ranks
        ],
        "tensor_stats": [
            {**who, **of_tensor, "norm": n + 0.5, "nans": n, "step": n, "ts": _second(n)}
            for n in range(50)
            for who in ranks
        ],
    }
    store = stored_rows(tmp_path / "store", rows)
    target, _ = exported(tmp_path, store, "openmetrics")
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
    store = stored_rows(tmp_path / "store", {"scalars": [{"attempt": 0, "rank": 0, "name": "loss", "value": 1.0}] * 5})
    target, _ = exported(tmp_path, store, form)
    with Store.open(tmp_path / "back", create=True).claim(owner="test") as writer:
        new = [import_records(target, writer, find_importer(target), run="r").rows_stored for _ in range(2)]

    assert [5, 0] == new


# The layout of msprobe cannot represent: finite statistics of a tensor with NaN or Inf, the count of Inf, the placement
# of a tensor, times, and the difference between an unknown virtual stage (or micro step of activations) and 0.

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "msprobe"
SINGLE, NAN = SAMPLES / "single_rank", SAMPLES / "two_ranks_nan"
COLUMNS = (
    'attempt, rank, step, micro_step, vpp_stage, kind, tensor, "index", call_seq, '
    "norm, min, max, mean, nans, infs, zeros, numel"
)
CALLS = {Kind.COMM_IN, Kind.COMM_OUT}
ACTIVATIONS = {Kind.ACT_IN, Kind.ACT_OUT, Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT}
BEGAN = dt.datetime(2026, 12, 31, 15, 59, 59, tzinfo=dt.UTC)  # the last second of the year in Shanghai

printable = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\x7f"), min_size=1, max_size=8)
place = st.sampled_from(["all_reduce@train.py[23]", "send@a/b_1.py[4]", "gather@<string>[1]", "_x@a:b%.call_2[3]"])
name = printable | st.sampled_from(["", "=1+1", "'=x", 'a,"b"', "layers.0", "@x", "-", "nan"])


@st.composite
def tensors(draw):
    """Return one row of `tensor_stats` that this layout can represent."""
    kind = draw(st.sampled_from(list(Kind)))
    sliced, called = kind in ACTIVATIONS, kind in CALLS
    numel = draw(st.integers(1, 1 << 24))
    nans, infs = draw(st.sampled_from([(0, 0), (0, 0), (3, None), (0, 1)]))
    values = {op: draw(finite) for op in VALUE_OPS} | {"norm": draw(st.floats(0, 2.0**100, width=32))}
    return {
        "kind": kind,
        "tensor": draw(place if called else name if sliced else name.filter(bool)),
        "index": draw(st.none() | st.integers(0, 3)) if sliced or called else None,
        "call_seq": draw(st.none() | st.integers(1, 3)) if called else None,
        "micro_step": draw(st.integers(0, 2)) if sliced else None,
        "vpp_stage": draw(st.integers(0, 2)),
        "numel": numel,
        "nans": nans,
        "infs": infs,
        "zeros": draw(st.integers(0, numel)),
        **(values if infs == nans == 0 else dict.fromkeys(VALUE_OPS)),
    }


def distinct(rows):
    keys = ("kind", "tensor", "index", "call_seq", "micro_step", "vpp_stage")
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def stored(folder, rows, features=(), scalars=()):
    """Return a store with `rows` as run r."""
    tables = {}
    for dataset, listed in (("tensor_stats", rows), ("features", features), ("scalars", scalars)):
        full = [{"run": "r", "incarnation": "i", "seq": seq, "ordinal": seq, **row} for seq, row in enumerate(listed)]
        tables[dataset] = pa.Table.from_pylist(full, schema=dataset_schema(dataset))
    began = [{"run": "r", "attempt": attempt, "state": "stopped", "started_at": BEGAN} for attempt in (0, 1)]
    tables["attempts"] = pa.Table.from_pylist(began, schema=dataset_schema("attempts"))
    with Store.open(folder, create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=tables, watermarks={"i": 1 << 40}))
    return folder


def through(store, folder, **options):
    """Return a store with the run after an export and an import."""
    with connect(store) as connection:
        report = export_formats()["csv"].export(connection, "r", folder / "csv", ExportOptions(**options))
    with Store.open(folder / "again", create=True).claim(owner="test") as writer:
        faults = import_records(folder / "csv", writer, importers()["msprobe"], run="r").faults
    return folder / "again", report, faults


def rows_of(store, columns=COLUMNS, dataset="tensor_stats"):
    with connect(store) as connection:
        return connection.query(f"SELECT {columns} FROM {dataset} ORDER BY ALL").to_pylist()


@settings(
    max_examples=examples(8, at_least=3), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(st.lists(tensors(), min_size=1, max_size=5).map(distinct), min_size=1, max_size=4),
    per_file=st.integers(1, 5),
)
@pytest.mark.thorough
def test_statistics_are_restored_exactly(tmp_path_factory, steps, per_file):
    folder = tmp_path_factory.mktemp("round")
    places = itertools.product(range(2), range(2), enumerate(steps, 1))  # attempts, ranks, steps
    rows = [
        {"attempt": attempt, "rank": rank, "step": step, **row}
        for attempt, rank, (step, listed) in places
        for row in listed
    ]
    store = stored(folder / "store", rows)
    again, report, faults = through(store, folder, step_count_per_record=per_file)

    assert () == faults
    assert {} == report.omitted
    assert rows_of(store) == rows_of(again)


def test_features_are_restored_exactly(tmp_path):
    kinds = ("stable_rank", "spectral_norm", "direction_agreement", "router_similarity")
    with_micro = ("attention_entropy", "softmax_max", "router_entropy")
    features = [
        {"attempt": 0, "rank": 0, "step": step, "kind": kind, "module": module, "vpp_stage": 1, "value": step / 7}
        | {"micro_step": 2 if kind in with_micro else None, "index": None if kind == "direction_agreement" else index}
        for step in (1, 2)
        for kind in (*kinds, *with_micro)
        for module in ("fc", "=x")
        for index in ((None,) if kind == "direction_agreement" else (None, 3))
    ]
    store = stored(tmp_path / "store", [], features)
    again, _, faults = through(store, tmp_path)
    columns = 'attempt, rank, step, micro_step, vpp_stage, kind, module, "index", value'

    assert () == faults
    assert rows_of(store, columns, "features") == rows_of(again, columns, "features")


def test_scalars_are_restored_exactly(tmp_path):
    series = [("loss", None, None), ("lr", "1/s", '{"a":"b,c","group":"=x"}'), ("=x", None, None), ("lr", None, None)]
    values = (0.1, 1e300, math.inf, -0.0)
    scalars = [
        {"attempt": attempt, "rank": rank, "step": step, "value": value, "name": name, "unit": unit, "labels": labels}
        for attempt in (0, 1)
        for rank in (0, 1)
        for step, value in enumerate(values, 1)
        for name, unit, labels in series
    ]
    store = stored(tmp_path / "store", [], scalars=scalars)
    again, report, faults = through(store, tmp_path, step_count_per_record=3)
    columns = "attempt, rank, step, micro_step, vpp_stage, name, unit, labels, value"

    assert () == faults
    assert {} == report.omitted
    assert rows_of(store, columns, "scalars") == rows_of(again, columns, "scalars")


def test_calls_are_restored_separately_and_described_once(tmp_path):
    """The names are those of a live sink; only the importer reads them."""
    folder = tmp_path / "Nov21_22-00-00-rank0-0a0b0c0d"
    folder.mkdir()
    names = ("all_reduce@train.py[23]", "all_reduce@train.py[23].call_1", "all_gather@a/b.py[4].call_2_1")
    lines = [f"0,{name},{step},{norm}.0,[4],torch.float32" for step in (0, 1) for norm, name in enumerate(names)]
    (folder / "comm_out_0-1.csv").write_text("\n".join(["vpp_stage,name,step,norm,shape,dtype", *lines]))
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        faults = import_records(folder, writer, importers()["msprobe"], run="r").faults
    called = [("all_gather@a/b.py[4]", 1, 2, 2.0), ("all_reduce@train.py[23]", None, None, 0.0),
              ("all_reduce@train.py[23]", None, 1, 1.0)]  # fmt: skip

    assert () == faults
    assert called * 2 == [
        tuple(row.values())[1:]
        for row in sorted(
            rows_of(tmp_path / "store", 'step, tensor, "index", call_seq, norm'),
            key=lambda row: (row["step"], row["tensor"], row["norm"]),
        )
    ]
    assert [("all_gather@a/b.py[4]", 1, None), ("all_reduce@train.py[23]", None, None)] == [
        tuple(row.values()) for row in rows_of(tmp_path / "store", 'tensor, "index", module', "tensors")
    ]


@pytest.mark.usual(1)
@pytest.mark.parametrize("sample", [SINGLE, NAN], ids=lambda path: path.name)
def test_output_of_msprobe_is_restored(tmp_path, sample):
    """Shapes and types of each slot are restored, too."""
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        import_records(sample, writer, importers()["msprobe"], run="r")
    again, _, _ = through(tmp_path / "store", tmp_path, step_count_per_record=2)
    described = 'kind, tensor, "index", shape, dtype, numel, module'

    assert rows_of(tmp_path / "store") == rows_of(again)
    assert rows_of(tmp_path / "store", described, "tensors") == rows_of(again, described, "tensors")
    assert rows_of(tmp_path / "store", "rank, step, kind, module, value", "features") == rows_of(
        again, "rank, step, kind, module, value", "features"
    )


def test_export_with_msprobes_rounding_equals_its_lines(tmp_path):
    """The lines are equal up to the eighth digit, which float32 does not have, without the rows of absent tensors."""
    with Store.open(tmp_path / "store", create=True).claim(owner="test") as writer:
        import_records(NAN, writer, importers()["msprobe"], run="r")
    with connect(tmp_path / "store") as connection:
        options = ExportOptions(step_count_per_record=3, seed_rounding=6)
        export_formats()["csv"].export(connection, "r", tmp_path / "csv", options)
    lines = 0
    for path in sorted(NAN.rglob("*.csv")):
        (folder,) = (tmp_path / "csv").glob(f"*-rank{path.parent.name.split('-rank')[1][0]}-*")
        theirs = [line for line in path.read_text().splitlines() if not line.endswith(",nan" * 8)]
        ours = (folder / path.name).read_text().splitlines()

        assert len(theirs) == len(ours)
        for their, our in zip(theirs, ours, strict=True):
            for one, other in zip(their.split(","), our.split(","), strict=True):
                assert one == other or math.isclose(float(one), float(other), rel_tol=1e-6)
            lines += 1
    assert lines > 400


def test_counts_are_restored_with_a_nan_but_statistics_are_not(tmp_path):
    row = {"attempt": 0, "rank": 0, "step": 1, "kind": "grad_reduced", "tensor": "w", "vpp_stage": 0, "numel": 8}
    values = {"norm": 1.5, "min": -1.0, "max": 1.0, "mean": 0.5, "nans": 2, "infs": 1, "zeros": 4}
    again, _, _ = through(stored(tmp_path / "store", [row | values]), tmp_path)

    assert [(None, None, 2, None, 4)] == [
        tuple(row.values()) for row in rows_of(again, "norm, mean, nans, infs, zeros")
    ]
