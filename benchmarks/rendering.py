"""Rendering the live page: ours against prometheus_client, on the same series in one run."""

from __future__ import annotations

from _noise import records
from _rows import Row, cpu_seconds, print_rows
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from rankscope_contract.metrics.catalogue import TENSOR_BASELINE, TENSOR_VALUE
from rankscope_contract.model.identity import Identity
from rankscope_contract.model.kinds import JUDGED_OPS
from rankscope_exporter.publish.exposition import ExporterStats, Exposition, LatestValues

SERIES = (2_000, 15_000)


def run() -> list[Row]:
    rows = []
    for series in SERIES:
        tensors = series // (2 * len(JUDGED_OPS))
        ours, theirs = _ours(tensors), _theirs(tensors)
        million = series / 1e6
        rows += [
            Row(
                f"Rankscope, {series:,} series",
                ours / million,
                "CPU s per million samples",
                "scalars of the page included",
            ),
            Row(
                f"prometheus_client, {series:,} series",
                theirs / million,
                "CPU s per million samples",
                "generate_latest",
            ),
            Row(f"ratio, {series:,} series", theirs / ours, "x less CPU"),
        ]
    return rows


def _ours(tensors: int) -> float:
    live = LatestValues(())
    identity = Identity(run="bench", launch_id="bench", host="bench", incarnation="0" * 32)
    page = Exposition(
        identity,
        live,
        lambda: ExporterStats(faults=0, dropped={}, overhead_seconds={}, ring_records=0, ring_uncommitted=0),
        rules=(),
        series_budget=100_000,
        all_ops=False,
    )
    steps = iter(records(tensors, 12))

    def render() -> None:
        live.update(next(steps))  # the cache holds a step's page; a new step must be rendered
        page.pieces()

    return cpu_seconds(render, rounds=9)


def _theirs(tensors: int) -> float:
    registry = CollectorRegistry()
    labels = ("run", "rank", *TENSOR_VALUE.labels)
    gauges = [Gauge(spec.name, spec.help, labels, registry=registry) for spec in (TENSOR_VALUE, TENSOR_BASELINE)]
    entries = records(tensors, 1)[0].statistics.plan.plan.entries
    children = [
        gauge.labels("bench", "0", entry.kind, f"{entry.tensor}.{number}", op)
        for number, entry in enumerate(entries)
        for gauge in gauges
        for op in JUDGED_OPS
    ]

    def render() -> None:
        for number, child in enumerate(children):
            child.set(number * 1.1)
        generate_latest(registry)

    return cpu_seconds(render, rounds=3)


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
