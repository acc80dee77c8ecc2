"""Quantity `collectives`: tensors that the script's own calls of `torch.distributed` send and receive."""

from rankscope_exporter.quantities.collectives.quantity import Collectives

__all__ = ["Collectives"]
