"""What can be measured. A quantity is added by adding a file with a `Quantity` subclass; its name selects it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.base.validation import did_you_mean
from rankscope_exporter.quantities.base import Quantity

__all__ = ["Quantity", "quantity_classes", "select_quantities"]


def quantity_classes() -> dict[str, type[Quantity]]:
    """Return every quantity class by its name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {cls.name: cls for cls in sorted(Quantity.__subclasses__(), key=lambda cls: cls.name)}


def select_quantities(names: Iterable[str]) -> list[type[Quantity]]:
    """Return the classes of `names`; a name that is none is answered with the nearest one."""
    classes = quantity_classes()
    for name in names:
        if name not in classes:
            hint = did_you_mean(name, classes)
            raise ConfigError(f"quantities: {name!r} is unknown; there are {', '.join(classes)}.{hint}")
    return [classes[name] for name in names]
