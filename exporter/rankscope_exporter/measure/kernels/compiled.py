"""Compiled kernels for the statistics: one for CPUs, and one for each CUDA device.

The one for a CUDA device needs Triton, which is optional. A background thread imports Triton and compiles the kernel
once per process, which takes seconds. Until the kernel is ready, or if the library is missing, torch operations compute
the same statistics.

The arguments of the kernel for devices are addresses, sizes and chunks of tensors, in arrays on the device.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from rankscope_exporter.adapters.tracing import others_may_capture
from rankscope_exporter.measure.kernels import torch_backend
from rankscope_exporter.measure.kernels.c_kernel import CODES, c_kernel
from rankscope_exporter.measure.kernels.statistics_table import DeviceKernel, Kernel, Rows, StatisticsTable, on_device
from rankscope_exporter.measure.kernels.tensor_access import readable_by_kernel
from rankscope_exporter.measure.kernels.torch_backend import zero_bits
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.record import StepObserver

log = logging.getLogger("rankscope_exporter.measure.kernels")

_FORK_WAITS_SECONDS: Final = 10.0
_CPU: Final = torch.device("cpu")

WARM_UP_AT_STEP: Final = 3
"""The number of a training's steps after which the compiled kernel for statistics on a CUDA device is built.

A script that only inspects its model makes fewer steps, and does not wait for the build.
"""

COMPILED_FROM_STEP: Final = 10
"""The number of a training's steps after which the compiled kernel measures.

The first steps that take 0.1 s or longer leave enough time for a build that the cache of Triton contains.
"""

BUILD_SECONDS: Final = 5.0
"""Longest time in seconds that this step waits for the build.

If the build takes longer, as on a loaded machine, the steps with ten, a hundred times this number try again.
"""


CHUNK: Final = 16_384
"""Elements that one program of the kernel measures. Larger tensors have several chunks."""
JOB_FIELDS: Final = 5  # address, elements, entry, code, bits of the smallest magnitude that is no zero
PARTIAL_FIELDS: Final = 8  # four sums, three counts, and an optional sum; all float64


@dataclass(frozen=True, slots=True)
class DeviceJobs:
    """The tensors that one call of the kernel measures, as int64 tensors on their device."""

    fields: torch.Tensor
    """[tensors, JOB_FIELDS]"""
    chunks: torch.Tensor
    """[chunks, 3]: the job, the first element, and the place of the partial result; -1 if the tensor has one chunk."""
    large: torch.Tensor
    """[tensors with several chunks, 3]: the job, the first partial result, and the number of partial results."""
    partials: int


Sight = tuple[int, int, torch.dtype]


class DeviceArguments:
    """The kernel arguments of one group of tensors. They are kept as long as the tensors have the same addresses.

    The chunks are kept as long as the tensors have the same sizes: gradients move at each step and keep their sizes.
    Both are made again in another stream. The allocator of torch reuses freed memory in the order of the stream in
    which it was allocated, so memory of one stream could be overwritten before a kernel in another one has read it.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._seen: tuple[int, list[Sight | None]] | None = None  # the stream and the tensors
        self._sizes: tuple[int, list[int]] | None = None  # the stream and the numbers of elements
        self._jobs: DeviceJobs | None = None
        self._others: list[int] = []
        self.have_moved = False
        """True if a tensor of the last call of `run` had another address, size or dtype than in the call before."""

    def run(
        self, kernel: DeviceKernel, tensors: Sequence[torch.Tensor | None], table: StatisticsTable
    ) -> Sequence[int]:
        """Measure those of `tensors` that the kernel can read. Return the positions of the others.

        Does not wait for the device.
        """
        found = [readable_by_kernel(tensor, table.device) for tensor in tensors]
        sights = [None if own is None else (own.data_ptr(), own.numel(), own.dtype) for own in found]
        seen = stream_of(table.device), sights
        self.have_moved = seen != self._seen
        if self.have_moved:
            self._seen = None  # if memory for the arguments is missing, the next call plans again
            self._others = [at for at, tensor in enumerate(tensors) if tensor is not None and sights[at] is None]
            self._plan(*seen, table)
            self._seen = seen
        kernel(self._jobs, table.buffer, extra_sums=table.extra_sums)
        return self._others

    def _plan(self, stream: int, sights: list[Sight | None], table: StatisticsTable) -> None:
        found = [(sight, row) for sight, row in zip(sights, self._rows, strict=True) if sight is not None]
        read_as = {dtype: dtype if dtype is torch.float64 else torch.float32 for dtype in CODES}
        bits = {dtype: zero_bits(table.zero_below, dtype, wide) for dtype, wide in read_as.items()}
        fields = [(address, numel, row, CODES[dtype], bits[dtype]) for (address, numel, dtype), row in found]
        sizes = stream, [numel for (_, numel, _), _ in found]
        if self._jobs is None or sizes != self._sizes:
            self._jobs, self._sizes = _with_chunks(on_device(fields, table.device), sizes[1], table.device), sizes
        else:
            self._jobs = replace(self._jobs, fields=on_device(fields, table.device))


