"""Quantity `collectives`: tensors that the script sends and receives by calling `torch.distributed`."""

from rankscope_exporter.measure.quantities.collectives.quantity import Collectives

__all__ = ["Collectives"]
