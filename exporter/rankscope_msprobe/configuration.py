"""Translates a configuration of msprobe, including its name patterns, into settings of a Rankscope monitor. No I/O.

msprobe counts steps from 0, Rankscope from 1. A setting of msprobe without an equivalent is reported in the Rankscope
setting `remarks`. The targets in msprobe's configuration are names of modules or parameters. A target may begin with
the number of a model chunk (`0:`) and the prefix of DDP (`module.`). With msprobe's setting `squash_name`, it may be
shortened to the last parts of the name. A target for modules matches the module with this name. A target for parameters
matches the parameter with this name, or all parameters of the module with this name.

Validates msprobe's JSON configuration, and translates the key `alert` into rules. No I/O.

The default values are those of msprobe 26.2.0. Only the default of `squash_name` is the one in msprobe's manual. A
value of a wrong type is rejected, whereas msprobe logs a warning and continues. The reason is that a configuration with
another effect than intended costs a training run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, Literal, Self, get_args

from rankscope_exporter.adapters.parameter_names import plain_name, regex_pattern
from rankscope_exporter.adapters.pytree import parse_specs
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.validation import (
    MOST,
    RANKS,
    Allowed,
    Checked,
    at_least,
    between,
    check_keys,
    list_of,
    listed,
    number,
    table,
    validate,
)
from rankscope_msprobe.files.csv_layout import DEFAULT_TIME_ZONE, OPS, check_time_zone

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
        raise ConfigError(f"alert.rules: {name!r} is unknown; valid names are {listed(_RULES, name, '{}')}")
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


_CHUNK: Final = re.compile(r"\d+:")
_WRAPPER: Final = re.compile(r"(?:module\.)+|module$")
_TAIL: Final = re.compile(r"(?:layers?|embeddings?)\.|final|output|norm")
"""Regular expression for a name that msprobe has shortened to its last parts."""


def module_pattern(target: str, *, squashed: bool = False) -> str:
    """Return our name pattern for msprobe's module `target`; if `squashed`, it may be the last parts of a name."""
    name, wrapped, cut = _parts(target, squashed=squashed)
    if not wrapped and not cut:
        return name
    return regex_pattern(name, f"{_before(wrapped=wrapped, cut=cut)}{re.escape(name)}")


def parameter_pattern(target: str, *, squashed: bool = False) -> str:
    """Return our name pattern for msprobe's parameter `target`, or for all parameters in the module of this name."""
    name, wrapped, cut = _parts(target, squashed=squashed)
    if not name:
        return "*"
    return regex_pattern(name, rf"{_before(wrapped=wrapped, cut=cut)}{re.escape(name)}(?:\..*)?")


def _parts(target: str, *, squashed: bool) -> tuple[str, bool, bool]:
    """Return a name of msprobe, whether it had the prefix of a wrapper, and whether it may lack its first parts."""
    name = plain_name(_CHUNK.sub("", target, count=1) if _CHUNK.match(target) else target)
    inner = _WRAPPER.sub("", name, count=1) if _WRAPPER.match(name) else name
    return inner, inner != name, squashed and _TAIL.match(inner) is not None


def _before(*, wrapped: bool, cut: bool) -> str:
    if cut:
        return r"(?:.*\.)?"
    return r"(?:module\.)*" if wrapped else ""


Options = dict[str, dict[str, Any]]

_MSPROBE_KEYS: Final = {
    "quantities": "wg_distribution, xy_distribution and the like",
    "options": "targets, start_step, module_ranks and the like",
    "tensors": "targets",
    "every": "step_interval",
    "times": "collect_times",
    "rules": "alert",
    "zero_below": "eps",
    "sinks": "format",
}
"""Settings of a Rankscope monitor, each with the keys of msprobe for the same purpose.

A document in msprobe's format must not contain these settings.
"""

_BY_PARAMETER: Final = {
    "param_distribution": "parameters",
    "wg_distribution": "gradients",
    "mv_distribution": "optimizer_state",
    "ur_distribution": "adam_updates",
    "mg_direction": "direction",
}


def translated(settings: Mapping[str, Any], ours: Collection[str]) -> dict[str, Any]:
    """Convert msprobe's `settings` to settings of a MonitorConfig and return them.

    Raises ConfigError if a setting is invalid.

    `settings` may also contain settings that only Rankscope has, such as `run` or `serve`; `ours` contains the names of
    all settings of a monitor.
    """
    for key, word in _MSPROBE_KEYS.items():
        if key in settings:
            its = next((name for name in settings if name in KEYS and name not in ours), None)
            where = "" if its is None else f" together with {its}"
            raise ConfigError(f"{key} is not allowed{where}: use msprobe's settings for this purpose: {word}")
    check_keys(settings, {*KEYS, *(name for name in ours if name not in _MSPROBE_KEYS)})
    additional = {key: value for key, value in settings.items() if key not in KEYS}
    tool = MsprobeSettings.of({key: value for key, value in settings.items() if key in KEYS and value is not None})
    switch = {"dynamic_on": tool.dynamic_on} if "dynamic_on" in settings else {}
    options = _options(tool)
    return {
        **additional,
        **switch,
        "quantities": list(options),
        "options": {name: chosen for name, chosen in options.items() if chosen},
        "every": tool.step_interval,
        "times": None if tool.collect_times >= WITHOUT_END else tool.collect_times,
        "ops": tool.ops or ["norm"],
        "zero_below": tool.eps,
        "rules": rules_of(tool.alert),
        "sinks": _sinks(tool),
        "remarks": [*additional.get("remarks", ()), *_remarks(tool, measured=bool(options))],
    }