def _with_chunks(fields: torch.Tensor, sizes: Sequence[int], device: torch.device) -> DeviceJobs:
    chunks: list[tuple[int, int, int]] = []
    large: list[tuple[int, int, int]] = []
    partials = 0
    for job, numel in enumerate(sizes):
        count = max(1, -(-numel // CHUNK))  # a tensor without elements has counts too
        if count > 1:
            large.append((job, partials, count))
        chunks += [(job, CHUNK * place, partials + place if count > 1 else -1) for place in range(count)]
        partials += count if count > 1 else 0
    return DeviceJobs(fields, on_device(chunks, device), on_device(large, device), partials)


def stream_of(device: torch.device) -> int:
    """Return the number of the current stream of `device`; 0 for a device other than CUDA."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


class LazyKernel:
    """The kernel for tensors on one CUDA device that computes some optional sums. Triton compiles it on a thread."""

    def __init__(self, device: torch.device, extra_sums: tuple[str, ...]) -> None:
        self.kernel: DeviceKernel | None = None
        """The compiled kernel; None until it is compiled."""
        self.seconds = 0.0
        """CPU seconds of the import and the compilation."""
        self._device, self._extra_sums = device, extra_sums
        self.thread: threading.Thread | None = None
        """The thread that compiles or has compiled the kernel."""

    @property
    def is_possible(self) -> bool:
        """Return whether the library that compiles the kernel is installed."""
        try:
            return importlib.util.find_spec("triton") is not None
        except ValueError:  # a script has replaced the library by a module of its own
            return False

    def warm_up(self) -> threading.Thread | None:
        """Start the import and the compilation on a background thread, once per process, and return the thread.

        Return None if the kernel is ready or cannot be compiled. Called on the training thread.
        """
        if self.kernel is not None or not self.is_possible:
            return None
        if self.thread is None:
            self.thread = OwnThread(target=self._run, name="rankscope-warm-up")
            # In a child that is forked during an import, the import lock would be held for ever. An exit during a
            # compilation would free memory that the compiler uses.
            os.register_at_fork(before=self._wait)
            atexit.register(self._wait)
            self.thread.start()
        return self.thread

    def _wait(self) -> None:
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_FORK_WAITS_SECONDS)

    def _run(self) -> None:
        try:
            self.kernel = _compiled_kernel(self._device, self._extra_sums)
        except Exception as error:  # noqa: BLE001 - a compiler raises errors of any type
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("triton cannot be used (%s): tensor statistics are computed with torch operations", reason)
        finally:
            self.seconds = time.thread_time()


def _compiled_kernel(device: torch.device, extra_sums: tuple[str, ...]) -> DeviceKernel:
    kernels = importlib.import_module("rankscope_exporter.measure.kernels.triton_kernels")
    if not kernels.IS_COMPILED:
        raise RuntimeError("TRITON_INTERPRET is set")
    # A stream of its own: work of this thread must neither wait for the training nor become part of a captured graph.
    with torch.cuda.device(device), others_may_capture(), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        check_kernel(kernels.measure_jobs, device, extra_sums)
    return kernels.measure_jobs  # type: ignore[no-any-return]


def check_kernel(kernel: DeviceKernel, device: torch.device, extra_sums: tuple[str, ...]) -> None:
    """Compile the kernel for `device` by a first call. Waits for the current stream.

    Raises RuntimeError if its results differ from those of torch operations.
    """
    with torch.no_grad():
        odd = torch.linspace(-3.0, 5.0, 40_000, dtype=torch.float64, device=device)
        odd[:3] = torch.tensor([torch.nan, torch.inf, 0.0], dtype=torch.float64, device="cpu")
        tensors = [odd.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
        tensors += [tensor[1:101] for tensor in tensors]
        tables = [StatisticsTable(len(tensors), device, zero_below=0.5) for _ in range(2)]
        for table in tables:
            table.add_sums(extra_sums)
        rows, (found, expected) = range(len(tensors)), tables
        DeviceArguments(rows).run(kernel, tensors, found)
        torch_backend.measure(tensors, [tensor.numel() for tensor in tensors], rows, expected)
        pairs = (found.sums, expected.sums), (found.extras, expected.extras)
        are_near = all(torch.allclose(*pair, rtol=1e-9, atol=1e-9) for pair in pairs)
        if not (are_near and torch.equal(found.counts, expected.counts)):
            raise RuntimeError("the compiled kernel has wrong results on this device")


_OF_DEVICES: Final[dict[tuple[torch.device, tuple[str, ...]], LazyKernel]] = {}


def kernel_of(device: torch.device, extra_sums: tuple[str, ...] = ()) -> LazyKernel:
    """Return the kernel for tensors on the CUDA device `device` that also computes `extra_sums`."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    return _OF_DEVICES.setdefault((device, extra_sums), LazyKernel(device, extra_sums))


def ready_kernel(device: torch.device, extra_sums: tuple[str, ...]) -> Kernel | None:
    """Return the compiled kernel for tensors on `device` that computes `extra_sums`; None until it is ready.

    On a CUDA device, a kernel with optional sums is requested by its first use, after the kernel without them.
    """
    if device.type == "cpu":
        kernel = c_kernel()
        return None if kernel is None or kernel.extra_sums(extra_sums) is None else kernel
    if device.type != "cuda":
        return None
    found = kernel_of(device, extra_sums)
    if found.kernel is None and found.thread is None and kernel_of(device).thread is not None:
        found.warm_up()
    return found.kernel


def warm_up(device: torch.device) -> threading.Thread | None:
    """Start the compilation of the kernel for a CUDA device: see `LazyKernel.warm_up`. No other device needs it."""
    return kernel_of(device).warm_up() if device.type == "cuda" else None


def warm_up_seconds(device: torch.device) -> float:
    """Return the CPU seconds that importing the compiler and compiling the kernel for `device` took."""
    return sum(kernel.seconds for (own, _), kernel in tuple(_OF_DEVICES.items()) if own == device)


def backend_name(device: torch.device = _CPU, *, coming: bool = False) -> str:
    """Return the backend "C", "triton" or "torch": the present, or if `coming` that of the compiled kernel."""
    if device.type == "cpu":
        return "torch" if c_kernel() is None else "C"
    found = kernel_of(device) if device.type == "cuda" else None
    return "torch" if found is None or not (found.kernel or (coming and found.is_possible)) else "triton"


class KernelWarmUp(StepObserver):
    """Builds the compiled kernel for a CUDA device, and calls `use` at the step from which on it measures.

    The step depends on the sampling only, and not on the duration of the build unless it exceeds BUILD_SECONDS: the
    compiled kernel and torch operations round differently, and equal trainings must have equal statistics.
    """

    def __init__(self, device: torch.device, use: Callable[[], None]) -> None:
        self._device = device
        self._use = use
        self._steps = 0
        self._try_at = COMPILED_FROM_STEP
        self._is_started = self._is_decided = False

    def on_sampling_decided(self, sampled: bool) -> None:  # noqa: FBT001 - an event has positional arguments
        self._steps += 1
        if not sampled or self._is_decided:
            return
        if not self._is_started and self._steps >= WARM_UP_AT_STEP:
            self._is_started = True
            warm_up(self._device)
        elif self._is_started and self._steps >= self._try_at:
            self._try_at *= 10
            build = warm_up(self._device)
            if build is not None:
                build.join(BUILD_SECONDS)
            if build is None or not build.is_alive():
                self._is_decided = True
                self._use()
