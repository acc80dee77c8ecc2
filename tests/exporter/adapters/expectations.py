"""Expected rows of each framework, and their comparison with a float64 training without a wrapper."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from tests.exporter.adapters.loops import WORLD
from tests.exporter.adapters.observation import Found, FoundOfModule, Outcome
from tests.exporter.adapters.training import Net, Truth, batches, entropies

GRADIENTS = ("grad_unreduced", "grad_reduced", "grad_clipped")
ALL = (*GRADIENTS, "param_before", "param_after", "exp_avg", "exp_avg_sq")
NAMES = tuple(name for name, _ in Net().named_parameters())
LOCAL = "grad_unreduced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """The expectations of one framework, in addition to all kinds of `ALL` for each tensor and step."""

    local: str = "partial"
    """Placement of a gradient before it is reduced; "partial" is compared rank by rank."""
    shared: frozenset[str] = frozenset({"replica"})
    """Placements of everything else."""
    ranks: tuple[int, ...] = tuple(range(WORLD))
    """Ranks whose data are trained on: the same data on all ranks, or separate data on each."""
    micros: int = 1
    is_summed_from: int = 1
    """The first step at which the sum of this rank's own micro-batches exists."""
    split: bool = False
    scaled: bool = False
    by_loop: bool = False
    """True if the loop reduces gradients itself: its results and clipping are visible when the update begins."""
    everywhere: bool = True
    """True if each rank has a row for each tensor; otherwise all ranks together have one."""
    activations: bool = True
    """False for modules inside compiled code."""
    rel: float = 1e-4
    """float32 against float64, over three steps of Adam."""


REPLICA, SHARD = frozenset({"replica"}), frozenset({"shard"})


def count_of(rows: list[Found]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.tensor] += 1
    return counts


def check(rows: list[Found], expected: dict[str, torch.Tensor], rel: float) -> None:
    """Compare each tensor with its reference: the shards of a tensor together, all others individually."""
    parts: dict[str, list[list[Found]]] = defaultdict(list)
    for row in rows:
        if row.placement == "shard" and parts[row.tensor]:
            parts[row.tensor][0].append(row)
        else:
            parts[row.tensor].append([row])
    assert expected.keys() == parts.keys()
    for tensor, value in expected.items():
        for together in parts[tensor]:
            close(together, value, rel)


def close(rows: list[Found], value: torch.Tensor, rel: float) -> None:
    norm = math.sqrt(math.fsum((row.numbers["norm"] or 0.0) ** 2 for row in rows))
    least = min(row.numbers["min"] for row in rows if row.numbers["min"] is not None)
    most = max(row.numbers["max"] for row in rows if row.numbers["max"] is not None)
    value = value.detach()
    margin = rel * float(value.abs().max())
    where = rows[0]
    assert value.numel() == sum(row.counts["numel"] for row in rows), where
    assert float(value.norm()) == pytest.approx(norm, rel=rel), where
    assert float(value.min()) == pytest.approx(least, abs=margin), where
    assert float(value.max()) == pytest.approx(most, abs=margin), where


def check_calls(outcomes: Sequence[Outcome], truths: Sequence[Truth], micros: int, *, split: bool) -> None:
    """Check the features and the structure of modules over all chunks of all ranks: entropies, norms, rows.

    Each is there once for the whole model, by the names of its parts there.
    """
    rows = [row for outcome in outcomes for row in outcome.of_modules]
    routed = ("blocks.0.up", "blocks.1.up")
    linear = (*routed, "blocks.0.down", "blocks.1.down", "enter", "leave")
    for step, truth in enumerate(truths, 1):
        for micro, data in enumerate(batches(0, step, micros, split=split)):
            for name, entropy in entropies(truth, data, routed).items():
                assert entropy == pytest.approx(_value(rows, step, "router_entropy", name, micro), rel=1e-4)
        for name in linear:
            largest = float(torch.linalg.matrix_norm(truth.shared["param_before"][f"{name}.weight"], 2))
            assert largest == pytest.approx(_value(rows, step, "spectral_norm", name, None), rel=1e-3)
    assert {*linear, "blocks.0", "blocks.1"} == {row.module for row in rows if row.kind == "called"} - {""}


def _value(rows: Sequence[FoundOfModule], step: int, kind: str, module: str, micro: int | None) -> float | None:
    found = [row for row in rows if (row.step, row.kind, row.module, row.micro_step) == (step, kind, module, micro)]
    assert 1 == len(found), (step, kind, module, micro)
    return found[0].value
