"""Discovery of quantities: every subclass in the folder with a name of its own, direct or indirect."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankscope_exporter import quantities
from rankscope_exporter.quantities.parameters import Parameters


@pytest.fixture
def add() -> Iterator[Callable[..., Any]]:
    """Return a function that adds a subclass to a module of the folder of quantities, until the test ends."""
    added: list[type] = []

    def make(base: type, module: str = "rankscope_exporter.quantities.added", **members: str) -> type:
        added.append(type(base)("Added", (base,), {"__module__": module, **members}))
        return added[-1]

    yield make
    added.clear()
    gc.collect()  # a class that still exists would still be found
    assert {"added", "further"}.isdisjoint(quantities.quantity_classes())


def test_direct_and_indirect_subclasses_of_the_folder_are_quantities(add):
    direct, indirect = add(add(quantities.Quantity), name="added"), add(Parameters, name="further")
    add(quantities.Quantity, "tests.outside", name="outside")
    classes = quantities.quantity_classes()

    assert (direct, indirect) == (classes["added"], classes["further"])
    assert sorted(classes) == list(classes)
    assert "outside" not in classes


@pytest.mark.parametrize("members", [{}, {"name": "parameters"}])
def test_subclass_without_a_new_name_is_rejected(members, add):
    add(Parameters, **members)
    with pytest.raises(TypeError, match=r"added\.Added: another quantity has the name 'parameters'"):
        quantities.quantity_classes()
