"""The page on training logs uses the names of the importers; `tests/project` looks at the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path

from rankscope_contract.model.scalar_names import canonical
from rankscope_ingest.importers import importers

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "importing-training-logs.md"


def test_page_uses_existing_names_and_formats():
    text = PAGE.read_text(encoding="utf-8")
    formats, names = text.split("## Names and units")[0], text.split("## Names and units")[1].split("Any other")[0]
    shown = [cell for line in names.splitlines() if line.startswith("| `") for cell in line.split("|")[1:2]]

    assert set(re.findall(r"\| `(\w+)` \|", formats)) <= set(importers())
    for cell in shown:
        for name in re.findall(r"`(\w+)`", cell):
            assert name.removesuffix("_mean") == canonical(name.removesuffix("_mean")).name
