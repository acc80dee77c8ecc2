"""Conversion of msprobe's output to event files, read back with TensorBoard, and the arguments of both converters."""

import inspect
import re
import shutil
import struct
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.cli.msprobe.conftest import SINGLE, TENSOR_TYPES, TWO_RANKS, csv_rows, numbers

from rankscope.msprobe import csv2tensorboard_by_step

HEADER = "vpp_stage,name,step,norm\n"


def points(output):
    """Return the values by folder, tag and step, as text, in which NaN equals NaN."""
    found = {}
    for folder in {path.parent for path in output.rglob("*tfevents*")}:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                found[folder.relative_to(output).as_posix(), tag, event.step] = repr(event.value)
    return found


def expected_points(output, types=TENSOR_TYPES):
    found = {}
    for rank, data_type, row in csv_rows(output, types):
        micro = f":micro{row['micro_step']}" if "micro_step" in row else ""
        for name, number in numbers(row).items():
            tag = f"vp{row['vpp_stage']}:{row['name']}{micro}/{name}"
            value = struct.unpack("<f", struct.pack("<f", number))[0]
            found[f"rank{rank}/{data_type}", tag, int(row["step"])] = repr(value)
    return found


def rank_folder(root, time, rank, rows, first=0, last=9):
    folder = root / f"{time}-rank{rank}-0123abcd"
    folder.mkdir(parents=True)
    text = HEADER + "".join(f"0,w,{step},{norm}\n" for step, norm in rows.items())
    (folder / f"grad_reduced_{first}-{last}.csv").write_text(text)


def norms(output, rank=0):
    return {
        step: float(value) for (folder, _, step), value in points(output).items() if folder.startswith(f"rank{rank}/")
    }


def test_arguments_are_those_of_the_manual():
    parameters = inspect.signature(csv2tensorboard_by_step).parameters

    assert [
        "monitor_path", "time_start", "time_end", "process_num", "data_type_list", "output_dirpath",
    ] == list(parameters)  # fmt: skip
    assert (1, None, None) == tuple(parameters[name].default for name in list(parameters)[3:])


@pytest.mark.parametrize(("output", "process_num"), [(SINGLE, 8), (TWO_RANKS, 1), (TWO_RANKS, 8)])
def test_every_value_of_msprobe_is_a_point(output, process_num, tmp_path):
    csv2tensorboard_by_step(str(output), process_num=process_num, output_dirpath=str(tmp_path))

    assert expected_points(output) == points(tmp_path)


@pytest.mark.parametrize(
    ("start", "end", "ranks"),
    [
        ("Dec03_21-34-40", "Dec03_21-34-42", {0, 1}),
        ("Dec03_21-34-41", "Dec03_21-34-42", {1}),
        (None, "Dec03_21-34-40", {0, 3}),  # without a year, January is before December
        *(("Dec03_21-34-42", None, {1, 2}), ("Dec31_23-00-00", "Jan01_01-00-00", {2, 3}), (None, None, {0, 1, 2, 3})),
    ],
)
def test_range_of_times_is_closed_and_may_span_a_new_year(start, end, ranks, tmp_path):
    times = ("Dec03_21-34-40", "Dec03_21-34-42", "Dec31_23-59-59", "Jan01_00-00-01")
    for rank, time in enumerate(times):
        rank_folder(tmp_path / "out", time, rank, {0: 1.0})
    csv2tensorboard_by_step(str(tmp_path / "out"), start, end, output_dirpath=str(tmp_path / "tb"))

    assert ranks == {int(path.name.removeprefix("rank")) for path in (tmp_path / "tb").iterdir()}


def test_rows_of_the_latest_launch_replace_repeated_steps(tmp_path, capsys):
    rank_folder(tmp_path / "out", "Dec03_21-34-40", 0, {0: 1.0, 1: 2.0, 2: 3.0})
    rank_folder(tmp_path / "out", "Dec03_22-00-00", 0, {2: 30.0, 3: 40.0})
    csv2tensorboard_by_step(str(tmp_path / "out"), output_dirpath=str(tmp_path / "tb"))

    assert {0: 1.0, 1: 2.0, 2: 30.0, 3: 40.0} == norms(tmp_path / "tb")
    assert "rank 0 has 2 folders" in capsys.readouterr().err


def test_default_output_is_a_folder_in_the_monitor_output(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(TWO_RANKS, tmp_path / "monitor_output")
    csv2tensorboard_by_step("~/monitor_output", data_type_list=["exp_avg"])
    (folder,) = (tmp_path / "monitor_output").glob("*csv2tensorboard_by_step")

    assert re.fullmatch(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d-csv2tensorboard_by_step", folder.name)
    assert expected_points(TWO_RANKS, ("exp_avg",)) == points(folder)
    assert f"output has been saved to: {folder}" in capsys.readouterr().out


def test_second_conversion_of_chosen_families_replaces_the_first(tmp_path):
    for _ in range(2):
        csv2tensorboard_by_step(str(SINGLE), data_type_list=["actv"], output_dirpath=str(tmp_path))

    assert 1 == len(list(tmp_path.rglob("*tfevents*")))
    assert expected_points(SINGLE, ("actv",)) == points(tmp_path)


def test_event_files_of_another_program_are_not_touched(tmp_path):
    other = tmp_path / "rank0" / "actv" / "events.out.tfevents.1.host"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"theirs")
    with pytest.raises(ValueError, match="choose another output_dirpath"):
        csv2tensorboard_by_step(str(SINGLE), output_dirpath=str(tmp_path))

    assert b"theirs" == other.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_start": "2026-03-01"}, "time_start '2026-03-01' is not the time of a folder"),
        ({"time_start": "Nov21_10-00-00", "time_end": "Nov21_09-00-00"}, "is after time_end"),
        ({"time_start": "Dec01_00-00-00"}, "its folders begin at Nov21_09-14-24"),
        ({"process_num": 0}, "process_num must be an integer from 1 to 128"),
        ({"process_num": 129}, "process_num must be an integer from 1 to 128"),
        ({"data_type_list": ["grads"]}, "unknown data type 'grads': choose from actv"),
        ({"data_type_list": "actv"}, "data_type_list must be a list"),
        ({"monitor_path": "/nowhere"}, "/nowhere is not a folder"),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_fix(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        csv2tensorboard_by_step(**{"monitor_path": str(TWO_RANKS), "output_dirpath": str(tmp_path), **arguments})

    assert [] == list(tmp_path.iterdir())


def test_script_without_main_guard_runs_once(tmp_path):
    script = tmp_path / "convert.py"
    script.write_text(
        "from rankscope.msprobe import csv2tensorboard_by_step\nprint('start')\n"
        f"csv2tensorboard_by_step(monitor_path={str(TWO_RANKS)!r}, time_start='Nov21_09-14-24', "
        f"time_end='Nov21_09-14-25', process_num=8, data_type_list=['exp_avg'], output_dirpath={str(tmp_path)!r})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)

    assert 1 == done.stdout.count("start")
    assert expected_points(TWO_RANKS, ("exp_avg",)) == points(tmp_path)
