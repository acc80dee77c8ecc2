"""The part of Rankscope inside the training process: hooks, statistics, step records, HTTP server.

An error of the exporter never stops the training. If a package that it needs is missing or does not fit, all classes
do nothing.
"""

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence

try:
    from rankscope_exporter.api.monitor import Monitor
    from rankscope_exporter.base.errors import ConfigError, CountError, RankscopeError
    from rankscope_exporter.compat.msprobe import TrainerMon
    from rankscope_exporter.config.monitor_config import MonitorConfig
    from rankscope_exporter.config.sections import CaptureConfig
    from rankscope_exporter.observers.throughput.flop_counter import count_flops
    from rankscope_exporter.reactions.anomaly_callback import Anomaly
    from rankscope_exporter.serving.config import ServeConfig
except Exception as error:  # training continues, whatever a package of this installation raises
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        raise
    from rankscope_exporter.base.inert import inert_because

    Anomaly = CaptureConfig = Monitor = MonitorConfig = ServeConfig = TrainerMon = inert_because(error)  # type: ignore[misc,assignment]
    ConfigError = CountError = RankscopeError = ValueError  # type: ignore[misc,assignment]
    count_flops = Monitor  # type: ignore[assignment]

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
    "TrainerMon",
    "count_flops",
]
