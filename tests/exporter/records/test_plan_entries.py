"""Plan entries that are created when they are read."""

from __future__ import annotations

import pytest
import torch

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.records.plan_entries import Descriptions, ParameterEntries, Placed, entries_at

BOTH = Descriptions([("a.weight", 0), ("b.weight", 1)], [((3,), torch.float32), ((2, 2), torch.bfloat16)])
ENTRIES = ParameterEntries([("first", BOTH)]) + ParameterEntries([("second", BOTH)])
ALL = [PlanEntry(kind, name, index) for kind in ("first", "second") for name, index in BOTH.fields]


def test_entries_of_each_kind_are_those_of_all_parameters():
    nothing = ParameterEntries([("first", Descriptions([], []))])

    assert ALL == list(ENTRIES) == [ENTRIES[position] for position in range(4)]
    assert (ALL[-1], ALL[1:3], {"first", "second"}) == (ENTRIES[-1], ENTRIES[1:3], ENTRIES.kinds)
    assert ([], set()) == (list(nothing), nothing.kinds)


def test_specs_of_several_kinds_are_rejected():
    assert list(BOTH.specs) == list(ENTRIES.specs(range(2, 4)))
    with pytest.raises(ValueError, match="several kinds"):
        ENTRIES.specs(range(1, 3))


def test_table_rows_between_other_entries_have_their_entries():
    other, placed = PlanEntry("other", "c"), Placed(ENTRIES, 5)

    assert (other, ALL[0], ALL[3]) == entries_at([2, 5, 8], [other, placed, placed])
