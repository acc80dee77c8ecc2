"""Discovery of quantities: every subclass in the folder with a name of its own, direct or indirect."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope_exporter import quantities

IMPORTS = """
from typing import ClassVar
from rankscope_exporter.quantities.base import Quantity
from rankscope_exporter.quantities.parameters import Parameters
"""


@pytest.fixture
def add_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that adds a file with this content to the folder of quantities, until the test ends."""
    monkeypatch.setattr(quantities, "__path__", [*quantities.__path__, str(tmp_path)])

    def add(content: str) -> None:
        tmp_path.joinpath("added.py").write_text(IMPORTS + content)
        importlib.invalidate_caches()

    yield add
    monkeypatch.undo()
    sys.modules.pop("rankscope_exporter.quantities.added", None)
    vars(quantities).pop("added", None)
    gc.collect()  # a class that still exists would still be found
    assert "added" not in quantities.quantity_classes()


def test_direct_and_indirect_subclasses_of_the_folder_are_quantities(add_file):
    add_file("""
class Base(Quantity):
    pass

class Added(Base):
    name: ClassVar[str] = "added"

class Further(Parameters):
    name: ClassVar[str] = "further"
""")

    class Outside(quantities.Quantity):
        name = "outside"

    classes = quantities.quantity_classes()

    assert ["Added", "Further"] == [classes[name].__name__ for name in ("added", "further")]
    assert sorted(classes) == list(classes)
    assert Outside.name not in classes


@pytest.mark.parametrize("body", ["pass", 'name: ClassVar[str] = "parameters"'])
def test_subclass_without_a_new_name_is_rejected(body, add_file):
    add_file(f"""
class Added(Parameters):
    {body}
""")
    with pytest.raises(TypeError, match=r"added\.Added: another quantity has the name 'parameters'"):
        quantities.quantity_classes()
