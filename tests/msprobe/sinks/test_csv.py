"""CSV files in msprobe's layout, written while training runs, and equal to the export of the run."""

import csv
import datetime as dt
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.end_to_end.stored_rows import tables_of
from tests.exporter.publish.sinks.records import ABSENT, FINITE, Numbers, entry, identity, imported, record
from tests.properties import examples

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.wire.channel import PLAN_PATH
from rankscope_exporter.publish.ring import encode, stream
from rankscope_exporter.records.record import Scalar, StepRecord
from rankscope_msprobe.files.csv_layout import FLOAT_OPS, parse_folder
from rankscope_msprobe.sinks.csv_files import Csv, CsvOptions
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import connect
from rankscope_storage.formats import ExportOptions, export_formats

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "csv_sink.txt"
ACTIVATIONS = (Kind.ACT_IN, Kind.ACT_OUT, Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT)
NO_VALUES: dict[str, float | None] = dict.fromkeys(FLOAT_OPS)
NOTHING: dict[str, float | None] = dict.fromkeys(("nans", "infs", "zeros", "numel"), 0)


WINDOW = ("Jan01_00-00-00", "Dec31_23-59-59")


def csv_sink(folder: Path, *steps: int, rank: int = 0, **options: Any) -> Csv:
    """Return a sink that has received a record of one tensor at each of `steps`."""
    sink = Csv(CsvOptions(folder=str(folder), **options), identity(rank))
    for step in steps:
        sink.put(record(step, (entry(), FINITE)))
    return sink


def files(folder: Path) -> dict[str, list[str]]:
    """Return the lines of each file in the folder of the only rank by the name of the file."""
    (own,) = folder.iterdir()
    return {path.name: path.read_text().splitlines() for path in sorted(own.iterdir())}


def column(folder: Path, file: str, number: int) -> list[str]:
    return [line.split(",")[number] for line in files(folder)[file][1:]]


def test_output_equals_the_golden_file(tmp_path):
    """The file has one row with every column of the layout, in two steps with half of the file each."""
    sink = csv_sink(tmp_path, steps_per_file=2, digits=6)
    numbers = FINITE | {"norm": 12.3456789, "mean": 1e-9}
    for step in (1, 2):
        sink.put(
            record(
                step,
                (entry("layers.0", Kind.ACT_IN, index=1, micro_step=1, shape=(2, 2)), numbers),
                (entry("layers.0", Kind.ACT_OUT, micro_step=0, vpp_stage=3, shape=(9,)), numbers),
                (entry("", Kind.ACT_GRAD_IN, micro_step=0), ABSENT),
                (entry("", Kind.ACT_GRAD_OUT, micro_step=0), numbers),
                (entry("w", Kind.GRAD_UNREDUCED), numbers | {"norm": -0.0, "min": 3e38}),
                (entry("w", Kind.GRAD_REDUCED), NO_VALUES | {"nans": 2, "infs": 0, "zeros": 0, "numel": 4}),
                (entry("v", Kind.GRAD_REDUCED), numbers | {"infs": 1}),
                (entry("empty", Kind.GRAD_REDUCED, shape=(0,)), NO_VALUES | NOTHING),
                (entry("w", Kind.EXP_AVG), numbers),
                (entry("w", Kind.EXP_AVG_SQ), numbers),
                (entry("w", Kind.PARAM_BEFORE, dtype="bfloat16"), numbers),
                (entry("w", Kind.PARAM_AFTER, dtype="bfloat16"), numbers),
                (entry("w", Kind.MOMENTUM), numbers),
                features=(
                    {"kind": "attention_entropy", "module": "core", "index": 2, "value": 0.25, "micro_step": 1},
                    {"kind": "softmax_max", "module": "core", "index": 2, "value": 0.5, "micro_step": 1},
                    {"kind": "stable_rank", "module": "head", "index": None, "value": 2.0},
                    {"kind": "router_similarity", "module": "moe", "index": None, "value": math.nan},
                    {"kind": "router_entropy", "module": "moe", "index": None, "value": None, "micro_step": 0},
                    {"kind": "direction_agreement", "module": "w", "index": None, "value": 0.0},
                    {"kind": "router_load", "module": "moe", "index": 0, "value": 1.0},
                ),
                modules=({"module": "head", "stack": "train.py:1 <module>\n=a, b.py:2 f"},),
            )
        )

    (own,) = tmp_path.iterdir()
    assert GOLDEN.read_text() == "".join(f"# {path.name}\n{path.read_text()}" for path in sorted(own.iterdir()))


