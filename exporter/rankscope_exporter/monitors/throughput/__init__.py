"""Computes the TFLOP/s of each device and the share of its peak (MFU).

The FLOPs of a step come from the script, from the settings or from 6 N.
"""

from rankscope_exporter.monitors.throughput.costs import ThroughputConfig
from rankscope_exporter.monitors.throughput.flop_counter import FlopCount, count_flops
from rankscope_exporter.monitors.throughput.meter import Throughput

__all__ = ["FlopCount", "Throughput", "ThroughputConfig", "count_flops"]
