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


@pytest.mark.parametrize("key", [*KEYS, *CC_KEYS, *L2_HOOKS, *OBJECTS, "rules", "dump"])
def test_page_names_every_key(key):
    keys = PAGE.split("## Keys of the configuration")[1].split("## Calls")[0]

    assert re.search(rf"^\|[^|]*`{key}`", keys, re.MULTILINE)


@pytest.mark.parametrize("call", [name for name in dir(TrainerMon) if not name.startswith("_")])
def test_page_names_every_call(call):
    assert call in PAGE.split("## Calls")[1].split("## Environment")[0] or call == "faults"


@pytest.mark.parametrize("argument", [*AS_IN_THE_CODE, "process_group", "params_have_main_grad", "opt_ty"])
def test_page_names_every_argument(argument):
    assert re.search(rf"^\|[^|]*`{argument}`", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    "word",
    [
        "MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR", "module_struct.json", "anomaly.json", "anomaly_analyse.json",
        "stack_info.csv", "csv2tensorboard_by_step", "csv2db", "anomaly_processor", *FORMATS,
    ],
)  # fmt: skip
def test_page_names_every_variable_file_and_program(word):
    assert word in PAGE


@pytest.mark.parametrize("page", ["docs/index.md", "README.md"])
def test_migration_page_is_linked(page):
    assert "migration.md" in (DOCS.parent / page).read_text(encoding="utf-8")
