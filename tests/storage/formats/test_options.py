"""Options are checked before anything is written, and formats are found by their files."""

from __future__ import annotations

import datetime as dt

import pytest

from rankscope_contract.model.kinds import Kind
from rankscope_contract.msprobe.csv_layout import FAMILY_OF
from rankscope_storage.base.errors import ExportError
from rankscope_storage.formats import ExportOptions
from rankscope_storage.formats.common.base import parse_time

NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time_start": NOON, "time_end": NOON - dt.timedelta(1)}, "exchange them"),
        ({"time_start": NOON.replace(tzinfo=None)}, "has no time zone"),
        ({"steps": (2, 1)}, "end before they begin"),
        ({"time_zone": "Berlin"}, "time_zone 'Berlin' is unknown"),
        ({"step_count_per_record": 0}, "must be 1 to 1,000,000"),
        ({"process_num": 0}, "process_num must be 1 or more"),
        ({"step_partition": 0}, "step_partition must be 1 or more"),
        ({"seed_rounding": 18}, "number of decimals"),
        ({"data_type_list": ("actv", "wg")}, "there is no data type 'wg'; data types are act_grad_in"),
    ],
)
def test_invalid_options_are_rejected_with_the_fix(options, said):
    with pytest.raises(ExportError, match=said):
        ExportOptions(**options)


def test_data_types_are_families_or_kinds():
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
def test_times_are_iso_or_msprobe_folder_times(text, expected):
    """`time_start="Dec03_21-34-40"` of the existing tool has no year: the closest is meant."""
    assert expected == parse_time(text, NOON)


@pytest.mark.parametrize("text", ["yesterday", "Feb30_00-00-00", "Foo01_00-00-00", "", "Dec03"])
def test_invalid_time_is_rejected(text):
    with pytest.raises(ExportError, match="is not a time"):
        parse_time(text, NOON)
