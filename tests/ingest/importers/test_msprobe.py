"""Tests of imported msprobe output, compared with a simple reader that uses the csv module only."""

import csv
import datetime as dt
import json
import math
import os
import shutil
import struct
from pathlib import Path

import pytest
from tests.ingest.importers.conftest import logs_in

from rankscope_ingest.importers import Faults, find_importer
from rankscope_ingest.importers.msprobe import Msprobe, discovery

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "msprobe"
SINGLE = SAMPLES / "single_rank"
NAN = SAMPLES / "two_ranks_nan"
KINDS = {
    "grad_unreduced": "grad_unreduced",
    "grad_reduced": "grad_reduced",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "param_origin": "param_before",
    "param_updated": "param_after",
}
HEADER = "vpp_stage,name,step,norm,min,max,mean,nans,zeros,shape,dtype"
FOLDER = "Dec03_21-34-40-rank0-0123abcd"


def float32(text):
    return struct.unpack("f", struct.pack("f", float(text)))[0]


def plain_rows(root, family):
    """Yield the rows of a family, read with the csv module only."""
    for path in sorted(root.rglob(f"{family}_[0-9]*.csv")):
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


def csv_file(logs, rows, *, header=HEADER, name="grad_reduced_0-9.csv", folder=FOLDER):
    return logs.write(f"out/{folder}/{name}", "\n".join([header, *rows]) + "\n")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return a store with the output of one rank, for tests that only read it."""
    with logs_in(tmp_path_factory.mktemp("single")) as logs:
        logs.import_log(SINGLE)
        yield logs


@pytest.mark.parametrize("family", KINDS)
def test_every_parameter_row_is_imported(single, family):
    """Steps count from 1. Adam's moments are taken before the step and belong to the step before."""
    expected = [
        (int(row["step"]) + (not family.startswith("exp")), row["name"], *map(float32, (row["norm"], row["mean"])))
        for row in plain_rows(SINGLE, family)
    ]
    found = single.query(
        "SELECT step, tensor, norm, mean FROM tensor_stats WHERE kind = $kind ORDER BY seq", kind=KINDS[family]
    )

    assert 20 < len(expected)
    assert expected == [tuple(row.values()) for row in found]


@pytest.mark.parametrize(
    ("family", "kinds"), [("actv", ("act_in", "act_out")), ("actv_grad", ("act_grad_in", "act_grad_out"))]
)
def test_activations_have_module_slot_and_micro_step(single, family, kinds):
    expected = []
    for row in plain_rows(SINGLE, family):
        if row["shape"] == "nan":
            continue
        module, _, slot = row["name"].rpartition(".")
        word, _, index = slot.partition("_")
        kind = kinds[word == "output"]
        expected.append((kind, module, int(index) if index else None, int(row["step"]) + 1, int(row["micro_step"])))
    found = single.query(
        'SELECT kind, tensor, "index", step, micro_step FROM tensor_stats '
        "WHERE list_contains($kinds, kind) ORDER BY seq",
        kinds=list(kinds),
    )

    assert expected == [tuple(row.values()) for row in found]
    assert {None, 0, 1, 2} == {row["index"] for row in found}


def test_features_get_stored_names(single):
    kinds = single.query(
        "SELECT kind, count(*) AS rows, count(micro_step) AS micro FROM features GROUP BY ALL ORDER BY ALL"
    )
    row = next(plain_rows(SINGLE, "linear_hook"))

    assert [
        *(("attention_entropy", 8, 8), ("direction_agreement", 52, 0), ("softmax_max", 8, 8)),
        *(("spectral_norm", 18, 0), ("stable_rank", 18, 0)),
    ] == [tuple(kind.values()) for kind in kinds]
    assert "layers.0.qkv.linear" == row["name"]
    assert [float32(row["sr"]), float32(row["kernel_norm"])] == [
        found["value"]
        for found in single.query(
            "SELECT value FROM features WHERE module = 'layers.0.qkv' AND step = 1 ORDER BY kind DESC"
        )
    ]


