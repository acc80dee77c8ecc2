"""Statistics of all tensors of a step, and the rules over them: CPU time of one thread.

10 M parameters in 150 tensors, measured by the compiled kernel, by torch operations alone, and by the naive way (one
torch call a statistic). The floor is a plain `torch.sum` over the same bytes in one piece: one read, one addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from _rows import Row, cpu_seconds, print_rows

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable
from rankscope_exporter.publish.anomaly_detector import AnomalyDetector
from rankscope_exporter.records.plan import Finished

PARAMETERS = 10_000_000
TENSORS = 150
CPU = torch.device("cpu")
ROUNDS = 21


def run() -> list[Row]:
    torch.set_num_threads(1)
    return [
        *(row for dtype in (torch.float32, torch.bfloat16) for row in _bandwidth(dtype)),
        *_overhead(),
        *(row for entries in (900, 15_000) for row in _judge(entries)),
    ]


def _bandwidth(dtype: torch.dtype) -> list[Row]:
    whole = torch.randn(PARAMETERS).to(dtype)
    # Sizes as models have them: a few large matrices hold nearly everything, most tensors are short vectors.
    large = PARAMETERS // (TENSORS // 3) - 512
    tensors = list(whole.split([large, 256, 256] * (TENSORS // 3)))
    seconds = {
        "compiled": cpu_seconds(_measuring(tensors, compiled=True), ROUNDS),
        "torch": cpu_seconds(_measuring(tensors, compiled=False), ROUNDS),
        "naive": cpu_seconds(lambda: naive(tensors), 5),
        "floor": cpu_seconds(whole.sum, ROUNDS),
    }
    name = str(dtype).removeprefix("torch.")
    note = {
        "compiled": f"{seconds['compiled'] / seconds['floor']:.1f} x the floor",
        "torch": f"{seconds['torch'] / seconds['compiled']:.1f} x compiled",
        "naive": f"{seconds['naive'] / seconds['compiled']:.1f} x compiled",
        "floor": f"{PARAMETERS * dtype.itemsize / seconds['floor'] / 1e9:.0f} GB/s",
    }
    return [Row(f"10 M {name}, {way}", taken * 1e3, "ms", note[way]) for way, taken in seconds.items()]


def naive(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return eight numbers of each tensor, one torch call (or two) for each; one NaN makes the first four NaN."""
    rows = []
    for tensor in tensors:
        floats = (tensor.float().norm(), tensor.min().float(), tensor.max().float(), tensor.float().mean())
        counts = (tensor.isnan().sum(), tensor.isinf().sum(), (tensor == 0).sum(), torch.tensor(tensor.numel()))
        rows.append(torch.stack([*floats, *(count.float() for count in counts)]))
    return torch.stack(rows)


def _measuring(tensors: Sequence[torch.Tensor], *, compiled: bool) -> Callable[[], None]:
    table = StatisticsTable(len(tensors), CPU, compiled=compiled)
    group = MeasureGroup(range(len(tensors)))
    return lambda: group.measure(tensors, table)


def _overhead() -> list[Row]:
    tiny = [torch.randn(4) for _ in range(TENSORS)]
    moved = [[torch.randn(4) for _ in range(TENSORS)] for _ in range(2)]
    table = StatisticsTable(TENSORS, CPU)
    group = MeasureGroup(range(TENSORS))

    def alternate() -> None:
        moved.reverse()
        group.measure(moved[0], table)

    def a_hundred(work: Callable[[], object]) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(100):
                work()

        return repeat

    ways = {
        "150 tiny tensors, compiled": (_measuring(tiny, compiled=True), "addresses as before"),
        "150 tiny tensors, compiled, moved": (alternate, "every address is new"),
        "150 tiny tensors, torch": (_measuring(tiny, compiled=False), ""),
        "host copy and finish of 150 entries": (lambda: HostCopy(table).finish(), "publisher thread"),
    }
    return [Row(name, cpu_seconds(a_hundred(work)) * 1e4, "µs", note) for name, (work, note) in ways.items()]


def _judge(entries: int) -> list[Row]:
    rules = [AnomalyNan(), AnomalyTurbulence(threshold=0.5)]
    detector = AnomalyDetector(
        rules, [PlanEntry(kind=f"kind{number % 6}", tensor=f"t{number}") for number in range(entries)]
    )
    counts = np.zeros((len(COUNT_OPS), entries), np.int64)
    values = np.random.default_rng(0).random((len(VALUE_OPS), entries), np.float32) + 1
    quiet = Finished(values, counts, np.ones(entries, np.bool_))
    burning = Finished(values * 1e6, counts + 1, quiet.present)
    detector.observe(quiet)
    return [
        Row(
            f"judge {entries:,} entries", cpu_seconds(lambda: _times(20, detector, quiet)) * 5e4, "µs", "nothing fires"
        ),
        Row(f"judge {entries:,} entries, all firing", cpu_seconds(lambda: detector.observe(burning)) * 1e6, "µs", ""),
    ]


def _times(count: int, detector: AnomalyDetector, finished: Finished) -> None:
    for _ in range(count):
        detector.observe(finished)


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