def test_files_cover_steps_counted_from_0(tmp_path):
    csv_sink(tmp_path, 3, 4, 5, 1001, steps_per_file=3)

    assert ["grad_reduced_0-2.csv", "grad_reduced_3-5.csv", "grad_reduced_999-1001.csv"] == sorted(files(tmp_path))
    assert ["3", "4"] == column(tmp_path, "grad_reduced_3-5.csv", 2)


def test_no_folder_is_created_without_measurements(tmp_path):
    sink = csv_sink(tmp_path / "out")
    for step in (None, 1):
        sink.put(record(step))
    sink.put(record(2, (entry(), ABSENT)))

    assert not (tmp_path / "out").exists()


def test_last_of_several_calls_is_written(tmp_path):
    """The layout has no column for calls. A row of a micro-batch precedes the row of the whole step."""
    calls = [entry("m", Kind.ACT_OUT, call_seq=call, micro_step=0) for call in range(3)]
    whole, micro = entry("w", Kind.GRAD_UNREDUCED), entry("w", Kind.GRAD_UNREDUCED, micro_step=0)
    sink = csv_sink(tmp_path, steps_per_file=10)
    sink.put(record(1, *((call, FINITE | {"norm": float(place)}) for place, call in enumerate(calls))))
    sink.put(record(2, (calls[0], FINITE | {"norm": 7.0}), (calls[1], FINITE | {"norm": 8.0}), (calls[2], ABSENT)))
    sink.put(record(3, (micro, FINITE | {"norm": 5.0}), (whole, FINITE | {"norm": 6.0})))
    others = ((entry(name, Kind.ACT_OUT, micro_step=0), FINITE) for name in "ab")
    sink.put(record(11, *others, (calls[0], FINITE), (calls[1], FINITE)))

    in_order = ["a.output", "b.output", "m.output"]  # whichever call is kept
    assert in_order == column(tmp_path, "actv_10-19.csv", 1)
    assert ["2.0", "8.0"] == column(tmp_path, "actv_0-9.csv", 4)
    assert ["5.0"] == column(tmp_path, "grad_unreduced_0-9.csv", 4)


def test_new_columns_begin_a_new_part(tmp_path):
    """If gradients are first measured whole and then per micro-batch, the later rows are in a separate part."""
    sink = csv_sink(tmp_path, steps_per_file=10)
    for step, micro_step in ((1, None), (2, 1), (3, None)):
        sink.put(record(step, (entry("w", Kind.GRAD_UNREDUCED, micro_step=micro_step), FINITE)))

    assert ["grad_unreduced_0-9.csv", "grad_unreduced_0-9_part_1.csv"] == sorted(files(tmp_path))
    rows, faults = imported(tmp_path)
    assert 0 == faults.count
    assert {(1, None), (2, 1), (3, None)} == {(row["step"], row["micro_step"]) for row in rows["tensor_stats"]}
    assert 3 == len(rows["tensor_stats"])


def test_shape_with_other_number_of_elements_is_not_written(tmp_path):
    """The plan has the first shape of an activation, and a later batch may be smaller."""
    csv_sink(tmp_path).put(record(1, (entry(shape=(8, 2)), FINITE), (entry("v", shape=(2, 2)), FINITE)))

    shapes = [line.split(",", 9)[9] for line in files(tmp_path)["grad_reduced_0-0.csv"][1:]]
    assert ["[4],torch.float32", '"[2, 2]",torch.float32'] == shapes


