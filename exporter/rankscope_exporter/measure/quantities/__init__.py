"""Registry of the quantities.

To add a quantity, add a file with a `Quantity` subclass to the folder of this module. The configuration selects the
quantity by the attribute `name` of this subclass.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankscope_exporter.measure.quantities.base import Quantity
from rankscope_exporter.process.discovery import import_folder
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.validation import listed

__all__ = ["Quantity", "quantity_classes", "select_quantities"]


def quantity_classes() -> dict[str, type[Quantity]]:
    """Return every quantity class of this folder by its name, sorted by name.

    A quantity is a direct or indirect subclass of `Quantity` that sets `name`. A subclass without a name is a base
    class of quantities. Raise TypeError if a class inherits its name, or if two classes have the same name.
    """
    import_folder(__name__)
    classes: list[type[Quantity]] = [Quantity]
    for cls in classes:
        classes += cls.__subclasses__()  # which the loop reaches later
    named = [cls for cls in classes if hasattr(cls, "name") and cls.__module__.startswith(f"{__name__}.")]
    names = sorted(cls.name for cls in named)
    if len(set(names)) < len(names):
        raise TypeError(f"two quantities have the same name, which one may have inherited: {', '.join(names)}")
    return {cls.name: cls for cls in sorted(named, key=lambda cls: cls.name)}


def select_quantities(names: Iterable[str]) -> list[type[Quantity]]:
    """Return the quantity classes with these `names`. Raise ConfigError if a name is unknown.

    The error contains all known names, and the one that is most similar to the unknown name.
    """
    classes = quantity_classes()
    for name in names:
        if name not in classes:
            raise ConfigError(f"quantities: {name!r} is unknown; the quantities are {listed(classes, name)}")
    return [classes[name] for name in names]
