"""Quantity `activations`: inputs and outputs of modules, and their gradients."""

from rankscope_exporter.measure.quantities.activations.quantity import Activations

__all__ = ["Activations"]