def test_wrapper_prefixes_are_removed_by_default(tmp_path):
    long = ["module.decoder.layers.0.w", "module.encoder.layers.0.w", "a.embedding.w", "head.w", "x.final_norm.w"]
    sink = csv_sink(tmp_path, steps_per_file=2)
    for step in (1, 2):
        sink.put(record(step, *((entry(name), FINITE) for name in long)))

    expected = ["layers.0.w", "module.encoder.layers.0.w", "embedding.w", "head.w", "final_norm.w"]
    assert 2 * expected == column(tmp_path, "grad_reduced_0-1.csv", 1)


def test_settings_choose_columns_complete_names_and_omit_scalars(tmp_path):
    row = (entry("module.decoder.layers.0.w"), FINITE)
    sink = csv_sink(tmp_path, squash_name=False, scalars=False, ops=("max", "norm"))
    sink.put(record(1, row, scalars=(Scalar("loss", 2.5),)))

    lines = ["vpp_stage,name,step,max,norm,shape,dtype", "0,module.decoder.layers.0.w,0,4.0,5.0,[4],torch.float32"]
    assert {"grad_reduced_0-0.csv": lines} == files(tmp_path)


def test_scalars_have_a_family_which_the_importer_reads(tmp_path):
    scalars = (Scalar("loss", 2.5), Scalar("learning_rate", 0.25, unit="s", labels={"group": "a,b", "at": "=c"}))
    sink = csv_sink(tmp_path, steps_per_file=2)
    for step in (1, 2):
        sink.put(record(step, scalars=scalars))
    rows, faults = imported(tmp_path)

    tag, labels = '"learning_rate/at==c/group=a,b"', '"{""at"":""=c"",""group"":""a,b""}"'
    lines = [f"0,{cells}" for step in "01" for cells in (f"loss,{step},2.5,,", f"{tag},{step},0.25,s,{labels}")]
    assert ["vpp_stage,name,step,value,unit,labels", *lines] == files(tmp_path)["scalars_0-1.csv"]
    assert 0 == faults.count
    assert [(step, one.name, one.value, one.unit, one.labels_text) for step in (1, 2) for one in scalars] == [
        (row["step"], row["name"], row["value"], row.get("unit"), row.get("labels")) for row in rows["scalars"]
    ]


@pytest.mark.parametrize(
    ("options", "zone"),
    [
        *(({}, dt.timezone(dt.timedelta(hours=8))), ({"time_zone": "UTC"}, dt.UTC)),
        ({"time_zone": "UTC-03:30"}, dt.timezone(-dt.timedelta(hours=3, minutes=30))),
        *(({"time_zone": "Asia/Tokyo"}, dt.timezone(dt.timedelta(hours=9))), ({"time_zone": "local"}, None)),
    ],
)
def test_folder_time_is_in_the_time_zone_of_the_setting(tmp_path, monkeypatch, options, zone):
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")  # UTC+14
    time.tzset()
    before = dt.datetime.now(zone or dt.timezone(dt.timedelta(hours=14)))
    csv_sink(tmp_path, 1, **options)
    monkeypatch.undo()
    time.tzset()
    (folder,) = tmp_path.iterdir()
    found = parse_folder(folder.name).time.replace(tzinfo=None)

    assert dt.timedelta(0) <= found.replace(year=before.year) - before.replace(microsecond=0, tzinfo=None)
    assert dt.timedelta(minutes=5) > found.replace(year=before.year) - before.replace(tzinfo=None)


@pytest.mark.parametrize("time_zone", ["", "Berlin", "UTC+25", "../etc/passwd", "CST+8:00"])
def test_unknown_time_zone_is_rejected(time_zone):
    with pytest.raises(ValueError, match=r"time_zone .* is unknown: write local, an offset such as UTC"):
        CsvOptions(time_zone=time_zone)


