"""Expected rows of each framework, and their comparison with a float64 training without a wrapper."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from tests.exporter.adapters.loops import SKIPPED, WORLD
from tests.exporter.adapters.observation import Found, FoundOfModule, Outcome
from tests.exporter.adapters.training import STEPS, Net, Truth, batches, entropies

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


Outcomes = Mapping[tuple[str, int], Outcome]
Steps = Sequence[tuple[int, Truth, float]]
"""The number, the reference and the loss scale of each step that is not skipped."""
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


def check_kinds(found: Outcomes, name: str, kinds: Collection[str], *, activations: bool, skipping: bool) -> None:
    """Check that every kind is on every rank for every step; a skipped step has its gradients."""
    for rank in range(WORLD):
        for step in range(1, STEPS + 1):
            own = {str(row.kind) for row in found[name, rank].rows if row.step == step}
            acts = {kind for kind in own if kind.startswith("act_")}
            assert set(GRADIENTS[:2] if skipping and step == SKIPPED else kinds) == own - acts, (rank, step)
            assert {"act_in", "act_out", "act_grad_out"} <= acts or not activations


def check_own_gradients(found: Outcomes, name: str, owed: Owed, steps: Steps) -> None:
    """Check the gradients of each rank, of its step and of each micro-batch, before they are reduced."""
    for step, truth, scale in steps:
        for micro in (None, *range(owed.micros)):
            groups = [(rank,) for rank in range(WORLD)] if owed.local == "partial" else [tuple(range(WORLD))]
            for place, ranks in enumerate(groups):
                own = truth.local(place) if micro is None else truth.micro[place][micro]
                rows = [row for row in of_kind(found, name, LOCAL, step, ranks) if row.micro_step == micro]
                if micro is None and step < owed.is_summed_from:
                    assert [] == rows
                    continue
                assert {owed.local} <= {row.placement for row in rows} <= {owed.local, "replica"}
                check(rows, {key: scale * value for key, value in own.items()}, owed.rel)


def check_combined(
    found: Outcomes, name: str, owed: Owed, steps: Steps, kinds: Collection[str], divided: Collection[str] = ()
) -> None:
    """Check reduced gradients, parameters and moments, over all ranks or on each; those in `divided` may be on one."""
    for step, truth, scale in steps:
        for kind in kinds:
            if kind == LOCAL:
                continue
            rows = of_kind(found, name, kind, step)
            assert owed.shared == {row.placement for row in rows}, kind
            known = "grad_clipped" if owed.by_loop and kind == "grad_reduced" else kind
            factor = scale if kind == "grad_reduced" else 1.0
            check(rows, {key: factor * value for key, value in truth.shared[known].items()}, owed.rel)
            if owed.everywhere and kind not in divided:
                assert {(tensor, WORLD) for tensor in NAMES} == set(count_of(rows).items())


def check_activations(found: Outcomes, name: str, owed: Owed, steps: Steps) -> None:
    count = 0
    for rank in range(WORLD):
        for step, truth, scale in steps:
            seen = truth.seen[rank if len(owed.ranks) > 1 else 0]
            rows = [row for row in found[name, rank].rows if row.step == step and row.kind.startswith("act_")]
            for row in rows:
                assert row.micro_step is not None
                factor = scale if "grad" in row.kind else 1.0
                close([row], factor * seen[row.micro_step][str(row.kind), row.tensor], owed.rel)
            count += len(rows)
    pairs = WORLD if owed.local != "full" else 1  # a layer is on every rank, or on the one of its stage
    assert len(steps) * owed.micros * pairs * len(seen[0]) == count


def check_skipped(found: Outcomes, name: str) -> None:
    for rank in range(WORLD):
        rows = [row for row in found[name, rank].rows if row.step == SKIPPED]
        assert (SKIPPED, "step_skipped") in found[name, rank].events
        assert {"grad_unreduced", "grad_reduced"} <= {str(row.kind) for row in rows}
        assert all(row.counts["nans"] + row.counts["infs"] for row in rows if row.kind in GRADIENTS)


def of_kind(
    found: Outcomes, name: str, kind: str, step: int, ranks: Sequence[int] = tuple(range(WORLD))
) -> list[Found]:
    return [row for rank in ranks for row in found[name, rank].rows if (str(row.kind), row.step) == (kind, step)]


def check_calls(outcomes: Sequence[Outcome], truths: Sequence[Truth], micros: int, *, split: bool) -> None:
    """Check the features and structure of modules over all chunks of all ranks: each is once in the whole model."""
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
