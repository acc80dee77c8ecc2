"""TFLOP/s of each device and the share of its peak (MFU), by a number that is given or by a formula."""

from rankscope_exporter.throughput.config import ThroughputConfig
from rankscope_exporter.throughput.counting import FlopCount, count_flops
from rankscope_exporter.throughput.meter import Throughput

__all__ = ["FlopCount", "Throughput", "ThroughputConfig", "count_flops"]
