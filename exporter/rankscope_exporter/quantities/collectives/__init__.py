"""Tensors that the script's own calls of `torch.distributed` take and return."""

from rankscope_exporter.quantities.collectives.quantity import Collectives

__all__ = ["Collectives"]
