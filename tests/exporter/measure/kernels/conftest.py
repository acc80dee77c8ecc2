"""Fixtures for both backends of the statistics, and a float64 reference that shares no code with them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_exporter.measure.kernels.compiled import backend_name
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable
from rankscope_exporter.records.plan import Finished

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Truth:
    """The reference statistics of some numbers, in float64; NaN for a value that does not exist."""

    values: dict[str, float]
    counts: dict[str, int]
    mean_magnitude: float


def truth(numbers: np.ndarray, zero_below: float = 0.0) -> Truth:
    """Return the statistics of `numbers` (float64), computed by their definition with numpy."""
    numbers = np.asarray(numbers, dtype=np.float64).reshape(-1)
    finite = numbers[np.isfinite(numbers)]
    values = dict.fromkeys(VALUE_OPS, math.nan)
    if finite.size:
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.square(finite)
            values = {
                "norm": math.sqrt(float(squares.sum())),
                "min": finite.min(),
                "max": finite.max(),
                "mean": finite.mean(),
                "rms": math.sqrt(float(squares.mean())),
                "kurtosis": float(np.square(squares).mean() / squares.mean() / squares.mean()),
            }
    zeros = np.abs(numbers) < zero_below if zero_below > 0 else numbers == 0
    nans, infs = int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())
    counts = {"nans": nans, "infs": infs, "zeros": int(zeros.sum()), "numel": numbers.size}
    return Truth(values, counts, float(np.abs(finite).mean()) if finite.size else 0.0)


def exact(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of the dense tensor as float64, complex numbers as their modulus."""
    dense = tensor.detach().to_dense()
    return np.abs(dense.to(torch.complex128).numpy()) if dense.is_complex() else dense.to(torch.float64).numpy()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return `size` normally distributed numbers times `scale`, rounded to `dtype`."""
    return (torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * scale).to(dtype)


def assert_is_true(finished: Finished, entry: int, expected: Truth, ops: Sequence[str]) -> None:
    """Assert that one entry has the documented accuracy."""
    counts = dict(zip(COUNT_OPS, finished.counts[:, entry].tolist(), strict=True))
    assert bool(finished.present[entry])
    assert expected.counts == counts

    for op, value in zip(VALUE_OPS, finished.values[:, entry].tolist(), strict=True):
        if op not in ops:
            continue
        wanted = expected.values[op]
        rounded = float(np.float32(wanted)) if math.isfinite(wanted) and abs(wanted) < 3.5e38 else wanted
        # Below 1e-38 the resolution is half a unit of the smallest float32.
        # The kurtosis divides twice by the sum of squares.
        magnitude = expected.mean_magnitude if op == "mean" else abs(wanted)
        slack = (2e-5 if op == "kurtosis" else 1e-5) * magnitude + 1e-45
        if math.isnan(wanted):
            assert math.isnan(value), op
        elif math.isinf(rounded) or abs(wanted) > 3.5e38:
            assert math.copysign(math.inf, wanted) == value, op
        else:
            assert abs(wanted - value) <= slack, (op, wanted, value)


class Operations(TorchDispatchMode):
    """Counts the operations of this thread, and lists those for which the host would wait for a device.

    The host waits for numbers of a tensor, and for a size that depends on them: torch tags these operations. It also
    waits for the error code of a decomposition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.waits: list[str] = []
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(func)] += 1
        is_tagged = not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)
        if str(func).startswith(("aten.index.", "aten.index_put")):  # an index that is no mask gives a known size
            is_tagged = any(getattr(index, "dtype", None) is torch.bool for index in args[1])
        if is_tagged or ("linalg" in str(func) and "vector_norm" not in str(func)):
            self.waits.append(str(func))
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.fixture
def check() -> Callable[..., None]:
    def run(
        finished: Finished, entry: int, tensor: torch.Tensor, zero_below: float = 0.0, ops: Sequence[str] = VALUE_OPS
    ) -> None:
        assert_is_true(finished, entry, truth(exact(tensor), zero_below), ops)

    return run


@pytest.fixture
def check_all(measured: Callable[..., Finished], check: Callable[..., None]) -> Callable[..., Finished]:
    """Return a function that measures tensors and compares the entry of each that is not None with its reference."""

    def run(tensors: Sequence[torch.Tensor | None], zero_below: float = 0.0) -> Finished:
        finished = measured(tensors, zero_below)
        for entry, tensor in enumerate(tensors):
            if tensor is not None:
                check(finished, entry, tensor, zero_below)
        return finished

    return run


@pytest.fixture(params=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, require_server: Callable[..., str]) -> bool:
    """Run the test with the compiled kernel, then with torch operations alone."""
    if request.param == "compiled":
        require_server("gcc", "g++")
        assert backend_name() == "C"
    return request.param == "compiled"


@pytest.fixture
def measured(compiled: bool) -> Callable[..., Finished]:
    def run(tensors: Sequence[torch.Tensor | None], zero_below: float = 0.0) -> Finished:
        table = StatisticsTable(len(tensors), CPU, zero_below=zero_below, compiled=compiled)
        table.accumulate(VALUE_OPS)
        MeasureGroup(range(len(tensors))).measure(tensors, table)
        return HostCopy(table).finish()

    return run
