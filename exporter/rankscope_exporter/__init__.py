"""The part of Rankscope inside the training process: hooks, statistics, step records, HTTP server.

An error of the exporter never stops the training. If a package that it needs is missing or does not fit, all classes
do nothing. The names are imported when one of them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence

if TYPE_CHECKING:
    from rankscope_exporter.api.monitor import Monitor
    from rankscope_exporter.config.monitor_config import CaptureConfig, MonitorConfig
    from rankscope_exporter.control.anomaly_reactions import Anomaly
    from rankscope_exporter.monitors.flop_counter import count_flops
    from rankscope_exporter.process.errors import ConfigError, CountError, RankscopeError
    from rankscope_exporter.publish.serving_config import ServeConfig

_MODULES: Final = {
    "Anomaly": "control.anomaly_reactions",
    "CaptureConfig": "config.monitor_config",
    "ConfigError": "process.errors",
    "CountError": "process.errors",
    "Monitor": "api.monitor",
    "MonitorConfig": "config.monitor_config",
    "RankscopeError": "process.errors",
    "ServeConfig": "publish.serving_config",
    "count_flops": "monitors.flop_counter",
}

_OF_EXTENSION: Final = "TrainerMon"

__all__ = [
    "Anomaly",
    "AnomalyNan",
    "AnomalyTurbulence",
    "CaptureConfig",
    "ConfigError",
    "CountError",
    "Monitor",
    "MonitorConfig",
    "RankscopeError",
    "ServeConfig",
    "count_flops",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES and name != _OF_EXTENSION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: dict[str, object]
    try:
        found = {one: getattr(import_module(f"{__name__}.{place}"), one) for one, place in _MODULES.items()}
    except Exception as error:  # training continues, whatever a package of this installation raises
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise
        inert = import_module(f"{__name__}.process.inert").inert_because(error)
        found = {one: ValueError if one.endswith("Error") else inert for one in (*_MODULES, _OF_EXTENSION)}
    globals().update(found)
    if name in found:
        return found[name]
    trainer: object = import_module(f"{__name__}.process.discovery").extension("trainer_mon").TrainerMon
    return trainer
