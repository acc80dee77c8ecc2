"""The kernel for CUDA devices, executed by Triton's interpreter on CPU tensors. `make test-gpu` runs it compiled."""

import contextlib
import functools
import importlib
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.exporter.measure.kernels.conftest import CPU, Operations, exact, numbers, truth
from tests.exporter.parts import Watched
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from rankscope_contract.model.kinds import COUNT_OPS, DEFAULT_OPS, VALUE_OPS
from rankscope_exporter import MonitorConfig
from rankscope_exporter.adapters import tracing
from rankscope_exporter.measure.kernels import compiled as loading
from rankscope_exporter.measure.kernels import measure_group
from rankscope_exporter.measure.kernels.compiled import DeviceArguments
from rankscope_exporter.measure.kernels.statistics_table import HostCopy, StatisticsTable
from rankscope_exporter.measure.quantities import quantity_classes
from rankscope_exporter.records.plan import Finished
from rankscope_exporter.records.record import Transfer

CHUNK = 64
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OPS = (*VALUE_OPS, *COUNT_OPS)
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    pytest.importorskip("triton", reason="triton is not installed: it belongs to torch for CUDA")
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("rankscope_exporter.measure.kernels.triton_kernels")
        patch.setattr(loading, "CHUNK", CHUNK)
        for name, value in {"CHUNK": CHUNK, "_BLOCK": 32, "_COMBINED": 2}.items():
            patch.setattr(module, name, value)
        yield module


@pytest.fixture
def measured(kernels: Any) -> Callable[..., Finished]:
    """Return a function that measures tensors with the kernel, which must be able to read all of them."""

    def run(tensors: Sequence[torch.Tensor | None], zero_below: float = 0.0) -> Finished:
        table = StatisticsTable(len(tensors), CPU, zero_below=zero_below)
        table.accumulate(VALUE_OPS)
        assert [] == DeviceArguments(range(len(tensors))).run(kernels.measure_jobs, tensors, table)
        return HostCopy(table).finish()

    return run


@pytest.mark.usual(1)
@pytest.mark.parametrize("zero_below", [0.0, 20.0])
def test_all_dtypes_and_sizes_have_the_defined_statistics(zero_below, check_all):
    """Two are read in place: one has an address that is not aligned, one is transposed. Denormal numbers are finite."""
    tensors = [numbers(size, dtype, 50.0) for size in SIZES for dtype in (torch.float32, torch.float64)]
    tensors += [numbers(CHUNK + 1, dtype, 50.0) for dtype in (torch.bfloat16, torch.float16)]
    for tensor in tensors[2:]:
        tensor[len(tensor) // 2 :: 7] = 0.0
    tensors += [numbers(CHUNK + 1, torch.float32)[1:], numbers(2 * CHUNK, torch.bfloat16).view(2, CHUNK).t()]
    tensors += [torch.tensor([1e-45, -1e-40, 0.0]), torch.tensor([5e-324, 0.0], dtype=torch.float64)]
    for dtype in FLOATS:
        tensor = numbers(CHUNK + 2, dtype, 50.0)
        tensor[::3], tensor[1::5], tensor[2::7] = torch.nan, -torch.inf, torch.inf
        tensors += [tensor, torch.full((CHUNK + 3,), torch.nan).to(dtype)]
    check_all(tensors, zero_below)


def test_tensors_that_move_keep_their_entries(kernels, check):
    """Also those that are absent for a while, grow, or change their dtype."""
    arguments = DeviceArguments(range(3))
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

    assert [1, 2, 3, 4, 5] == DeviceArguments(range(7)).run(kernels.measure_jobs, tensors, table)


def test_arguments_are_not_used_in_another_stream_than_their_own(monkeypatch):
    """The allocator could reuse their memory before a kernel in another stream has read it."""
    arguments, tensors, table = DeviceArguments(range(1)), [torch.ones(3)], StatisticsTable(1, CPU)
    used = []
    for stream in (7, 7, 8):
        monkeypatch.setattr(loading, "stream_of", lambda _device, stream=stream: stream)
        arguments.run(lambda jobs, _table, extra_sums: used.append(jobs), tensors, table)

    assert used[0] is used[1]
    assert {id(used[0].fields), id(used[0].chunks)}.isdisjoint({id(used[2].fields), id(used[2].chunks)})


def test_tensors_are_measured_after_an_error_in_the_step_before(kernels, monkeypatch, check):
    """The arguments of the step before the error are not used: their addresses may be freed."""
    arguments = DeviceArguments(range(1))
    arguments.run(kernels.measure_jobs, [numbers(5, torch.float32)], StatisticsTable(1, CPU))
    tensors, table = [numbers(CHUNK + 7, torch.float32)], StatisticsTable(1, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "on_device", lambda *_: torch.empty(-1))
        with pytest.raises(RuntimeError):
            arguments.run(kernels.measure_jobs, tensors, table)
    arguments.run(kernels.measure_jobs, tensors, table)

    check(HostCopy(table).finish(), 0, tensors[0], ops=DEFAULT_OPS)


def test_library_that_a_script_has_replaced_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    kernel = loading.LazyKernel(torch.device("cuda", 14), ())

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
    for owner, name in ((kernels, "CHUNK"), (kernels, "_BLOCK"), (loading, "CHUNK")):
        monkeypatch.setattr(owner, name, 16_384)

    loading.check_kernel(kernels.measure_jobs, CPU, ("sum_of_fourth_powers",))
    with pytest.raises(RuntimeError, match="wrong results on this device"):
        loading.check_kernel(lambda jobs, table, *, extra_sums: table.zero_(), CPU, ())


@pytest.fixture
def device(kernels, monkeypatch) -> Operations:
    """Let a CPU take the place of a device. Return the operations and the kernels that the monitor starts on it.

    Copies to the host and `synchronize` wait as well. On a CPU they are no operations, so their functions are replaced.
    Only `make test-gpu` shows that a copy is asynchronous.
    """
    found = Operations()

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.clear()

    def start(kernel: str, run: Callable[..., None], *args: Any, **settings: Any) -> None:
        assert current[0] is args[2], "Triton uses the current device of the thread, which may be another one"
        found.counted[kernel] += 1
        with _disable_current_modes():  # the interpreter copies tensors to the host
            run(*args, **settings)

    def waiting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            if _get_current_dispatch_mode() and (name != "to" or "cpu" in (*args[1:], *settings.values())):
                found.waits.append(name)
            return function(*args, **settings)

        return call

    current: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(measure_group, "ready_kernel", lambda *_: kernels.measure_jobs)
    monkeypatch.setattr(
        tracing.torch_private, "without_modes", lambda: found
    )  # the monitor runs without the modes of a script
    for kernel in (kernels._measure_chunks, kernels._combine_chunks):
        monkeypatch.setattr(kernel, "run", functools.partial(start, kernel.__name__, kernel.run))
    tensor = ((torch.Tensor, name, getattr(torch.Tensor, name)) for name in ("cpu", "numpy", "to", "tolist"))
    copies = ((Transfer, "wait", Transfer.wait),)
    cuda = ((owner, "synchronize", lambda *_: None) for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream))
    for owner, name, function in (*tensor, *copies, *cuda):
        monkeypatch.setattr(owner, name, waiting(name, function))
    return found


