"""TFLOP/s of each device and the share of its peak (MFU), by a number that is given or by a formula."""

from rankscope_exporter.observers.throughput.flop_counter import FlopCount, count_flops
from rankscope_exporter.observers.throughput.meter import Throughput
from rankscope_exporter.observers.throughput.peaks import ThroughputConfig

__all__ = ["FlopCount", "Throughput", "ThroughputConfig", "count_flops"]