def begin(folder: Path, time: str, rank: int = 0) -> Path:
    own = folder / f"{time}-rank{rank}-0123abcd"
    own.mkdir(parents=True)
    return own


def test_append_to_continues_the_folder_of_its_window_or_creates_one(tmp_path):
    window = ("Dec03_21-34-40", "Dec03_21-34-41")
    begin(tmp_path, "Dec03_21-34-39")
    csv_sink(tmp_path, 1, append_to=window)
    csv_sink(tmp_path / "none", 1, append_to=window)
    assert [2, 1] == [len(list(folder.glob("*-rank0-*"))) for folder in (tmp_path, tmp_path / "none")]

    mine = begin(tmp_path, "Dec03_21-34-41")
    begin(tmp_path, "Dec03_21-34-41", rank=1)
    for step in (1, 2):
        csv_sink(tmp_path, step, steps_per_file=4, append_to=window)
    assert ["grad_reduced_0-3.csv"] == [path.name for path in mine.iterdir()]
    assert 3 == len((mine / "grad_reduced_0-3.csv").read_text().splitlines()), "one header, two steps"


def test_steps_written_again_are_another_attempt(tmp_path):
    for value in (1.0, 2.0):
        csv_sink(tmp_path, append_to=WINDOW, steps_per_file=4).put(record(1, (entry(), FINITE | {"norm": value})))

    rows, faults = imported(tmp_path)
    assert 0 == faults.count
    assert [(0, 1.0), (1, 2.0)] == sorted((row["attempt"], row["norm"]) for row in rows["tensor_stats"])


def test_moved_file_is_created_again(tmp_path):
    sink = csv_sink(tmp_path, steps_per_file=4)
    for step in (1, 2):
        sink.put(record(step, (entry(), FINITE)))
        for path in tmp_path.glob("*/*.csv"):
            path.rename(tmp_path / f"moved{step}.csv")

    first, second = (tmp_path / f"moved{step}.csv" for step in (1, 2))
    assert first.read_text().splitlines()[0] == second.read_text().splitlines()[0]
    assert 2 == len(second.read_text().splitlines())


def test_default_folder_is_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "asked"))
    monkeypatch.chdir(tmp_path)
    sinks = [Csv(CsvOptions(), identity())]
    monkeypatch.delenv("MONITOR_OUTPUT_DIR")
    sinks.append(Csv(CsvOptions(), identity()))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for sink in sinks:
        sink.put(record(1, (entry(), FINITE)))

    found = {path.name: len(list(path.iterdir())) for path in tmp_path.iterdir()}
    assert {"asked": 1, "monitor_output": 1, "elsewhere": 0} == found


printable = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\x7f"), min_size=1, max_size=8)
name = printable | st.sampled_from(["=1+1", "'=x", 'a,"b"', "layers.0", "@x", "-", "nan", "a/b:c", " x ", "x.input_1"])
number = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw):
    """Return an entry and its statistics: finite, with NaN or Inf, empty, or absent."""
    kind = draw(st.sampled_from(list(Kind)))
    sliced = kind in ACTIVATIONS
    shape = draw(st.sampled_from([(), (4,), (2, 3), (0, 5), (1 << 20,)]))
    numel = math.prod(shape)
    nans, infs = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1)])) if numel else (0, 0)
    exists = numel > 0 and nans == infs == 0
    numbers = {op: draw(number) if exists else None for op in FLOAT_OPS}
    if exists:
        numbers["norm"] = abs(numbers["norm"])
    counts = {"nans": nans, "infs": infs, "zeros": draw(st.integers(0, numel)), "numel": numel}
    numbers_of = st.none() | st.integers(0, 3), st.integers(0, 2)
    index, micro_step = (draw(one) if sliced else None for one in numbers_of)
    stage = draw(st.integers(0, 2))
    what = entry(draw(name), str(kind), shape=shape, index=index, micro_step=micro_step, vpp_stage=stage)
    return what, ABSENT if draw(st.integers(0, 5)) == 0 else numbers | counts


