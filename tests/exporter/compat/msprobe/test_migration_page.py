"""Tests that the migration page names every key, call, variable and file of msprobe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope_exporter.compat.msprobe import TrainerMon
from rankscope_exporter.compat.msprobe.config_translation import CC_KEYS, FORMATS, KEYS, L2_HOOKS
from rankscope_exporter.compat.msprobe.trainer_mon import AS_IN_THE_CODE
from rankscope_exporter.model.pytree import OBJECTS

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "migration.md").read_text(encoding="utf-8")


def rows_of(text: str) -> set[str]:
    """Return the names in the first column of the tables in `text`."""
    return {name for cell in re.findall(r"^\|([^|]*)\|", text, re.MULTILINE) for name in re.findall(r"`(.*?)`", cell)}


def test_page_names_every_key_call_and_argument():
    keys, calls = PAGE.split("## Keys of the configuration")[1].split("## Calls")
    methods = {name for name in dir(TrainerMon) if not name.startswith("_")} - {"faults"}

    assert set() == {*KEYS, *CC_KEYS, *L2_HOOKS, *OBJECTS, "rules", "dump"} - rows_of(keys)
    assert set() == {name for name in methods if name not in calls.split("## Environment")[0]}
    assert set() == {*AS_IN_THE_CODE, "process_group", "params_have_main_grad", "opt_ty"} - rows_of(PAGE)


def test_page_names_every_variable_file_and_program():
    files = {"module_struct.json", "anomaly.json", "anomaly_analyse.json", "stack_info.csv"}
    programs = {"csv2tensorboard_by_step", "csv2db", "anomaly_processor"}

    assert set() == {
        word for word in {"MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR", *files, *programs, *FORMATS} if word not in PAGE
    }


@pytest.mark.parametrize("page", ["docs/index.md", "README.md"])
def test_migration_page_is_linked(page):
    assert "migration.md" in (DOCS.parent / page).read_text(encoding="utf-8")