def test_absent_tensor_has_no_row(single):
    """In this case msprobe writes a row of nan for a gradient that does not exist."""
    absent = [row for row in plain_rows(SINGLE, "actv_grad") if row["shape"] == "nan"]

    assert 8 == len(absent)
    assert len([*plain_rows(SINGLE, "actv_grad")]) - 8 == single.value(
        "SELECT count(*) FROM tensor_stats WHERE kind LIKE 'act_grad_%'"
    )
    assert 0 == single.value(
        "SELECT count(*) FROM tensor_stats WHERE kind = 'act_grad_in' AND tensor IN ('', 'embedding')"
    )
    assert 0 == single.value("SELECT count(*) FROM tensor_stats WHERE norm IS NULL OR isnan(norm)")


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_in_gradient_and_moment_have_the_same_step(logs, rank):
    """In msprobe's files their steps differ by one."""
    logs.import_log(NAN)
    first = logs.query(
        "SELECT kind, min(step) AS step, arg_min(tensor, step) AS tensor FROM tensor_stats "
        "WHERE rank = $rank AND nans > 0 AND kind IN ('grad_reduced', 'exp_avg', 'exp_avg_sq') "
        "GROUP BY kind ORDER BY kind",
        rank=rank,
    )

    assert [("exp_avg", 3), ("exp_avg_sq", 3), ("grad_reduced", 3)] == [(row["kind"], row["step"]) for row in first]
    assert {"module.head.weight"} == {row["tensor"] for row in first}
    assert 2 == logs.value("SELECT world_size FROM runs")


def test_tensors_are_described_per_slot(single):
    query = """SELECT "index", shape, dtype, module FROM tensors WHERE kind = $kind AND tensor = $tensor ORDER BY ALL"""

    assert [{"index": None, "shape": [4, 8], "dtype": "int64", "module": "embedding"}] == single.query(
        query, kind="act_in", tensor="embedding"
    )
    assert [(slot, [8, 4, 2, 8], "float32", "layers.0.core") for slot in range(3)] == [
        tuple(row.values()) for row in single.query(query, kind="act_in", tensor="layers.0.core")
    ]
    assert ["embedding"] == [row["module"] for row in single.query(query, kind="exp_avg", tensor="embedding.weight")]