KEY = ("kind", "tensor", "index", "micro_step", "vpp_stage")
OF = (*FLOAT_OPS, "nans", "infs", "zeros", "numel")


def distinct(rows):
    return list({tuple(getattr(what, key) for key in KEY): (what, numbers) for what, numbers in rows}.values())


def told(numbers):
    """Return the values that the layout can represent: no count of Inf with a NaN, and no share of 0 elements."""
    return numbers | ({"infs": None} if numbers["nans"] else {}) | ({} if numbers["numel"] else {"zeros": None})


rows_of_steps = st.lists(st.lists(tensors(), min_size=1, max_size=8).map(distinct), min_size=1, max_size=4)


@settings(max_examples=examples(60), deadline=None)
@given(steps=rows_of_steps, per_file=st.integers(1, 5))
def test_importer_restores_all_written_statistics(tmp_path_factory, steps, per_file):
    folder = tmp_path_factory.mktemp("round")
    sink = csv_sink(folder, steps_per_file=per_file)
    for step, rows in enumerate(steps, 1):
        sink.put(record(step, *rows))
    expected = [
        (step, *(getattr(what, key) for key in KEY), *(told(numbers)[op] for op in OF))
        for step, rows in enumerate(steps, 1)
        for what, numbers in rows
        if numbers["numel"] is not None
    ]
    if not expected:
        assert [] == list(folder.iterdir())
        return
    rows, faults = imported(folder)
    found = [tuple(row.get(column) for column in ("step", *KEY, *OF)) for row in rows["tensor_stats"]]

    assert 0 == faults.count, faults.first
    assert sorted(expected, key=repr) == sorted(found, key=repr)


@settings(max_examples=examples(60), deadline=None)
@given(listed=st.lists(st.text(max_size=12), min_size=1, max_size=8, unique=True))
def test_any_name_gives_one_valid_row(tmp_path_factory, listed):
    folder = tmp_path_factory.mktemp("names")
    csv_sink(folder).put(record(1, *((entry(name), FINITE) for name in listed)))

    rows, faults = imported(folder)
    assert 0 == faults.count, faults.first
    assert 1 <= len(rows["tensor_stats"]) <= len(listed), "names that differ in control characters alone become one"
    assert {5.0} == {row["norm"] for row in rows["tensor_stats"]}


ROWS: tuple[tuple[PlanEntry, Numbers], ...] = (
    *((entry("w" if kind.startswith(("grad", "param")) else "m", kind), FINITE) for kind in Kind),
    (entry("layers.0", Kind.ACT_IN, index=2, micro_step=1, vpp_stage=1), FINITE | {"mean": 1e-9, "norm": 1e30}),
    (entry("", Kind.ACT_OUT), FINITE),
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


def exported(folder: Path, records: list[StepRecord]) -> Path:
    """Store the records as the service does, and export them."""
    body, plan = stream(0, list(map(encode, records))).to_pybytes(), records[0].statistics.plan.json.encode()
    rank: Any = SimpleNamespace(get=lambda path, **_: plan if path.startswith(PLAN_PATH) else body)
    with Store.open(folder / "store", create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=tables_of(rank), watermarks={"i": len(records) - 1}))
    with connect(folder / "store") as connection:
        export_formats()["csv"].export(connection, "r", folder / "exported", ExportOptions(step_count_per_record=2))
    return folder / "exported"


def test_live_csv_equals_the_export_of_the_same_run(tmp_path):
    records = [record(step, *ROWS, features=FEATURES, scalars=SCALARS) for step in (1, 2, 3)]
    sink = Csv(CsvOptions(folder=str(tmp_path / "live"), steps_per_file=2), identity())
    for one in records:
        sink.put(one)

    assert read(exported(tmp_path, records)) == read(tmp_path / "live")
