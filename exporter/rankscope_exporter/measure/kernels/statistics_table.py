"""The raw statistics of one step on a device, and their asynchronous copy to the host.

Sums are float64 and counts int64. Both are in one buffer, so a step needs one copy. An entry is absent until it is
measured.
"""

from __future__ import annotations

import array
import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rankscope_contract.model.kinds import COUNT_OPS, OPS, VALUE_OPS
from rankscope_exporter.measure.kernels.c_kernel import CKernel
from rankscope_exporter.records.plan import Finished
from rankscope_exporter.records.record import Transfer

SUMS: Final = ("sum_of_squares", "min", "max", "sum")  # float64, over finite elements
ROWS: Final = len(SUMS) + len(COUNT_OPS)
NUMEL_ROW: Final = len(SUMS) + COUNT_OPS.index("numel")
ABSENT: Final = -1  # in place of numel
MEASURED: Final = frozenset({*SUMS, *COUNT_OPS, "finite"})
"""Sums and counts that every statistics table has.

Other ops need more sums, which `StatisticsTable.accumulate` adds.
"""

Rows = range | tuple[int, ...]
DeviceKernel = Callable[..., None]
"""Measures the tensors of `DeviceJobs`: see `triton_kernels.measure_jobs`."""
Kernel = CKernel | DeviceKernel


