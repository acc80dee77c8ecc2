"""Groups of tensors that are measured together at every step, and the compiled CPU kernel that measures them.

Numba is optional. Importing it and compiling the kernel takes seconds, on a background thread. Until the kernel is
ready, or if numba is missing, torch operations compute the same statistics.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.statistics import torch_backend
from rankscope_exporter.statistics.kernel_arguments import COMPILED_EXTRA_SUMS, KernelArguments
from rankscope_exporter.statistics.table import Rows, StatisticsTable, contiguous_rows
from rankscope_exporter.statistics.tensor_access import PLAIN_TYPES, held, is_dense, is_freed

log = logging.getLogger(__name__)

_FORK_WAITS_SECONDS: Final = 10.0

_state_lock = threading.Lock()
_thread: threading.Thread | None = None
_kernel: Callable[..., None] | None = None
_seconds = 0.0


def kernel() -> Callable[..., None] | None:
    """Return the compiled kernel; None until it is compiled."""
    return _kernel


def backend_name(*, coming: bool = False) -> str:
    """Return the name of the present backend for CPU tensors, "numba" or "torch".

    If `coming` is true, return the name of the backend that is used once numba is imported and the kernel is compiled.
    """
    if _kernel is not None or (coming and importlib.util.find_spec("numba") is not None):
        return "numba"
    return "torch"


def warm_up() -> threading.Thread | None:
    """Start the import of numba and the compilation on a background thread, once per process, and return the thread.

    Return None if the kernel is ready or cannot be compiled.
    """
    global _thread  # noqa: PLW0603 - one kernel for the process, like the module that holds it
    with _state_lock:
        if _kernel is not None or importlib.util.find_spec("numba") is None:
            return None
        if _thread is None:
            _thread = OwnThread(target=_load, name="rankscope-warm-up")
            # In a child that is forked during an import, the import lock would be held for ever. An exit during a
            # compilation would free memory that the compiler uses.
            os.register_at_fork(before=_wait)
            atexit.register(_wait)
            _thread.start()
        return _thread


def warm_up_seconds() -> float:
    """Return the CPU seconds that importing numba and compiling took in this process."""
    return _seconds


def _wait() -> None:
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(_FORK_WAITS_SECONDS)


def _load() -> None:
    global _kernel, _seconds  # noqa: PLW0603 - see warm_up
    numba_log = logging.getLogger("numba")
    if numba_log.level == logging.NOTSET:  # with the root at DEBUG, every compiled line would be logged
        numba_log.setLevel(logging.WARNING)
    try:
        kernels = importlib.import_module("rankscope_exporter.statistics.numba_kernels")
        compiled = None
        with contextlib.suppress(RuntimeError, OSError, EOFError):  # no writable folder, or a broken file in it
            compiled = kernels.compile_measure(cache=True)
        _kernel = compiled or kernels.compile_measure(cache=False)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        log.warning("numba cannot be used (%s): tensor statistics are computed with torch operations", error)
    finally:
        _seconds = time.thread_time()


class MeasureGroup:
    """A fixed set of table entries that are measured together.

    Their tensors may differ, move or be absent at each step.

    If `compiled` is false, torch operations are used even if the compiled kernel is ready. The function `described` is
    called with the entry, the dtype and the shape of a tensor when the tensor is measured for the first time, and when
    its dtype or shape has changed.
    """

    def __init__(
        self,
        rows: Sequence[int],
        *,
        zero_below: float = 0.0,
        compiled: bool = True,
        described: Callable[[int, torch.dtype, tuple[int, ...]], None] | None = None,
    ) -> None:
        self.rows: Rows = contiguous_rows(rows)
        self._zero_below = zero_below
        self._compiled = compiled
        self._jobs = KernelArguments(self.rows, zero_below)
        self._described = described
        self._known: list[tuple[torch.dtype, torch.Size] | None] = [None] * len(self.rows)

    def measure(self, tensors: Sequence[torch.Tensor | None], table: StatisticsTable) -> None:
        """Compute the raw statistics of `tensors` and write them to the entries of the group in `table`.

        For a tensor that is absent, the entry is not changed.
        """
        if len(tensors) != len(self.rows):
            raise ValueError(f"{len(tensors)} tensors for {len(self.rows)} entries: pass None for an absent tensor")
        with torch.no_grad():
            local = [tensor if type(tensor) in PLAIN_TYPES else _local(tensor) for tensor in tensors]
            can_compile = self._compiled and table.device.type == "cpu" and table.extra_sums in COMPILED_EXTRA_SUMS
            compiled = table.kernel(kernel) if can_compile else None
            if compiled is None:
                self._with_torch(local, range(len(local)), table)
                self._describe(local)
                return
            local = [_gathered(tensor) for tensor in local]
            others = self._jobs.run(compiled, local, table)
            if others:
                self._with_torch(local, others, table)
            # An activation is measured alone. It may have another shape at the same address.
            if self._jobs.have_moved or len(local) == 1:
                self._describe(local)

    def _describe(self, tensors: Sequence[torch.Tensor | None]) -> None:
        if self._described is None:
            return
        for position, (known, tensor) in enumerate(zip(self._known, tensors, strict=True)):
            if tensor is None or (known is not None and known[0] is tensor.dtype and known[1] == tensor.shape):
                continue
            if not tensor.is_meta and not (tensor.layout is torch.strided and is_freed(tensor)):
                self._known[position] = tensor.dtype, tensor.shape
                self._described(self.rows[position], tensor.dtype, tuple(tensor.shape))

    def _with_torch(
        self, tensors: Sequence[torch.Tensor | None], positions: Sequence[int], table: StatisticsTable
    ) -> None:
        found = [(self.rows[position], item) for position in positions if (item := held(tensors[position])) is not None]
        rows = self.rows if len(found) == len(self.rows) else contiguous_rows([row for row, _ in found])
        torch_backend.measure([item for _, item in found], rows, table, zero_below=self._zero_below)


def measure(
    tensors: Sequence[torch.Tensor | None], rows: Sequence[int], table: StatisticsTable, *, zero_below: float = 0.0
) -> None:
    """Compute the raw statistics of tensors[i] and write them to entry rows[i] of `table`.

    The group of entries is cached for the next call with equal `rows`.
    """
    _group(rows if isinstance(rows, range) else tuple(rows), zero_below).measure(tensors, table)


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the local shard of a DTensor; return any other tensor unchanged."""
    if tensor is None or not hasattr(tensor, "to_local"):
        return tensor
    shard: torch.Tensor = tensor.to_local()
    return shard


def _gathered(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return `tensor`, or a contiguous copy of it if its elements do not fill their memory without gap or overlap.

    A copy and the compiled kernel together are faster than several torch operations.
    """
    if type(tensor) not in PLAIN_TYPES or tensor is None or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


@functools.lru_cache(maxsize=256)
def _group(rows: Rows, zero_below: float) -> MeasureGroup:
    return MeasureGroup(rows, zero_below=zero_below)
