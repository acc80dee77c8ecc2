"""Validates msprobe's JSON configuration, and translates the key `alert` into rules. No I/O.

The default values are those of msprobe 26.2.0. A wrong type is rejected, whereas msprobe logs a warning and continues:
a configuration with another effect than intended costs a training run.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.base.validation import MOST, check_keys, is_number, is_whole
from rankscope_exporter.model.pytree import parse_specs

_RULES: Final = ("AnomalyTurbulence", "AnomalyNan")


def rules_of(alert: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Translate `alert`, a setting of msprobe, into values of the Rankscope setting `rules`.

    Raises ConfigError if it is invalid.
    """
    rules = alert.get("rules") or []
    if not isinstance(rules, list):
        raise ConfigError(f"alert.rules must be a list of rules, not {rules!r}")
    made = [_rule(entry) for entry in rules]
    names = [rule["rule_name"] for rule in made]
    for place, rule in enumerate(made):
        earlier = names[:place].count(rule["rule_name"])
        if earlier:  # every rule needs a unique name, which identifies its alerts
            rule["args"]["name"] = f"{rule['rule_name']}_{earlier + 1}"
    return made


def _rule(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or set(entry) - {"rule_name", "args"}:
        raise ConfigError(
            f'alert.rules must be a list of {{"rule_name": …, "args": {{"threshold": …}}}}, not {entry!r}'
        )
    name = entry.get("rule_name")
    if name not in _RULES:
        near = difflib.get_close_matches(str(name), _RULES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"alert.rules: {name!r} is unknown; valid names are {', '.join(_RULES)}.{hint}")
    threshold = _threshold(name, entry.get("args"))
    if name == "AnomalyTurbulence":
        return {"rule_name": name, "args": {"threshold": threshold}}
    # msprobe finds an Inf only as a value above the threshold.
    limited = {} if threshold is None else {"threshold": threshold}
    return {"rule_name": name, "args": {**limited, "infs": threshold is not None}}


def _threshold(name: str, arguments: Any) -> float | None:
    if arguments is not None and (not isinstance(arguments, Mapping) or set(arguments) - {"threshold"}):
        raise ConfigError(f'alert.rules: args of {name} must be {{"threshold": …}}, not {arguments!r}')
    threshold = (arguments or {}).get("threshold")
    if threshold is None and name == "AnomalyNan":
        return None
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= MOST:
        raise ConfigError(f"alert.rules: {name} needs args.threshold, a number of at least 0, not {threshold!r}")
    if threshold == 0 and name == "AnomalyTurbulence":
        raise ConfigError("alert.rules: AnomalyTurbulence with threshold 0 fires at every rise: set a share above 0")
    return float(threshold)


FORMATS: Final = ("csv", "tensorboard", "api")
SA_ORDERS: Final = ("s,b,h,d", "b,s,h,d")
L2_HOOKS: Final = ("attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook")
CC_KEYS: Final = ("enable", "cc_codeline", "cc_pre_hook", "cc_log_only")
WITHOUT_END: Final = 100_000_000
"""The value of msprobe's setting `collect_times` that means no limit."""

_MOST_DIGITS: Final = 20
_LEAST: Final = {"step_interval": 1, "step_count_per_record": 1, "ndigits": 1}
_MOST: Final = {"step_count_per_record": 1_000_000, "ndigits": _MOST_DIGITS}


@dataclass(frozen=True, slots=True, kw_only=True)
class MsprobeSettings:
    """The settings of one configuration of msprobe. The class method `of` creates and validates an object."""

    targets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    dynamic_on: bool = False
    start_step: int = 0
    collect_times: int = WITHOUT_END
    step_interval: int = 1
    print_struct: bool = False
    stack_info: bool = False
    module_ranks: list[int] = field(default_factory=list)
    ur_distribution: bool = False
    xy_distribution: bool = False
    all_xy: bool = False
    forward_only: bool = False
    backward_only: bool = False
    mv_distribution: bool = False
    param_distribution: bool = False
    wg_distribution: bool = False
    monitor_mbs_grad: bool = False
    mg_direction: bool = False
    cc_distribution: Mapping[str, Any] = field(default_factory=dict)
    l2_targets: Mapping[str, list[str]] = field(default_factory=dict)
    recording_l2_features: bool = False
    sa_order: str = SA_ORDERS[0]
    alert: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMATS[0]
    ops: list[str] = field(default_factory=list)
    eps: float = 1e-8
    ndigits: int = 6
    step_count_per_record: int = 1
    append_output: list[str] = field(default_factory=list)
    squash_name: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Validate `settings` and return them, with default values for missing keys.

        All keys must be known. Raises ConfigError if a value is invalid.
        """
        made = cls(**settings)
        made._check_simple()
        made._check_targets()
        made._check_collectives()
        made._check_alert()
        return made

    def _check_simple(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(item.default, bool):
                _expect(isinstance(value, bool), item.name, "true or false", value)
            elif item.type == "int":
                least, most = _LEAST.get(item.name, 0), _MOST.get(item.name, math.inf)
                bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
                _expect(is_whole(value) and least <= value <= most, item.name, f"a whole number {bounds}", value)
        _expect(is_number(self.eps) and 0 <= self.eps <= MOST, "eps", "a number of at least 0", self.eps)
        _expect(self.format in FORMATS, "format", f"one of {', '.join(FORMATS)}", self.format)
        order = self.sa_order.replace(" ", "") if isinstance(self.sa_order, str) else self.sa_order
        _expect(order in SA_ORDERS, "sa_order", " or ".join(map(repr, SA_ORDERS)), self.sa_order)
        _expect(_are(self.ops, str), "ops", 'a list of names such as ["norm", "nans"]', self.ops)
        ranks = self.module_ranks
        right = _are(ranks, int) and all(is_whole(rank) and rank >= 0 for rank in ranks)
        _expect(right, "module_ranks", "a list of rank numbers such as [0, 1]", ranks)
        times = self.append_output
        _expect(_are(times, str) and len(times) in (0, 2), "append_output", "empty or two times", times)

    def _check_targets(self) -> None:
        targets, hooks = self.targets, self.l2_targets
        right = isinstance(targets, Mapping) and all(isinstance(item, Mapping) for item in targets.values())
        _expect(right, "targets", 'a table such as {"layers.0": {"output": "tensor"}}', targets)
        for name, parts in targets.items():  # also without xy_distribution, which can be enabled later
            try:
                parse_specs(name, parts)
            except ValueError as error:
                raise ConfigError(f"targets: {error}") from error
        _expect(isinstance(hooks, Mapping), "l2_targets", f"a table of {', '.join(L2_HOOKS)}", hooks)
        check_keys(hooks, L2_HOOKS, "l2_targets.")
        for name, modules in hooks.items():
            _expect(_are(modules, str), f"l2_targets.{name}", "a list of modules", modules)

    def _check_collectives(self) -> None:
        asked = self.cc_distribution
        _expect(isinstance(asked, Mapping), "cc_distribution", f"a table of {', '.join(CC_KEYS)}", asked)
        check_keys(asked, CC_KEYS, "cc_distribution.")
        for name, value in asked.items():
            if name == "cc_codeline":
                right = _are(value, str) and all(_is_expression(text) for text in value)
                _expect(right, f"cc_distribution.{name}", "a list of regular expressions", value)
            else:
                _expect(isinstance(value, bool), f"cc_distribution.{name}", "true or false", value)

    def _check_alert(self) -> None:
        _expect(isinstance(self.alert, Mapping), "alert", "a table of rules and dump", self.alert)
        check_keys(self.alert, ("rules", "dump"), "alert.")
        _expect(isinstance(self.alert.get("dump", False), bool), "alert.dump", "true or false", self.alert.get("dump"))


KEYS: Final = tuple(item.name for item in fields(MsprobeSettings))
"""Names of all keys of msprobe's configuration."""


def _expect(right: bool, name: str, expected: str, value: Any) -> None:  # noqa: FBT001 - reads as a sentence
    if not right:
        raise ConfigError(f"{name} must be {expected}, not {value!r}")


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _are(values: Any, of: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, of) for value in values)
