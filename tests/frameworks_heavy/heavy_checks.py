"""Checks that all expected rows exist on every rank and equal the float64 training. Shared by all packages."""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from tests.exporter.adapters.expectations import ALL, GRADIENTS, LOCAL, NAMES, Owed, check, close, count_of
from tests.exporter.adapters.loops import SKIPPED, WORLD
from tests.exporter.adapters.observation import Found, Outcome
from tests.exporter.adapters.training import STEPS, Truth

Outcomes = dict[tuple[str, int], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyOwed(Owed):
    """The expectations of a loop, in addition to those of all frameworks."""

    everywhere_in_forward: bool = True
    """True if each rank computes all layers; otherwise each layer is on one rank."""
    skipping: bool = False
    """True if the second step is skipped."""
    hidden: int = 8
    """Inner width of the blocks of the model."""
    scale: float = 1.0
    """The loss scale."""
    primed: bool = False
    """True if the package steps its optimizer with zeros at creation, so that the state exists."""


def of_kind(found: Outcomes, name: str, kind: str, step: int) -> list[Found]:
    return [row for rank in range(WORLD) for row in found[name, rank].rows if (str(row.kind), row.step) == (kind, step)]


def check_undisturbed(outcome: Outcome) -> None:
    assert [] == outcome.unequal
    assert 0 == outcome.faults
    assert [] == outcome.left
    assert outcome.hooked


def check_kinds(found: Outcomes, name: str, owed: HeavyOwed) -> None:
    """Every kind is on every rank at every step; a skipped step has its gradients."""
    for rank in range(WORLD):
        by_step: dict[int, set[str]] = defaultdict(set)
        for row in found[name, rank].rows:
            by_step[row.step].add(str(row.kind))
        for step in range(1, STEPS + 1):
            skipped = owed.skipping and step == SKIPPED
            activations = {kind for kind in by_step[step] if kind.startswith("act_")}
            assert set(GRADIENTS[:2] if skipped else ALL) == by_step[step] - activations, (rank, step)
            assert {"act_in", "act_out", "act_grad_out"} <= activations or not owed.activations


def check_own_gradients(found: Outcomes, name: str, owed: HeavyOwed, truths: list[Truth]) -> None:
    """Each rank's own gradients, of the step and of each micro-batch, are those of its own data."""
    for step, truth in enumerate(truths, 1):
        if owed.skipping and step == SKIPPED:
            continue
        for micro in (None, *range(owed.micros)):
            rows = [row for row in of_kind(found, name, LOCAL, step) if row.micro_step == micro]
            ranks = range(WORLD) if owed.local == "partial" else [None]
            for rank in ranks:
                place = rank or 0
                own = truth.local(place) if micro is None else truth.micro[place][micro]
                here = [row for row in rows if rank is None or row in found[name, rank].rows]
                assert {owed.local} <= {row.placement for row in here} <= {owed.local, "replica"}
                check(here, {key: owed.scale * value for key, value in own.items()}, owed.rel)


def check_shared(found: Outcomes, name: str, owed: HeavyOwed, truths: list[Truth]) -> None:
    """Reduced gradients, parameters and moments equal the reference, combined over ranks or on each rank."""
    for step, truth in enumerate(truths, 1):
        if owed.skipping and step == SKIPPED:
            continue
        for kind in ALL:
            if kind != LOCAL:
                rows = of_kind(found, name, kind, step)
                assert owed.shared == {row.placement for row in rows}, kind
                scale = owed.scale if kind == "grad_reduced" else 1.0
                check(rows, {key: scale * value for key, value in truth.shared[kind].items()}, owed.rel)
                if owed.everywhere:
                    assert {(tensor, WORLD) for tensor in NAMES} == set(count_of(rows).items())


def check_shards(found: Outcomes, name: str) -> None:
    """A shard names the ranks with the other shards, and has the shape of this rank's part."""
    for rank in range(WORLD):
        for row in found[name, rank].rows:
            assert ("0,1" if row.placement == "shard" else None) == row.shard_group
            if row.placement == "shard" and row.kind != LOCAL:
                assert row.counts["numel"] == _product(row.shape)


def check_activations(found: Outcomes, name: str, owed: HeavyOwed, truths: list[Truth]) -> None:
    """Activations of each rank and micro-batch are those of its own data."""
    count = 0
    for rank in range(WORLD):
        for step, truth in enumerate(truths, 1):
            rows = [row for row in found[name, rank].rows if row.step == step and row.kind.startswith("act_")]
            if owed.skipping and step == SKIPPED:
                continue
            seen: list[Any] = truth.seen[rank if len(owed.ranks) > 1 else 0]
            for row in rows:
                assert row.micro_step is not None
                scale = owed.scale if "grad" in row.kind else 1.0
                close([row], scale * seen[row.micro_step][str(row.kind), row.tensor], owed.rel)
            count += len(rows)
    # A layer is on every rank, or on the one of its stage.
    assert (STEPS - owed.skipping) * owed.micros * (WORLD if owed.everywhere_in_forward else 1) * len(seen[0]) == count


def check_skipped(outcome: Outcome) -> None:
    rows = [row for row in outcome.rows if row.step == SKIPPED]
    assert (SKIPPED, "step_skipped") in outcome.events
    assert {"grad_unreduced", "grad_reduced"} <= {str(row.kind) for row in rows}
    assert all(row.counts["nans"] + row.counts["infs"] for row in rows if row.kind in GRADIENTS)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def require(*packages: str) -> pytest.MarkDecorator:
    """Skip without the packages; if frameworks are required, let the tests fail with the missing package."""
    missing = [name for name in packages if _is_missing(name)]
    required = bool(os.environ.get("RANKSCOPE_REQUIRE_FRAMEWORKS"))
    reason = f"make test-frameworks (not installed: {', '.join(missing)})"
    return pytest.mark.skipif(bool(missing) and not required, reason=reason)


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # not even the package around it
        return True
