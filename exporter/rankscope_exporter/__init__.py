"""The part of Rankscope inside the training process: hooks, statistics, step records, HTTP server.

An error of the exporter never stops the training.
"""

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter.api.monitor import Monitor
from rankscope_exporter.base.errors import ConfigError, CountError, RankscopeError
from rankscope_exporter.compat.msprobe import TrainerMon
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.config.sections import CaptureConfig
from rankscope_exporter.observers.throughput.flop_counter import count_flops
from rankscope_exporter.reactions.anomaly_callback import Anomaly
from rankscope_exporter.serving.config import ServeConfig

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
