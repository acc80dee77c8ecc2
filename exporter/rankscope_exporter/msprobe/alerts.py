"""The existing tool's `alert`: its rules in our words, with its meaning. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from rankscope_exporter.checks import MOST
from rankscope_exporter.errors import ConfigError

_RULES: Final = ("AnomalyTurbulence", "AnomalyNan")


def rules_of(alert: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rules of `alert` as the setting `rules` takes them. Raises ConfigError."""
    rules = alert.get("rules") or []
    if not isinstance(rules, list):
        raise ConfigError(f"alert.rules is a list of rules, not {rules!r}")
    made = [_rule(entry) for entry in rules]
    names = [rule["rule_name"] for rule in made]
    for place, rule in enumerate(made):
        earlier = names[:place].count(rule["rule_name"])
        if earlier:  # every rule has a name of its own, by which alerts are told apart
            rule["args"]["name"] = f"{rule['rule_name']}_{earlier + 1}"
    return made


def _rule(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or set(entry) - {"rule_name", "args"}:
        raise ConfigError(f'alert.rules holds {{"rule_name": …, "args": {{"threshold": …}}}}, not {entry!r}')
    name = entry.get("rule_name")
    if name not in _RULES:
        near = difflib.get_close_matches(str(name), _RULES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"alert.rules: {name!r} is unknown; there are {', '.join(_RULES)}.{hint}")
    threshold = _threshold(name, entry.get("args"))
    if name == "AnomalyTurbulence":
        return {"rule_name": name, "args": {"threshold": threshold}}
    # There an Inf is only found as a magnitude above a threshold.
    limited = {} if threshold is None else {"threshold": threshold}
    return {"rule_name": name, "args": {**limited, "infs": threshold is not None}}


def _threshold(name: str, arguments: Any) -> float | None:
    if arguments is not None and (not isinstance(arguments, Mapping) or set(arguments) - {"threshold"}):
        raise ConfigError(f'alert.rules: args of {name} is {{"threshold": …}}, not {arguments!r}')
    threshold = (arguments or {}).get("threshold")
    if threshold is None and name == "AnomalyNan":
        return None
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= MOST:
        raise ConfigError(f"alert.rules: {name} needs args.threshold, a number from 0 on, not {threshold!r}")
    if threshold == 0 and name == "AnomalyTurbulence":
        raise ConfigError("alert.rules: AnomalyTurbulence with threshold 0 fires at every rise: give a share above 0")
    return float(threshold)
