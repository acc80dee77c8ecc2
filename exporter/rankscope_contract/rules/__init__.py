"""Anomaly rules as classes.

To add a rule, add a module to this folder: each `AnomalyRule` subclass in it is registered. A rule exists in
Python and in PromQL, and has the same meaning in both. Its Python form uses operators only, so the same expression
works for a float, a torch tensor and a numpy array.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import Any

from rankscope_contract.rules.base import AnomalyRule

__all__ = ["AnomalyRule", "rule_classes", "rule_from_config"]


def rule_classes() -> dict[str, type[AnomalyRule]]:
    """Return every rule class that is defined in the modules of this package, by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {cls.__name__: cls for cls in AnomalyRule.__subclasses__() if cls.__module__.startswith(f"{__name__}.")}


def rule_from_config(entry: dict[str, Any]) -> AnomalyRule:
    """Return the rule of a configuration entry `{"rule_name": …, "args": {…}}`.

    Raises ValueError for an unknown rule or argument; the text lists the known rules or arguments.
    """
    classes = rule_classes()
    name = entry.get("rule_name", "")
    if name not in classes:
        near = difflib.get_close_matches(str(name), classes, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown rule {name!r}: known rules are {', '.join(sorted(classes))}.{hint}")
    arguments = entry.get("args") or {}
    try:
        return classes[name](**arguments)
    except TypeError as error:
        allowed = ", ".join(classes[name].__dataclass_fields__)
        raise ValueError(f"rule {name}: {error}. The arguments of this rule are: {allowed}") from error
