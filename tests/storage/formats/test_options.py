"""What may be exported is checked before anything is written; formats are found by their files."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

import rankscope_storage.formats as package
from rankscope_contract.model.kinds import Kind
from rankscope_contract.msprobe.names import FAMILY_OF
from rankscope_storage.base.errors import ExportError
from rankscope_storage.formats import ExportOptions, export_formats
from rankscope_storage.formats.common.base import parse_time

NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


def test_every_file_that_defines_an_exporter_is_one():
    files = Path(package.__file__).parent.glob("*.py")
    defining = sum("\nEXPORT_FORMAT = " in file.read_text(encoding="utf-8") for file in files)

    assert defining == len(export_formats()) >= 3
    assert {"tensorboard", "openmetrics", "parquet"} <= set(export_formats())
    assert all(exporter.name == name and exporter.help for name, exporter in export_formats().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time_start": NOON, "time_end": NOON - dt.timedelta(1)}, "exchange them"),
        ({"time_start": NOON.replace(tzinfo=None)}, "has no time zone"),
        ({"steps": (2, 1)}, "end before they begin"),
        ({"step_count_per_record": 0}, "must be 1 to 1,000,000"),
        ({"process_num": 0}, "process_num must be 1 or more"),
        ({"step_partition": 0}, "step_partition must be 1 or more"),
        ({"seed_rounding": 18}, "number of decimals"),
        ({"data_type_list": ("actv", "wg")}, "no data type is called 'wg': known are act_grad_in"),
    ],
)
def test_options_that_mean_nothing_are_refused_with_the_fix(options, said):
    with pytest.raises(ExportError, match=said):
        ExportOptions(**options)


def test_every_kind_belongs_to_a_family_and_families_may_be_named_beside_kinds():
    assert set(Kind) == set(FAMILY_OF)
    assert {"act_in", "act_out", "momentum"} == ExportOptions(data_type_list=("actv", "momentum")).kinds()
    assert ExportOptions().kinds() is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-03-01T12:00:00+01:00", dt.datetime(2026, 3, 1, 11, tzinfo=dt.UTC)),
        ("2026-03-01 12:00", NOON),
        ("2026-03-01", NOON.replace(hour=0)),
        ("Mar01_12-00-00", NOON),
        ("Dec31_23-59-59", dt.datetime(2025, 12, 31, 23, 59, 59, tzinfo=dt.UTC)),  # closer than that of 2026
        ("Feb29_00-00-00", dt.datetime(2028, 2, 29, tzinfo=dt.UTC)),  # a day closer than that of 2024
    ],
)
def test_times_are_iso_or_those_of_the_tools_folders(text, expected):
    """`time_start="Dec03_21-34-40"` of the existing tool has no year: the closest is meant."""
    assert expected == parse_time(text, NOON)


@pytest.mark.parametrize("text", ["yesterday", "Feb30_00-00-00", "Foo01_00-00-00", "", "Dec03"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ExportError, match="is no time"):
        parse_time(text, NOON)
