"""Runs inside the training process: hooks, statistics, step records, HTTP. Training never stops for it."""

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter.capture.callbacks import Anomaly
from rankscope_exporter.capture.config import CaptureConfig
from rankscope_exporter.config import MonitorConfig
from rankscope_exporter.errors import ConfigError, CountError, RankscopeError
from rankscope_exporter.monitor import Monitor
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.throughput.counting import count_flops

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
