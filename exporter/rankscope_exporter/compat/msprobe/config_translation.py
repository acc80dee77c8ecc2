"""Translates a configuration of msprobe, including its name patterns, into settings of a Rankscope monitor. No I/O.

msprobe counts steps from 0, Rankscope from 1. A setting of msprobe without an equivalent is reported in the Rankscope
setting `remarks`. The targets in msprobe's configuration are names of modules or parameters. A target may begin with
the number of a model chunk (`0:`) and the prefix of DDP (`module.`). With msprobe's setting `squash_name`, it may be
shortened to the last parts of the name. A target for modules matches the module with this name. A target for parameters
matches the parameter with this name, or all parameters of the module with this name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from rankscope_contract.msprobe.csv_layout import OPS
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.base.validation import check_keys
from rankscope_exporter.compat.msprobe.settings import KEYS, WITHOUT_END, MsprobeSettings, rules_of
from rankscope_exporter.model.name_patterns import regex_pattern
from rankscope_exporter.model.parameter_names import plain_name

_CHUNK: Final = re.compile(r"\d+:")
_WRAPPER: Final = re.compile(r"(?:module\.)+|module$")
_TAIL: Final = re.compile(r"(?:layers?|embeddings?)\.|final|output|norm")
"""Regular expression for a name that msprobe has shortened to its last parts."""


def module_pattern(target: str, *, squashed: bool = False) -> str:
    """Return Rankscope's name pattern for the module that msprobe calls `target`.

    With `squashed`, `target` may be only the last parts of the name.
    """
    name, wrapped, cut = _parts(target, squashed=squashed)
    if not wrapped and not cut:
        return name
    return regex_pattern(name, f"{_before(wrapped=wrapped, cut=cut)}{re.escape(name)}")


def parameter_pattern(target: str, *, squashed: bool = False) -> str:
    """Return Rankscope's name pattern for the parameters that msprobe calls `target`.

    The pattern selects the parameter with this name, or all parameters in the module with this name.
    """
    name, wrapped, cut = _parts(target, squashed=squashed)
    if not name:
        return "*"
    return regex_pattern(name, rf"{_before(wrapped=wrapped, cut=cut)}{re.escape(name)}(?:\..*)?")


def _parts(target: str, *, squashed: bool) -> tuple[str, bool, bool]:
    """Parse the name of a module or parameter in msprobe's settings.

    Return the name, whether it had the prefix of a wrapper, and whether it may lack the first parts of the full name.
    """
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
