"""TFLOP/s of each device and its share of the peak (MFU), from a number in the settings or from a formula."""

from rankscope_exporter.observers.throughput.flop_counter import FlopCount, count_flops
from rankscope_exporter.observers.throughput.meter import Throughput
from rankscope_exporter.observers.throughput.peaks import ThroughputConfig

__all__ = ["FlopCount", "Throughput", "ThroughputConfig", "count_flops"]
