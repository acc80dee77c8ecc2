"""Statistics as training makes them: per-tensor random walks with the noise of real gradients, float32 at the source.

Bytes per sample depend on the noise, so every benchmark of bytes uses this one: norm, min, max and mean move by 2 to
30 % of themselves from step to step, zeros are counts on a quarter of the tensors, NaN and Inf do not occur.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_exporter.records.plan import NamedPlan
from rankscope_exporter.records.record import Statistics, StepRecord

STATISTICS = 8
"""Samples per tensor and step, as a reader counts them: norm, min, max, mean, nans, infs, zeros, numel."""

KINDS = ("param_after", "grad_unreduced", "grad_reduced", "exp_avg", "exp_avg_sq")


def plan_of(tensors: int) -> NamedPlan:
    """Return a plan of `tensors` entries with names as long as real ones."""
    entries = (
        PlanEntry(
            kind=KINDS[number % len(KINDS)],
            tensor=f"transformer.layers.{number // 50}.block.{number // 5 % 10}.projection.weight",
            dtype="float32",
            shape=(1024, 1024),
        )
        for number in range(tensors)
    )
    return NamedPlan.of(Plan(tuple(entries)))


def records(tensors: int, steps: int, seed: int = 0) -> list[StepRecord]:
    """Return `steps` consecutive records of one rank."""
    random = np.random.default_rng(seed)
    plan = plan_of(tensors)
    scale = np.exp(random.normal(-3, 2, tensors))
    zeros = np.where(np.arange(tensors) % 4 == 0, random.integers(100, 20_000, tensors), 0)
    counts = np.zeros((4, tensors), dtype=np.int64)
    counts[3] = 1024 * 1024
    made = []
    for step in range(1, steps + 1):
        scale *= np.exp(random.normal(0, 0.01, tensors))
        norm = scale * np.exp(random.normal(0, 0.04, tensors))
        most = scale * np.exp(random.normal(0, 0.08, tensors))
        least = -scale * np.exp(random.normal(0, 0.08, tensors))
        mean = scale * random.normal(0, 0.3, tensors)
        values = np.stack([norm, least, most, mean, scale, np.abs(mean) + scale]).astype(np.float32)
        counts[2] = zeros + random.integers(-50, 50, tensors) * (zeros > 0)
        made.append(
            StepRecord(
                ts=1_770_000_000_000_000 + step * 500_000,
                step=step,
                statistics=Statistics(plan, pa.array(values.ravel()), pa.array(counts.ravel())),
            )
        )
    return made


SIX = ("norm", "min", "max", "mean", "nans", "zeros")
"""Statistics that change in `six_statistics`; `infs` and `numel` are constant. Without rules there are no baselines."""


def six_statistics(
    tensors: int, seed: int = 0, step_microseconds: int = 500_000, *, scales: float = 2.0
) -> Iterator[StepRecord]:
    """Yield records of one rank without end: six statistics, which took 2.06 bytes a sample in the first prototypes.

    The logarithms of scales are normal, `scales` apart, and each walks by 1 % a step. A norm moves by 2 to 5 % of its
    scale, min and max by 8 %, those of parameters by 1e-4 and 4e-4; the mean by two thirds of its own size; a quarter
    of the tensors have zeros. No values come twice.
    By these sigmas the entropy of a norm is 2.4 bytes, of min and max 2.55, of a mean 3.1, of zeros 0.36: 1.83 a
    sample, where the prototypes' noise had 1.82.
    """
    random = np.random.default_rng(seed)
    plan = plan_of(tensors)
    is_parameter = np.arange(tensors) % len(KINDS) == 0
    scale = np.exp(random.normal(-3, scales, tensors))
    drift = np.where(is_parameter, 1e-4, 0.01)
    noise = np.where(is_parameter, 1e-4, random.uniform(0.02, 0.05, tensors))
    spread = np.where(is_parameter, 4e-4, 0.08)
    offset = random.normal(0, 0.1, tensors)
    zeros = np.where(np.arange(tensors) % 4 == 0, random.integers(2_000, 20_000, tensors), 0)
    infs, numel = (pa.array(np.full(tensors, count)) for count in (0, 1024 * 1024))
    step = 0
    while True:
        step += 1
        scale = scale * np.exp(random.normal(0, 1, tensors) * drift)
        norm = scale * np.exp(random.normal(0, 1, tensors) * noise)
        least, most = (sign * scale * np.exp(random.normal(0, 1, tensors) * spread) for sign in (-3, 3))
        mean = scale * offset * (1 + random.normal(0, 0.65, tensors))
        counts = np.stack([np.zeros(tensors, np.int64), zeros + random.integers(-1500, 1500, tensors) * (zeros > 0)])
        values = pa.array(np.stack([norm, least, most, mean]).astype(np.float32).ravel())
        nans, noughts = (pa.array(row) for row in counts)
        yield StepRecord(
            ts=1_770_000_000_000_000 + step * step_microseconds,
            step=step,
            statistics=Statistics(
                plan,
                pa.concat_arrays([values, pa.nulls(2 * tensors, pa.float32())]),
                pa.concat_arrays([nans, infs, noughts, numel]),
            ),
        )
