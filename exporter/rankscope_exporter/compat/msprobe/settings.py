"""Validates msprobe's JSON configuration, and translates the key `alert` into rules. No I/O.

The default values are those of msprobe 26.2.0. Only the default of `squash_name` is the one in msprobe's manual. A
value of a wrong type is rejected, whereas msprobe logs a warning and continues. The reason is that a configuration with
another effect than intended costs a training run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, Literal, Self, get_args

from rankscope_contract.msprobe.csv_layout import DEFAULT_TIME_ZONE, check_time_zone
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.base.validation import (
    MOST,
    RANKS,
    Allowed,
    Checked,
    at_least,
    between,
    check_keys,
    list_of,
    number,
    table,
    validate,
)
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


Format = Literal["csv", "tensorboard", "api"]
FORMATS: Final = get_args(Format)
SA_ORDERS: Final = ("s,b,h,d", "b,s,h,d")
L2_HOOKS: Final = ("attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook")
CC_KEYS: Final = ("enable", "cc_codeline", "cc_pre_hook", "cc_log_only")
WITHOUT_END: Final = 100_000_000
"""The value of msprobe's setting `collect_times` that means no limit."""

_ORDER: Final = Allowed(
    " or ".join(map(repr, SA_ORDERS)), lambda value: isinstance(value, str) and value.replace(" ", "") in SA_ORDERS
)
_FORMAT: Final = Allowed(f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS)
_TIMES: Final = Allowed(
    "an empty list or a list of two folder times such as Dec03_21-34-40",
    lambda value: _are(value, str) and len(value) in (0, 2),
)
_TARGETS: Final = Allowed(
    'a table such as {"layers.0": {"output": "tensor"}}',
    lambda value: isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values()),
)
_Count = Annotated[int, at_least(0)]
_Share = Annotated[float, number("a number of at least 0", 0)]
_Ranks = Annotated[list[int], Allowed("a list of rank numbers such as [0, 1]", RANKS.accepts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MsprobeSettings:
    """The settings of one configuration of msprobe. The class method `of` creates and validates an object."""

    targets: Annotated[Mapping[str, Mapping[str, str]], _TARGETS] = field(default_factory=dict)
    dynamic_on: bool = False
    start_step: _Count = 0
    collect_times: _Count = WITHOUT_END
    step_interval: Annotated[int, at_least(1)] = 1
    print_struct: bool = False
    stack_info: bool = False
    module_ranks: _Ranks = field(default_factory=list)
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
    cc_distribution: Annotated[Mapping[str, Any], table(f"a table of {', '.join(CC_KEYS)}")] = field(
        default_factory=dict
    )
    l2_targets: Annotated[Mapping[str, list[str]], table(f"a table of {', '.join(L2_HOOKS)}")] = field(
        default_factory=dict
    )
    recording_l2_features: bool = False
    sa_order: Annotated[str, _ORDER] = SA_ORDERS[0]
    alert: Annotated[Mapping[str, Any], table("a table with the keys rules and dump")] = field(default_factory=dict)
    format: Annotated[Format, _FORMAT] = "csv"
    ops: Annotated[list[str], list_of(str, 'a list of names such as ["norm", "nans"]')] = field(default_factory=list)
    eps: _Share = 1e-8
    ndigits: Annotated[int, between(1, 20)] = 6
    step_count_per_record: Annotated[int, between(1, 1_000_000)] = 1
    append_output: Annotated[list[str], _TIMES] = field(default_factory=list)
    squash_name: bool = True
    time_zone: Annotated[str, Checked(check_time_zone)] = DEFAULT_TIME_ZONE  # msprobe has no such key

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Validate `settings` and return them, with default values for missing keys.

        All keys must be known. Raises ConfigError if a value is invalid.
        """
        made = cls(**settings)
        validate(made, ConfigError)
        made._check_targets()
        made._check_collectives()
        made._check_alert()
        return made

    def _check_targets(self) -> None:
        for name, parts in self.targets.items():  # also without xy_distribution, which can be enabled later
            try:
                parse_specs(name, parts)
            except ValueError as error:
                raise ConfigError(f"targets: {error}") from error
        check_keys(self.l2_targets, L2_HOOKS, "l2_targets.")
        for name, modules in self.l2_targets.items():
            _expect(_are(modules, str), f"l2_targets.{name}", "a list of module names", modules)

    def _check_collectives(self) -> None:
        asked = self.cc_distribution
        check_keys(asked, CC_KEYS, "cc_distribution.")
        for name, value in asked.items():
            if name == "cc_codeline":
                right = _are(value, str) and all(_is_expression(text) for text in value)
                _expect(right, f"cc_distribution.{name}", "a list of regular expressions", value)
            else:
                _expect(isinstance(value, bool), f"cc_distribution.{name}", "true or false", value)

    def _check_alert(self) -> None:
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
