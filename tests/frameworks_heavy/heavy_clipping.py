"""Limits for gradient norms, and the factor of each package by its own clipping formula."""

from __future__ import annotations

from tests.exporter.adapters.training import Gradients

LONGEST = 0.05


def deepspeed(reduced: Gradients) -> float:
    """Return DeepSpeed's factor."""
    return 1 / max(1.0, (_norm(reduced) + 1e-6) / LONGEST)


def megatron(reduced: Gradients) -> float:
    """Return Megatron's factor."""
    return min(1.0, LONGEST / (_norm(reduced) + 1e-6))


def _norm(gradients: Gradients) -> float:
    return float(sum(float(gradient.square().sum()) for gradient in gradients.values())) ** 0.5
