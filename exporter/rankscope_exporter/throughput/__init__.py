"""How fast the arithmetic of training is: FLOP/s of each device, the share of its peak, and by which method known."""

from rankscope_exporter.throughput.config import ThroughputConfig
from rankscope_exporter.throughput.meter import Throughput

__all__ = ["Throughput", "ThroughputConfig"]
