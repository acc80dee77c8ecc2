"""Translates a configuration of msprobe, with its name patterns, into settings of a monitor. Pure.

msprobe counts steps from 0, a monitor from 1. A setting without counterpart is reported in `remarks`; nothing is
dropped silently. A name carries the number of its model chunk (`0:`), the level that DDP adds (`module.`), and with
`squash_name` it may be cut to its tail. A module is named exactly; a parameter by itself, or by the module of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from rankscope_contract.msprobe.csv_layout import OPS
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.base.validation import check_keys
from rankscope_exporter.compat.msprobe.tool_config import KEYS, WITHOUT_END, ToolSettings, rules_of
from rankscope_exporter.model.name_patterns import regex_pattern
from rankscope_exporter.model.parameter_names import plain_name

_CHUNK: Final = re.compile(r"\d+:")
_WRAPPER: Final = re.compile(r"(?:module\.)+|module$")
_TAIL: Final = re.compile(r"(?:layers?|embeddings?)\.|final|output|norm")
"""How a name begins that the tool has cut to its tail."""


def module_pattern(target: str, *, squashed: bool = False) -> str:
    """Return the pattern of the module `target`; `squashed`: it may be the tail of a name."""
    name, wrapped, cut = _parts(target, squashed=squashed)
    if not wrapped and not cut:
        return name
    return regex_pattern(name, f"{_before(wrapped=wrapped, cut=cut)}{re.escape(name)}")


def parameter_pattern(target: str, *, squashed: bool = False) -> str:
    """Return the pattern of the parameter `target`, or of all parameters in the module `target`."""
    name, wrapped, cut = _parts(target, squashed=squashed)
    if not name:
        return "*"
    return regex_pattern(name, rf"{_before(wrapped=wrapped, cut=cut)}{re.escape(name)}(?:\..*)?")


def _parts(target: str, *, squashed: bool) -> tuple[str, bool, bool]:
    """Return the name, and whether levels of wrappers and the beginning of the name may stand before it."""
    name = plain_name(_CHUNK.sub("", target, count=1) if _CHUNK.match(target) else target)
    inner = _WRAPPER.sub("", name, count=1) if _WRAPPER.match(name) else name
    return inner, inner != name, squashed and _TAIL.match(inner) is not None


def _before(*, wrapped: bool, cut: bool) -> str:
    if cut:
        return r"(?:.*\.)?"
    return r"(?:module\.)*" if wrapped else ""


Options = dict[str, dict[str, Any]]

_ITS_WORD: Final = {
    "quantities": "wg_distribution, xy_distribution and the like",
    "options": "targets, start_step, module_ranks and the like",
    "tensors": "targets",
    "every": "step_interval",
    "times": "collect_times",
    "rules": "alert",
    "zero_below": "eps",
    "sinks": "format",
}
"""Settings of ours that say the same as keys of the tool: a document must not say both."""

_BY_PARAMETER: Final = {
    "param_distribution": "parameters",
    "wg_distribution": "gradients",
    "mv_distribution": "optimizer_state",
    "ur_distribution": "adam_updates",
    "mg_direction": "direction",
}


def translated(settings: Mapping[str, Any], ours: Collection[str]) -> dict[str, Any]:
    """Return the tool's `settings` as those of a MonitorConfig. Raises ConfigError.

    Settings of `ours` that have no counterpart there, such as `run` or `serve`, may stand among them.
    """
    for key, word in _ITS_WORD.items():
        if key in settings:
            its = next((name for name in settings if name in KEYS and name not in ours), None)
            where = "" if its is None else f" beside {its}"
            raise ConfigError(f"{key} cannot stand{where}: in a configuration of msprobe's monitor {word} says that")
    check_keys(settings, {*KEYS, *(name for name in ours if name not in _ITS_WORD)})
    beside = {key: value for key, value in settings.items() if key not in KEYS}
    tool = ToolSettings.of({key: value for key, value in settings.items() if key in KEYS and value is not None})
    switch = {"dynamic_on": tool.dynamic_on} if "dynamic_on" in settings else {}
    options = _options(tool)
    return {
        **beside,
        **switch,
        "quantities": list(options),
        "options": {name: told for name, told in options.items() if told},
        "every": tool.step_interval,
        "times": None if tool.collect_times >= WITHOUT_END else tool.collect_times,
        "ops": tool.ops or ["norm"],
        "zero_below": tool.eps,
        "rules": rules_of(tool.alert),
        "sinks": _sinks(tool),
        "remarks": [*beside.get("remarks", ()), *_remarks(tool, measured=bool(options))],
    }


def _options(tool: ToolSettings) -> Options:
    """Return what is measured, and the options of each quantity."""
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
        if not tool.collect_times:  # else one step is enough
            chosen["structure"]["times"] = 0
    return {quantity: {**told, **_when_and_where(tool)} for quantity, told in chosen.items()}


def _when_and_where(tool: ToolSettings) -> dict[str, Any]:
    start = {"start_step": tool.start_step + 1} if tool.start_step else {}
    return start | ({"ranks": tool.module_ranks} if tool.module_ranks else {})


def _activations(tool: ToolSettings) -> dict[str, Any]:
    told: dict[str, Any] = {name: True for name in ("forward_only", "backward_only") if getattr(tool, name)}
    if tool.targets:
        named = {module_pattern(name, squashed=tool.squash_name): parts for name, parts in tool.targets.items()}
        told |= {"targets": named, "all_modules": tool.all_xy}
    return told


def _collectives(asked: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"call_sites": asked["cc_codeline"]} if asked.get("cc_codeline") else {}
    named = {"inputs": "cc_pre_hook", "log_only": "cc_log_only"}
    return told | {name: True for name, key in named.items() if asked.get(key)}


def _features(tool: ToolSettings) -> Options:
    """Return the quantities behind `l2_targets`: for `linear_hook` an empty list is every layer, for others none."""
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


def _sinks(tool: ToolSettings) -> dict[str, dict[str, Any]]:
    """Return where numbers go; all of them find MONITOR_OUTPUT_DIR by themselves."""
    sinks: dict[str, dict[str, Any]] = {tool.format: {}}
    if tool.format == "csv":
        sinks["csv"] = {
            "steps_per_file": tool.step_count_per_record,
            "digits": tool.ndigits,
            "append_to": tool.append_output or None,
            "squash_name": tool.squash_name,
            "ops": [op for op in dict.fromkeys(tool.ops) if op in OPS] or ["norm"],
        }
    elif tool.format == "tensorboard":
        sinks["tensorboard"] = {"squash_name": tool.squash_name}
    return sinks | ({"anomalies": {}} if tool.alert.get("dump") else {})


def _remarks(tool: ToolSettings, *, measured: bool) -> list[str]:
    told = []
    if tool.cc_distribution.get("enable") and tool.cc_distribution.get("cc_log_only"):
        told.append("cc_log_only: training goes on once the calls of the first step are told")
    if tool.print_struct:
        told.append("print_struct: training goes on once the structure is printed")
    if tool.monitor_mbs_grad and not tool.wg_distribution:
        told.append("monitor_mbs_grad has no effect without wg_distribution")
    if tool.l2_targets and not tool.recording_l2_features:
        told.append("l2_targets has no effect without recording_l2_features")
    if not measured:
        told.append("nothing is measured: switch on wg_distribution, xy_distribution or another of its kind")
    return told
