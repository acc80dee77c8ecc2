"""The first anomalies of all ranks, compared with the file that msprobe's own processor wrote."""

import json
import shutil
import subprocess
import sys

import pytest
from tests.cli.msprobe.conftest import SINGLE

from rankscope.msprobe import analyse_anomalies

FOLDER = SINGLE / "anomaly_detected"


def entry(tag, step, *, rank=0, micro=0, pp=0, vpp=0, call=0):
    return {
        "rank": rank, "step": step, "micro_step": micro, "pp_stage": pp, "vpp_stage": vpp, "call_id": call,
        "tag_name": tag, "message": f"{tag} at {step}", "group_mates": [0],
    }  # fmt: skip


def write(root, rank, entries):
    folder = root / f"rank{rank}"
    folder.mkdir(parents=True)
    (folder / "anomaly.json").write_text(json.dumps(dict(enumerate(entries))))


def test_file_equals_that_of_msprobe(tmp_path):
    analyse_anomalies(FOLDER, tmp_path, topk=5)

    assert (FOLDER / "anomaly_analyse.json").read_bytes() == (tmp_path / "anomaly_analyse.json").read_bytes()


def test_default_is_eight_anomalies_in_the_folder_itself(tmp_path, capsys):
    shutil.copytree(FOLDER / "rank0", tmp_path / "rank0")
    found = analyse_anomalies(str(tmp_path))

    assert 8 == len(found)
    assert found == json.loads((tmp_path / "anomaly_analyse.json").read_text())
    assert [f"{n}: {anomaly['message']}" for n, anomaly in enumerate(found.values())] == (
        capsys.readouterr().out.splitlines()[1:]
    )


def test_order_of_ranks_stages_and_calls_is_that_of_msprobe(tmp_path):
    first = [
        entry("0:w/rank0/param_updated", 0, call=-1),
        entry("0:a.input:0/rank0/actv", 0, pp=0, call=7),
        entry("0:a.input:0/rank1/actv", 0, pp=1, call=1),
        entry("1:a.input:0/rank0/actv", 0, vpp=1, call=0),
        entry("1:a.input:0/rank0/actv_grad", 0, vpp=1, call=9),
        entry("0:w/rank1/acc_grad", 0, pp=1, call=12),
        entry("0:w/rank0/post_grad", 0, pp=0, call=10),
        entry("0:w/rank0/exp_avg", 0, call=0),
        entry("0:a.input:1/rank0/actv", 0, micro=1),
        entry("0:a.input:0/rank0/actv", 1),
    ]
    write(tmp_path, 0, first[::-2])
    write(tmp_path, 1, first[-2::-2])

    assert [anomaly["message"] for anomaly in first] == [
        anomaly["message"] for anomaly in analyse_anomalies(tmp_path, topk=20).values()
    ]


@pytest.mark.parametrize(
    ("step_list", "steps"),
    [
        *(("[]", {0, 1, 2, 3, 4, 5}), ((), {0, 1, 2, 3, 4, 5}), ("[1, 3]", {1, 3}), ("2", {2}), ("1,3", {1, 3})),
        *(("2:4", {2, 3, 4}), ("2-4", {2, 3, 4}), ("[0, 2:3, 5]", {0, 2, 3, 5}), ([1, 3], {1, 3})),
        *((range(2, 4), {2, 3}), ([9], set())),
    ],
)
def test_steps_are_a_list_or_ranges(step_list, steps, tmp_path):
    write(tmp_path, 0, [entry("0:w/rank0/post_grad", step) for step in range(6)])

    assert steps == {anomaly["step"] for anomaly in analyse_anomalies(tmp_path, step_list=step_list).values()}


def test_out_path_is_a_folder_or_a_json_file(tmp_path):
    analyse_anomalies(FOLDER, tmp_path / "new" / "folder", topk=1)
    analyse_anomalies(FOLDER, tmp_path / "first.json", topk=1)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json"))

    assert ["first.json", "new/folder/anomaly_analyse.json"] == files


def test_damaged_files_lose_only_the_damaged_entries(tmp_path, capsys):
    write(tmp_path, 0, [entry("0:w/rank0/post_grad", 0), {"step": "none"}, 7])
    write(tmp_path, 1, [entry("0:w/rank1/post_grad", 1), entry("0:w/rank1/post_grad", 2)])
    torn = tmp_path / "rank1" / "anomaly.json"
    torn.write_text(torn.read_text()[:-40])
    found = analyse_anomalies(tmp_path)
    errors = capsys.readouterr().err

    assert [0, 1] == [anomaly["step"] for anomaly in found.values()]
    assert "rank0/anomaly.json: 2 entries are not analysed" in errors
    assert "rank1/anomaly.json: 1 entries are not analysed" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"topk": 0}, "topk must be a positive integer"), ({"step_list": "[3"}, "neither a step nor a range")),
        *(({"step_list": "5:2"}, "neither a step nor a range"), ({"step_list": ["1"]}, "must contain integers")),
        ({"data_path": SINGLE}, r"anomaly\.json: use .*anomaly_detected"),
        ({"data_path": SINGLE / "missing"}, r"such as rank0/anomaly\.json"),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_fix(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        analyse_anomalies(**{"data_path": FOLDER, "out_path": tmp_path, **arguments})


@pytest.mark.usual(1)
@pytest.mark.parametrize("steps", ["-s", "--step_list", "--step"])
def test_module_runs_with_the_options_of_the_manual(steps, tmp_path):
    command = [sys.executable, "-m", "rankscope.msprobe.anomaly_processor", "-d", str(FOLDER), "-o", str(tmp_path)]
    done = subprocess.run([*command, "-k", "3", steps, "[1]"], capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "anomaly_analyse.json").read_text())

    assert "" == done.stderr
    assert [1, 1, 1] == [anomaly["step"] for anomaly in found.values()]
