"""The kernel for CUDA devices, executed by Triton's interpreter on CPU tensors. `make test-gpu` runs it compiled."""

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.exporter.measure.kernels.conftest import CPU, numbers

from rankscope_contract.model.kinds import DEFAULT_OPS, VALUE_OPS
from rankscope_exporter.measure.kernels import compiled as loading
from rankscope_exporter.measure.kernels import device_arguments
from rankscope_exporter.measure.kernels.device_arguments import DeviceArguments
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable
from rankscope_exporter.records.selection import Finished

CHUNK = 64
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    pytest.importorskip("triton", reason="triton is not installed: it belongs to torch for CUDA")
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("rankscope_exporter.measure.kernels.triton_kernels")
        patch.setattr(device_arguments, "CHUNK", CHUNK)
        for name, value in {"CHUNK": CHUNK, "_BLOCK": 32, "_COMBINED": 2}.items():
            patch.setattr(module, name, value)
        yield module


@pytest.fixture
def measured(kernels: Any) -> Callable[..., Finished]:
    """Return a function that measures tensors with the kernel, which must be able to read all of them."""

    def run(tensors: Sequence[torch.Tensor | None], zero_below: float = 0.0) -> Finished:
        table = StatisticsTable(len(tensors), CPU)
        table.accumulate(VALUE_OPS)
        assert [] == DeviceArguments(range(len(tensors)), zero_below).run(kernels.measure_jobs, tensors, table)
        return HostCopy(table).finish()

    return run


