"""Anomaly rules as classes.

To add a rule, add a module to this folder: each `AnomalyRule` subclass in it is registered. A rule exists in
Python and in PromQL, and has the same meaning in both. Its Python form uses operators only, so the same expression
works for a float, a torch tensor and a numpy array.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import math
import pkgutil
from dataclasses import dataclass, replace
from typing import Any, Self

from rankscope_contract.model.events import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyRule:
    """A condition on each series of one rank. `name` is unique within a configuration and is a label of the alert.

    `kinds` limits the rule to these kinds of quantity. With None the rule evaluates all kinds, and scalars.
    """

    name: str = ""
    kinds: tuple[str, ...] | None = None
    severity: str = Severity.WARNING
    summary: str = ""
    runbook: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", type(self).__name__)
        if not isinstance(self.name, str):
            raise ValueError(f"name of a rule must be a text, not {self.name!r}")  # noqa: TRY004 - as for all settings
        if self.severity not in set(Severity):
            raise ValueError(f"{self.name}: severity must be one of {', '.join(Severity)}, not {self.severity!r}")
        if self.kinds is not None:
            object.__setattr__(self, "kinds", tuple(self.kinds))

    def judges(self, kind: str | None, op: str) -> bool:
        """Return whether the rule evaluates the op `op` of tensors of `kind`. `kind` is None for a scalar."""
        raise NotImplementedError

    def reads(self, kind: str | None, op: str) -> bool:
        """Return whether the rule needs the op `op` of tensors of `kind`."""
        return self.judges(kind, op)

    def for_scalar(self, name: str) -> Self | None:  # noqa: ARG002 - some rules depend on the name
        """Return the rule that applies to the scalar `name`; None if the rule does not evaluate it."""
        return self if self.judges(None, "value") else None

    def fires(self, op: str, value: Any, baseline: Any) -> Any:
        """Return whether the rule fires for `value` of op `op`: a bool for a float, an array of bool for an array.

        `baseline` is the baseline before `value`. A NaN baseline means that no baseline exists yet; comparisons with
        NaN are false.
        """
        raise NotImplementedError

    def limit(self) -> float | None:
        """Return the threshold, which the metric `rankscope_rule_threshold` exports; None if the rule has none."""
        raise NotImplementedError

    def needed_values(self) -> int | None:
        """Return the number of values in the baseline before the rule can fire; None if it needs no baseline."""
        return None

    def check_threshold(self, threshold: Any) -> None:
        """Raise ValueError unless `threshold` is a number other than NaN that a float can represent."""
        try:
            number = math.nan if isinstance(threshold, bool | str) else float(threshold)
        except (TypeError, OverflowError):
            number = math.nan
        if math.isnan(number):
            shown = repr(threshold) if len(repr(threshold)) < 40 else f"{repr(threshold)[:30]}…"
            raise ValueError(f"{self.name}: threshold must be a number, not {shown}")

    def check_names(self, *fields: str) -> None:
        """Store tuples in the given fields. Raise ValueError unless they contain lists of names."""
        for field in fields:
            given: object = getattr(self, field)
            if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
                raise ValueError(f'{self.name}: {field} must be a list of names such as ["loss"], not {given!r}')
            object.__setattr__(self, field, tuple(getattr(self, field)))

    def covers(self, kind: str | None) -> bool:
        return self.kinds is None or kind in self.kinds


def rule_classes() -> dict[str, type[AnomalyRule]]:
    """Return every rule class that is defined in the modules of this package, by name."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "evaluator":  # needs numpy
            importlib.import_module(f"{__name__}.{module.name}")
    return {cls.__name__: cls for cls in AnomalyRule.__subclasses__() if cls.__module__.startswith(f"{__name__}.")}


def rule_from_config(entry: dict[str, Any]) -> AnomalyRule:
    """Return the rule of a configuration entry `{"rule_name": …, "args": {…}}`.

    `rule_name` is that of a class, or of a rule of `score.SCORE_RULES`, of which `args` replace fields.

    Raises ValueError for an unknown rule or argument; the text lists the known rules or arguments.
    """
    classes = rule_classes()
    presets = {rule.name: rule for rule in importlib.import_module(f"{__name__}.score").SCORE_RULES}
    name = entry.get("rule_name", "")
    if name not in classes and name not in presets:
        near = difflib.get_close_matches(str(name), [*classes, *presets], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown rule {name!r}: known rules are {', '.join(sorted([*classes, *presets]))}.{hint}")
    arguments = entry.get("args") or {}
    create = classes[name] if name in classes else functools.partial(replace, presets[name])
    try:
        return create(**arguments)
    except TypeError as error:
        allowed = ", ".join((classes.get(name) or type(presets[name])).__dataclass_fields__)
        raise ValueError(f"rule {name}: {error}. The arguments of this rule are: {allowed}") from error