@pytest.mark.thorough
def test_grown_folder_adds_only_new_rows(logs):
    """Steps continue in the last file of each family, even within a line; new files and ranks appear."""
    target = logs.folder / "out"
    shutil.copytree(NAN, target)
    whole = {path: path.read_bytes() for path in target.rglob("*.csv")}
    for path, content in whole.items():
        if path.name.endswith("_3-5.csv") or "rank1" in str(path):
            path.unlink()
        else:
            path.write_bytes(content[: len(content) * 2 // 3])
    first = logs.import_log(target)
    for path, content in whole.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    second, third = logs.import_log(target), logs.import_log(target)
    logs.import_log(NAN, run="at once")
    columns = "rank, attempt, step, micro_step, kind, tensor, norm, nans"
    query = f"SELECT {columns} FROM tensor_stats WHERE run = $run ORDER BY ALL"

    assert first.malformed > 0 == second.malformed
    assert 0 < first.rows_stored
    assert 0 < second.rows_stored
    assert 0 == third.rows_stored
    assert logs.query(query, run="at once") == logs.query(query, run="r")


def test_files_may_arrive_in_any_order_and_be_deleted(logs):
    """This happens while a copy is in progress, and after a clean-up."""
    rows = {step: [f"0,{name},{step},1,1,1,1,0,0,[1],x" for name in "abc"] for step in range(12)}
    for steps in ((0, 10, 11), (1, 5), range(12)):
        for step in steps:
            csv_file(logs, rows[step], name=f"grad_reduced_{step}-{step}.csv")
        logs.import_log(logs.folder / "out")
    for step in range(8):
        (logs.folder / "out" / FOLDER / f"grad_reduced_{step}-{step}.csv").unlink()
    csv_file(logs, ["0,a,12,1,1,1,1,0,0,[1],x"], name="grad_reduced_12-12.csv")
    logs.import_log(logs.folder / "out")
    found = logs.query("SELECT step, count(*) AS rows FROM tensor_stats GROUP BY step ORDER BY step")

    assert [*((step, 3) for step in range(1, 13)), (13, 1)] == [tuple(row.values()) for row in found]


def test_misaligned_communication_rows_are_reported(logs):
    report = logs.import_log(SAMPLES / "cc_misaligned")

    assert (0, 2) == (report.rows_stored, report.malformed)
    assert [2, 3] == [fault.line for fault in report.faults]
    assert "30 fields, but the header has 10: a row of msprobe about communication" in report.faults[0].text


def test_anomaly_records_become_events(logs):
    logs.import_log(SINGLE / "anomaly_detected" / "rank0" / "anomaly.json")
    entries = json.loads((SINGLE / "anomaly_detected" / "rank0" / "anomaly.json").read_text())
    found = logs.query("SELECT * FROM events WHERE call_id = 44")[0]

    assert len(entries) == logs.value("SELECT count(*) FROM events WHERE type = 'anomaly'")
    assert ("AnomalyNan", "act_grad_in", "", "zeros", 1, 0, 0) == tuple(
        found[name] for name in ("rule", "kind", "tensor", "op", "step", "micro_step", "rank")
    )
    assert math.isnan(found["value"])
    assert {"group_mates": [0], "index": None, "tag_name": "0:.input:0/rank0/actv_grad"} == json.loads(found["details"])


def test_ranked_anomalies_are_not_counted_twice(logs):
    logs.import_log(SINGLE / "anomaly_detected")
    ranked = logs.import_log(SINGLE / "anomaly_detected" / "anomaly_analyse.json", run="ranked")

    assert 5 == ranked.records
    assert logs.value("SELECT count(*) FROM events WHERE run = 'r'") == len(
        json.loads((SINGLE / "anomaly_detected" / "rank0" / "anomaly.json").read_text())
    )


def test_anomaly_record_without_a_value_is_read(logs):
    tag = "0:1.self_attention.core_attention_flash_0/rank0/input_grad"
    entry = {"rank": 0, "step": 1, "micro_step": 0, "pp_stage": 0, "vpp_stage": 0, "call_id": -1, "tag_name": tag}
    message = f"Rule AnomalyTurbulence reports anomaly signal in ('{tag}', 'min') at step 1."
    document = {f"{tag}_step_1_call_112": entry | {"message": message, "group_mates": [0, 1]}}
    logs.import_log(logs.write("rank0/anomaly.json", json.dumps(document)))
    found = logs.query("SELECT step, micro_step, rule, kind, op, value, call_id, severity FROM events")

    assert [(2, None, "AnomalyTurbulence", "act_grad_in", "min", None, None, "warning")] == [
        tuple(row.values()) for row in found
    ]


@pytest.mark.parametrize(
    "end", [lambda half: "", lambda half: half.replace('"rank":', '"rank"')], ids=["cut", "no colon"]
)
def test_damaged_anomaly_file_gives_its_complete_entries(logs, end):
    text = (SINGLE / "anomaly_detected" / "rank0" / "anomaly.json").read_text()
    report = logs.import_log(
        logs.write("anomaly.json", text[: len(text) // 2] + end(text[len(text) // 2 :])), kind="msprobe"
    )

    assert 0 < report.records < len(json.loads(text))
    assert 1 == report.malformed


def test_structure_and_stacks_become_modules(logs):
    stacks = 'module_name,stack_info\n0:layers.0,"File train.py, line 3, in step,\n loss = model(x)"\n1:head,here\n'
    logs.write(f"out/{FOLDER}/stack_info.csv", stacks)
    target = logs.folder / "out" / "module_struct" / "rank0"
    shutil.copytree(SAMPLES / "print_struct", target)
    logs.import_log(logs.folder / "out")
    core = logs.query(
        "SELECT rank, vpp_stage, inputs, outputs FROM modules WHERE module = 'layers.0.core' AND inputs IS NOT NULL"
    )

    assert [{"shape": [8, 4, 2, 8], "dtype": "float32"}] * 3 == json.loads(core[0]["inputs"])
    assert (0, 0, 19) == (core[0]["rank"], core[0]["vpp_stage"], logs.value("SELECT count(inputs) FROM modules"))
    assert [("layers.0", 0, "File train.py, line 3, in step,\n loss = model(x)"), ("head", 1, "here")] == [
        tuple(row.values())
        for row in logs.query("SELECT module, vpp_stage, stack FROM modules WHERE stack IS NOT NULL ORDER BY seq")
    ]


@pytest.mark.parametrize(
    ("path", "because"),
    [
        (SINGLE, "11 statistics files of 1 rank folders and 1 JSON files"),
        (SAMPLES / "cc_misaligned" / "other_0-0.csv", "the columns of msprobe's monitor"),
        (SINGLE / "anomaly_detected" / "anomaly_analyse.json", "anomaly records"),
        (SAMPLES / "print_struct" / "module_struct.json", "a model structure"),
    ],
)
def test_detection_gives_the_reason(path, because):
    importer = find_importer(path)
    head = b"" if path.is_dir() else path.read_bytes()

    assert "msprobe" == importer.name
    assert because in importer.detect(path, head).because


def test_line_of_megabytes_and_a_header_that_is_no_text_are_counted(logs):
    rows = [f"0,{name},0,1,1,1,1,0,0,[1],x" for name in ("w" * (1 << 21), "v")]
    logs.write(f"out/{FOLDER}/exp_avg_0-9.csv", b"vpp_stage,name,step,\xff\n0,w,0,1\n")
    report = logs.import_log(csv_file(logs, rows).parent)

    assert (["v"], 2) == (logs.value("SELECT list(tensor) FROM tensor_stats"), report.malformed)


def test_line_with_wrong_quotes_loses_no_other_line(logs):
    rows = [f'0,{name},0,1,1,1,1,0,0,"[1, 2]",x' for name in "ad"]
    rows.insert(1, '0,b",0,1,1,1,1,0,0,[1],"x')
    report = logs.import_log(csv_file(logs, rows))

    assert (["a", "d"], [3]) == (
        logs.value("SELECT list(tensor ORDER BY tensor) FROM tensor_stats"),
        [fault.line for fault in report.faults],
    )


def test_links_to_other_folders_are_not_followed(logs):
    csv_file(logs, ["0,w,0,1,1,1,1,0,0,[1],x"])
    elsewhere = logs.folder / "elsewhere"
    shutil.copytree(SINGLE, elsewhere)
    (logs.folder / "out" / "link").symlink_to(elsewhere)

    assert 1 == sum(len(launch) for launch in discovery.find(logs.folder / "out").launches)


@pytest.mark.parametrize(("time_zone", "hour"), [("UTC+8", 13), ("UTC", 21), ("Asia/Tokyo", 12)])
def test_start_of_the_run_is_read_in_the_time_zone_of_the_option(tmp_path, time_zone, hour):
    file = tmp_path / FOLDER / "grad_reduced_0-9.csv"
    file.parent.mkdir()
    file.write_text(f"{HEADER}\n0,w,0,1,1,1,1,0,0,[1],torch.float32\n")
    written = dt.datetime(2025, 12, 10, tzinfo=dt.UTC).timestamp()
    os.utime(file, (written, written))
    *_, run = Msprobe(time_zone).read(tmp_path, Faults())

    assert dt.datetime(2025, 12, 3, hour, 34, 40, tzinfo=dt.UTC).timestamp() * 1e6 == run.started_at