def started(device: Operations, layers: int, quantities: Sequence[str]) -> list[Counter[str]]:
    """Return what the monitor starts at each of two steps, which wait for nothing."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)), nn.Linear(4, CHUNK // 2))
    for name, tensor in {"unreadable": torch.arange(3), "with gaps": torch.arange(8.0)[::2]}.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=1e-3, momentum=0.9)
    found = []
    with Watched(model, optimizer, quantities=quantities, ops=OPS) as watched:
        for _ in range(3):
            device.counted.clear()
            with Operations() as script:
                loss = model(torch.ones(2, 4)).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watched.monitor.log(loss=loss)
                watched.monitor.end_step()
            assert watched.session.publisher.catch_up(60)  # it returns the host buffer of the step
            assert [] == script.waits + device.waits
            del device.counted["aten.lift_fresh.default"]  # on the host: the addresses of tensors that have moved
            found.append(device.counted.copy())
    truths = {name: truth(exact(item)) for name, item in model.named_parameters() if "parameters" in quantities}
    results = {row.entry.tensor: {op: row.numbers[op] for op in OPS} for row in watched.rows("param_after")}

    assert (0, [1, 2, 3]) == (watched.faults, watched.measured())
    assert {name: pytest.approx(one.values | one.counts, rel=1e-5, abs=1e-7) for name, one in truths.items()} == results
    return found[1:]  # the first step allocates memory


@pytest.mark.parametrize(
    ("quantities", "few", "many"),
    [
        # Parameters before and after the update, gradients before and after clipping, and momentum.
        (MonitorConfig().quantities, (5, 5), (5, 5)),
        (["activations"], (5, 0), (9, 0)),  # a hook has one tensor; the output of a module is the input of the next
        (["micro_gradients"], (4, 1), (8, 1)),
        ([*quantity_classes()], (14, 6), (22, 6)),
    ],
)
def test_each_event_starts_one_kernel_for_all_tensors_and_never_waits(quantities, few, many, device):
    """A second kernel adds up tensors of several chunks. The torch operations of an event do not depend on its size."""
    steps = [started(device, layers, quantities) for layers in (1, 3)]

    assert [[few] * 2, [many] * 2] == [[(n["_measure_chunks"], n["_combine_chunks"]) for n in of] for of in steps]
    assert few != many or steps[0] == steps[1]


WAITS: list[Callable[[torch.Tensor], object]] = [
    *(operator.methodcaller(name) for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__array__")),
    *(lambda one: one.to("cpu"), lambda one: one[one > 0], lambda one: torch.equal(one, one)),
    *(lambda _: torch.cuda.synchronize(), lambda _: HostCopy(StatisticsTable(1, CPU)).finish()),
]


@pytest.mark.parametrize("wait", WAITS)
def test_wait_for_the_device_is_seen(wait, device):
    with device:
        wait(torch.ones(()))

    assert 1 == len(device.waits)