@pytest.mark.usual(1)
@pytest.mark.parametrize("zero_below", [0.0, 20.0])
def test_all_dtypes_and_sizes_have_the_defined_statistics(zero_below, check_all):
    """Two are read in place although one has an address that is not aligned and the other is transposed."""
    tensors = [numbers(size, dtype, 50.0) for size in SIZES for dtype in (torch.float32, torch.float64)]
    tensors += [numbers(CHUNK + 1, dtype, 50.0) for dtype in (torch.bfloat16, torch.float16)]
    for tensor in tensors[2:]:
        tensor[len(tensor) // 2 :: 7] = 0.0
    views = [numbers(CHUNK + 1, torch.float32)[1:], numbers(2 * CHUNK, torch.bfloat16).view(2, CHUNK).t()]
    check_all([*tensors, *views], zero_below)


def test_elements_that_are_not_finite_are_counted_and_left_out(check_all):
    """Denormal numbers are finite and no zeros."""
    tensors = [torch.tensor([1e-45, -1e-40, 0.0]), torch.tensor([5e-324, 0.0], dtype=torch.float64)]
    for dtype in FLOATS:
        tensor = numbers(CHUNK + 2, dtype, 50.0)
        tensor[::3], tensor[1::5], tensor[2::7] = torch.nan, -torch.inf, torch.inf
        tensors += [tensor, torch.full((CHUNK + 3,), torch.nan).to(dtype)]
    check_all(tensors)


def test_tensors_that_move_keep_their_entries(kernels, check):
    """Also those that are absent for a while, grow, or change their dtype."""
    arguments = DeviceArguments(range(3), 0.0)
    first = [numbers(CHUNK + 1, torch.float32), numbers(5, torch.float16), None]
    second = [numbers(CHUNK + 1, torch.float32) + 1, None, numbers(3 * CHUNK, torch.float32)]
    third = [numbers(CHUNK + 1, torch.float32), numbers(7, torch.float16), numbers(3 * CHUNK, torch.float64)]
    for tensors in (first, first, second, third, first):
        table = StatisticsTable(3, CPU)
        arguments.run(kernels.measure_jobs, tensors, table)
        finished = HostCopy(table).finish()
        for entry, tensor in enumerate(tensors):
            assert (tensor is not None) == finished.present[entry]
            if tensor is not None:
                check(finished, entry, tensor, ops=DEFAULT_OPS)


def test_tensors_that_the_kernel_cannot_read_are_left_to_torch(kernels):
    unreadable = [torch.arange(5), torch.randn(3, dtype=torch.complex64), torch.ones(4, 4).to_sparse()]
    without_memory = [torch.empty(3, device="meta"), torch._efficientzerotensor((3,))]
    tensors = [numbers(5, torch.float32), *unreadable, *without_memory, None]
    table = StatisticsTable(len(tensors), CPU)

    assert [1, 2, 3, 4, 5] == DeviceArguments(range(7), 0.0).run(kernels.measure_jobs, tensors, table)


def test_arguments_are_not_used_in_another_stream_than_their_own(monkeypatch):
    """The allocator could reuse their memory before a kernel in another stream has read it."""
    arguments, tensors, table = DeviceArguments(range(1), 0.0), [torch.ones(3)], StatisticsTable(1, CPU)
    used = []
    for stream in (7, 7, 8):
        monkeypatch.setattr(device_arguments, "stream_of", lambda _device, stream=stream: stream)
        arguments.run(lambda jobs, _table, extra_sums: used.append(jobs), tensors, table)

    assert used[0] is used[1]
    assert {id(used[0].fields), id(used[0].chunks)}.isdisjoint({id(used[2].fields), id(used[2].chunks)})


def test_tensors_are_measured_after_an_error_in_the_step_before(kernels, monkeypatch, check):
    """The arguments of the step before the error are not used: their addresses may be freed."""
    arguments = DeviceArguments(range(1), 0.0)
    arguments.run(kernels.measure_jobs, [numbers(5, torch.float32)], StatisticsTable(1, CPU))
    tensors, table = [numbers(CHUNK + 7, torch.float32)], StatisticsTable(1, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(device_arguments, "on_device", lambda *_: torch.empty(-1))
        with pytest.raises(RuntimeError):
            arguments.run(kernels.measure_jobs, tensors, table)
    arguments.run(kernels.measure_jobs, tensors, table)

    check(HostCopy(table).finish(), 0, tensors[0], ops=DEFAULT_OPS)


def test_kernels_start_on_the_device_of_the_table(kernels, monkeypatch):
    """Triton uses the current device of the thread, which may be another one."""
    current: list[torch.Tensor] = []
    started: list[tuple[torch.Tensor, ...]] = []

    class Kernel:
        def __getitem__(self, _grid: Any) -> Callable[..., None]:
            return lambda *_args, **_constants: started.append((*current,))

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.clear()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("_measure_chunks", "_combine_chunks"):
        monkeypatch.setattr(kernels, name, Kernel())
    table = StatisticsTable(1, CPU)
    DeviceArguments(range(1), 0.0).run(kernels.measure_jobs, [torch.ones(CHUNK + 1)], table)

    assert [(table.buffer,)] * 2 == started


def test_library_that_a_script_has_replaced_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    kernel = loading.LazyKernel("triton", lambda: print)

    assert not kernel.is_possible
    assert kernel.warm_up() is None


def test_interpreted_kernel_is_not_used_on_a_device(kernels, caplog):
    """Triton's interpreter runs on the host and would read addresses of the device there, which ends the process."""
    assert not kernels.IS_COMPILED
    device = torch.device("cuda", 15)
    thread = loading.warm_up(device)
    assert thread is not None
    thread.join()

    assert "triton cannot be used (RuntimeError: TRITON_INTERPRET is set)" in caplog.text
    assert "torch" == loading.backend_name(device)


def test_kernel_with_wrong_results_is_not_used(kernels, monkeypatch):
    for owner, name in ((kernels, "CHUNK"), (kernels, "_BLOCK"), (device_arguments, "CHUNK")):
        monkeypatch.setattr(owner, name, 16_384)

    loading.check_kernel(kernels.measure_jobs, CPU, ("sum_of_fourth_powers",))
    with pytest.raises(RuntimeError, match="wrong results on this device"):
        loading.check_kernel(lambda jobs, table, *, extra_sums: table.zero_(), CPU, ())


def test_group_uses_the_kernel_of_its_device(kernels, monkeypatch, check):
    """The table is one of a CPU here, and only its type is another one."""
    monkeypatch.setattr(
        "rankscope_exporter.measure.kernels.measure_group.ready_kernel", lambda *_: kernels.measure_jobs
    )
    tensors = [numbers(CHUNK + 9, torch.bfloat16), numbers(40, torch.float32)[::2], torch.arange(9)]
    table = StatisticsTable(3, CPU)
    MeasureGroup(range(3)).measure(tensors, table)
    finished = HostCopy(table).finish()

    for entry, tensor in enumerate(tensors):
        check(finished, entry, tensor, ops=DEFAULT_OPS)