class StatisticsTable:
    """The raw sums of `size` entries on one device, in memory that is allocated in advance.

    One thread writes to the table, in the order of one stream. The table can grow for entries that are added later, and
    keeps the entries that are already measured.
    """

    def __init__(self, size: int, device: torch.device, *, zero_below: float = 0.0, compiled: bool = True) -> None:
        self.size = size
        self.zero_below = zero_below
        """Magnitude below which a number counts as zero. With 0, only zeros do."""
        self.extra_sums: tuple[str, ...] = ()
        self.free_host_buffers: collections.deque[torch.Tensor] = collections.deque()
        """Buffers that no copy uses. They are in pinned memory if the device can copy to it asynchronously."""
        self.may_compile = compiled
        """True if the compiled kernel measures once it is ready."""
        self.kernel: Kernel | None = None
        """The compiled kernel that measures the tensors of this step; None if torch operations measure them."""
        self.is_decided = False
        """True if `kernel` is valid."""
        self.arguments = array.array("q", bytes(4 * 8))
        """Address and columns of the buffer, and address and number of the functions for `extra_sums` (kernel.c)."""
        buffer = _new_buffer(self, device)
        self.device = buffer.device  # with an index, like the devices of tensors
        self.clear(buffer)

    def clear(self, buffer: torch.Tensor | None = None) -> None:
        """Make every entry of the table absent. If `buffer` is given, the table uses it from now on."""
        if buffer is not None:
            self._use(buffer)
        # Only `numel` is reset: the other numbers of an absent entry are never read.
        self.numbers[NUMEL_ROW] = ABSENT
        self.is_decided = isinstance(self.kernel, CKernel)

    def _use(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        # Operations of numpy on few numbers take a quarter of the time of those of torch.
        self.numbers: Any = buffer.numpy() if buffer.is_cpu else buffer
        self.arguments[0], self.arguments[1] = buffer.data_ptr(), self.size

    def decide(self, ready: Callable[[torch.device, tuple[str, ...]], Kernel | None]) -> Kernel | None:
        """Determine the kernel of this step by a call of `ready`, and return it.

        The kernel and torch operations round differently, but equal tensors must have bit-identical sums within a step.
        """
        self.kernel = ready(self.device, self.extra_sums) if self.may_compile else None
        if isinstance(self.kernel, CKernel):
            extras = self.kernel.extra_sums(self.extra_sums)
            assert extras is not None
            self.arguments[2], self.arguments[3] = extras.buffer_info()
        self.is_decided = True
        return self.kernel

    def use_compiled(self) -> None:
        """Measure with the compiled kernel from the present step on."""
        self.may_compile = True

    def grow(self, size: int) -> None:
        """Extend the table to at least `size` entries.

        The capacity is doubled, so that adding entries one by one is fast.
        """
        if size > self.size:
            self.size = max(size, 2 * self.size, _LEAST_GROWN)
            self._extend()

    def accumulate(self, ops: Iterable[str]) -> None:
        """Add the rows that `ops` need; entries measured before have NaN there in the current step."""
        self.add_sums({name for op in ops if op in OPS for name in OPS[op].accumulators} - MEASURED)

    def add_sums(self, names: Iterable[str]) -> None:
        """Add rows for the optional sums `names` that the table does not have yet."""
        if missing := tuple(sorted({*names} - {*self.extra_sums})):
            self.extra_sums += missing
            self.is_decided = False  # the kernel may not have these sums
            self._extend()

    def _extend(self) -> None:
        old = self.buffer
        with torch.no_grad():
            self._use(_new_buffer(self, self.device))
            self.numbers[NUMEL_ROW] = ABSENT
            self.extras.fill_(math.nan)
            self.buffer[: len(old), : old.shape[1]].copy_(old)

    def forget(self, rows: Rows) -> None:
        self.numbers[NUMEL_ROW, self._place(rows)] = ABSENT

    def forget_equal(self, rows: Rows, others: Rows) -> None:
        """Make each entry of `rows` absent that equals that of `others` at its place. Never waits for the device."""
        place = self._place(rows)
        own = self.numbers[:, place]
        is_equal = (own == self.numbers[:, self._place(others)]).all(0)
        self.numbers[NUMEL_ROW, place] = own[NUMEL_ROW] * ~is_equal + ABSENT * is_equal

    def copy(self, source: Rows, target: Rows) -> None:
        """Copy the statistics of the entries `source` to the entries `target`, which become absent if `source` is.

        Used if tensors are known to be equal: with one rank, for example, reduced and unreduced gradients are equal.
        """
        self.numbers[:, self._place(target)] = self.numbers[:, self._place(source)]

    def restore(self, saved: torch.Tensor, rows: Rows) -> None:
        """Write the entries `rows` of `saved`, an earlier copy of the buffer, to the table again."""
        place = self._place(rows)
        self.buffer[: len(saved), place] = saved[:, place]

    def _place(self, rows: Rows) -> Any:
        if isinstance(rows, range):
            return slice(rows.start, rows.stop)
        return rows if self.buffer.is_cpu else on_device(rows, self.device)

    @property
    def sums(self) -> torch.Tensor:
        """Return the float64 part of the table, [len(SUMS), size]: one row per sum, in the order of SUMS."""
        return self.buffer[: len(SUMS)].view(torch.float64)

    @property
    def counts(self) -> torch.Tensor:
        """Return the int64 part of the table, [len(COUNT_OPS), size]: one row per count, in the order of COUNT_OPS."""
        return self.buffer[len(SUMS) : ROWS]

    @property
    def extras(self) -> torch.Tensor:
        """Return the float64 rows of the optional sums [len(extra_sums), size]."""
        return self.buffer[ROWS:].view(torch.float64)

    def write(self, rows: Rows, columns: torch.Tensor) -> None:
        """Store the bits of sums and counts, int64 [rows of the table, n], at the n entries `rows`."""
        self.buffer[:, self._place(rows)] = columns

    def look(self, used: int, ops: Sequence[str] = VALUE_OPS) -> Finished:
        """Return the statistics `ops` of the first `used` entries, without clearing the table. Waits for the device."""
        return _finished(self.buffer.cpu().numpy(), used, self.extra_sums, ops)


def _new_buffer(table: StatisticsTable, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    rows = ROWS + len(table.extra_sums)
    with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
        return torch.zeros(rows, table.size, dtype=torch.int64, device=device, pin_memory=pinned)


_HOST_BUFFERS_KEPT: Final = 4
_LEAST_GROWN: Final = 64


def contiguous_rows(rows: Sequence[int]) -> Rows:
    """Return the row numbers `rows` as a range if they are consecutive, otherwise as a tuple."""
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return range(rows[0], rows[0] + len(rows))
    return tuple(rows)


def on_device(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return `numbers` as int64 without a wait: a copy from pageable memory would wait for all queued work."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever default device a script has set
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def queued_event(device: torch.device) -> torch.cuda.Event:
    """Return an event queued in the current CUDA stream. A waiting thread sleeps; CUDA's default occupies a core."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record(torch.cuda.current_stream(device))
    return event


def copied_to_host(tensor: torch.Tensor) -> Transfer:
    """Start to copy `tensor` to the host.

    Never waits for the device. Afterwards `tensor` may be changed in place.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return Transfer(tensor.clone())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return Transfer(host, queued_event(tensor.device))


class HostCopy:
    """An asynchronous copy of the table of one step to the host. Creating it clears the table for the next step.

    `used` is the number of entries to copy, from the first on; None means all entries.
    """

    __slots__ = ("_event", "buffer", "extra_sums", "table", "used")

    def __init__(self, table: StatisticsTable, used: int | None = None) -> None:
        self.table = table
        self.used = table.size if used is None else used
        free = table.free_host_buffers
        while free and free[0].shape != table.buffer.shape:  # the table has grown since
            free.popleft()
        # If all are in use, the publisher is behind.
        is_pinned = table.device.type == "cuda"
        buffer = free.popleft() if free else _new_buffer(table, torch.device("cpu"), pinned=is_pinned)
        self.extra_sums = table.extra_sums
        self._event: torch.cuda.Event | None = None
        if table.device.type == "cpu":
            self.buffer = table.buffer  # exchanged, not copied
            table.clear(buffer)
            return
        self.buffer = buffer.copy_(table.buffer, non_blocking=is_pinned)
        if is_pinned:  # other accelerators block, since their events are not tested
            self._event = queued_event(table.device)
        table.clear()  # behind the copy on the same stream

    def finish(self, ops: Sequence[str] = VALUE_OPS) -> Finished:
        """Wait for the copy, return its statistics, and free the host buffer. Called once, on the publisher thread."""
        if self._event is not None:
            self._event.synchronize()
        finished = _finished(self.buffer.numpy(), self.used, self.extra_sums, ops)
        free = self.table.free_host_buffers
        if len(free) < _HOST_BUFFERS_KEPT:
            free.append(self.buffer)
        return finished


def _finished(
    buffer: npt.NDArray[np.int64], used: int, extra_sums: Sequence[str], ops: Sequence[str] = VALUE_OPS
) -> Finished:
    """Return the statistics of the first `used` entries in `buffer`. The result does not share memory with `buffer`.

    A value is NaN if its op is not in `ops`, or if the buffer does not have the accumulators for the op.
    """
    counts = buffer[len(SUMS) : ROWS, :used].copy()
    total: dict[str, npt.NDArray[Any]] = dict(zip(SUMS, buffer[: len(SUMS)].view(np.float64)[:, :used], strict=True))
    total |= zip(extra_sums, buffer[ROWS:].view(np.float64)[:, :used], strict=True)
    total |= zip(COUNT_OPS, counts, strict=True)
    present = total["numel"] >= 0
    counts[:, ~present] = 0
    finite = total["finite"] = total["numel"] - total["nans"] - total["infs"]
    values = np.full((len(VALUE_OPS), used), np.nan, np.float32)
    # Absent entries hold arbitrary numbers, and a norm beyond float32 is Inf.
    with np.errstate(all="ignore"):
        for row, name in enumerate(VALUE_OPS):
            if name in ops and total.keys() >= set(OPS[name].accumulators):
                values[row] = OPS[name].finish(total)
    values[:, finite <= 0] = np.nan
    return Finished(values, counts, present)