def _options(tool: MsprobeSettings) -> Options:
    """Return the options of each measured quantity, by the name of the quantity."""
    chosen: Options = {}
    of_parameters = [parameter_pattern(target, squashed=tool.squash_name) for target in tool.targets]
    for key, quantity in _BY_PARAMETER.items():
        if getattr(tool, key):
            chosen[quantity] = {"targets": of_parameters} if of_parameters else {}
            if key == "wg_distribution" and tool.monitor_mbs_grad:
                chosen["micro_gradients"] = dict(chosen[quantity])
    if tool.xy_distribution:
        chosen["activations"] = _activations(tool)
    if tool.recording_l2_features:
        chosen |= _features(tool)
    if tool.cc_distribution.get("enable"):
        chosen["collectives"] = _collectives(tool.cc_distribution)
        if not tool.collect_times:
            chosen["collectives"]["times"] = 0
    if tool.print_struct or tool.stack_info:
        chosen["structure"] = {"stacks": tool.stack_info, "print_struct": tool.print_struct}
        if not tool.collect_times:  # otherwise one step is sufficient
            chosen["structure"]["times"] = 0
    common: dict[str, Any] = {"start_step": tool.start_step + 1} if tool.start_step else {}
    common |= {"ranks": tool.module_ranks} if tool.module_ranks else {}
    return {quantity: {**options, **common} for quantity, options in chosen.items()}


def _activations(tool: MsprobeSettings) -> dict[str, Any]:
    options: dict[str, Any] = {name: True for name in ("forward_only", "backward_only") if getattr(tool, name)}
    if tool.targets:
        named = {module_pattern(name, squashed=tool.squash_name): parts for name, parts in tool.targets.items()}
        options |= {"targets": named, "all_modules": tool.all_xy}
    return options


def _collectives(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"call_sites": given["cc_codeline"]} if given.get("cc_codeline") else {}
    named = {"inputs": "cc_pre_hook", "log_only": "cc_log_only"}
    return options | {name: True for name, key in named.items() if given.get(key)}


def _features(tool: MsprobeSettings) -> Options:
    """Return the options of the quantities that correspond to msprobe's setting `l2_targets`, by name of the quantity.

    `l2_targets` has a list of module names for each of msprobe's hooks. An empty list selects all layers for the hook
    `linear_hook`, and no module for any other hook.
    """
    hooks = {
        hook: [module_pattern(name, squashed=tool.squash_name) for name in names]
        for hook, names in tool.l2_targets.items()
    }
    chosen: Options = {}
    if hooks.get("attention_hook"):
        chosen["attention"] = {"targets": hooks["attention_hook"], "order": tool.sa_order}
    if "linear_hook" in hooks:
        chosen["linear"] = {"targets": hooks["linear_hook"]} if hooks["linear_hook"] else {}
    routers = [*hooks.get("moe_router_weight_hook", ()), *hooks.get("moe_router_logit_hook", ())]
    if routers:
        chosen["router"] = {"targets": list(dict.fromkeys(routers))}
    return chosen


def _sinks(tool: MsprobeSettings) -> dict[str, dict[str, Any]]:
    """Return the settings of each sink by its name.

    Sinks read their output folder from the variable MONITOR_OUTPUT_DIR.
    """
    sinks: dict[str, dict[str, Any]] = {tool.format: {}}
    if tool.format == "csv":
        sinks["csv"] = {
            "steps_per_file": tool.step_count_per_record,
            "digits": tool.ndigits,
            "append_to": tool.append_output or None,
            "squash_name": tool.squash_name,
            "time_zone": tool.time_zone,
            "scalars": False,  # only the files that msprobe writes
            "ops": [op for op in dict.fromkeys(tool.ops) if op in OPS] or ["norm"],
        }
    elif tool.format == "tensorboard":
        sinks["tensorboard"] = {"squash_name": tool.squash_name}
    return sinks | ({"anomalies": {}} if tool.alert.get("dump") else {})


def _remarks(tool: MsprobeSettings, *, measured: bool) -> list[str]:
    remarks = {
        "cc_log_only: training continues after the calls of the first step are logged": tool.cc_distribution.get(
            "enable"
        )
        and tool.cc_distribution.get("cc_log_only"),
        "print_struct: training continues after the structure is printed": tool.print_struct,
        "monitor_mbs_grad has no effect without wg_distribution": tool.monitor_mbs_grad and not tool.wg_distribution,
        "l2_targets has no effect without recording_l2_features": tool.l2_targets and not tool.recording_l2_features,
        "no quantity is measured: enable wg_distribution, xy_distribution or a similar setting": not measured,
    }
    return [remark for remark, applies in remarks.items() if applies]
