"""Gradients of single micro-batches, and this rank's own sum of them where the framework reduces each and keeps no sum.

A sum is as large as the gradients of all parameters that are measured. It exists from the first gradient of a sampled
step to the last, only while the loop accumulates, and only if the device has the memory. Sums have the type in which
the framework itself sums.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import torch

from rankscope_contract.model.kinds import Kind
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.parameter_names import local_tensor
from rankscope_exporter.quantities.base import Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.hook_handles import CallbackHandle, hook_gradient

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may take; 0 where nobody knows.

    On CUDA what the driver has left and what torch's allocator holds unused. On a host the least that the system or a
    control group has left, divided among the ranks of this host, who all take the same at the same time.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return 0
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return host_bytes() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)


def host_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return what is left of the host's memory, or of the control groups that this process is in."""
    return max(0, min([_available(proc / "meminfo"), *_left_in_groups(proc / "self/cgroup", groups)]))


def _available(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def _left_in_groups(membership: Path, groups: Path) -> Iterator[int]:
    """Yield what each group leaves, of the process's own up to the root; nothing of one without a limit."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == len(("id", "controllers", "path"))):
        if not controllers:
            yield from _left_along(groups, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _left_along(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _left_along(root: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents):
        try:
            yield int((root / group / limit).read_text()) - int((root / group / usage).read_text())
        except (OSError, ValueError):  # "max", or a group that is not mounted here
            continue


_SHARE: Final = 4
"""Unasked, no more is kept than this part of the memory that is free when a step begins."""

_KEPT, _ABSENT, _SPENT = "kept", "absent", "spent"
"""What is said, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsOptions(QuantityOptions):
    """Whether to keep a sum that the framework does not."""

    sum_micro_batches: bool | None = None
    """Keep this rank's own sum over micro-batches where each is reduced by itself: true always, false never, null where
    a quarter of the free memory holds it, once the loop is seen to accumulate so."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        if self.sum_micro_batches not in (None, True, False):
            raise ValueError(f"sum_micro_batches is true, false or null, not {self.sum_micro_batches!r}")


class MicroBatchSums:
    """The sums of one step, by position of the parameter."""

    def __init__(self, monitored: MonitoredModel, *, wanted: bool | None) -> None:
        self._monitored = monitored
        self._wanted = wanted
        self._is_known = False  # whether the loop was seen to accumulate what is reduced each time
        self._sums: dict[int, torch.Tensor] = {}
        self._hooked: set[int] = set()
        self._told: set[str] = set()
        self._hooking: Hooking | None = None
        self._gate: SamplingGate | None = None
        self.are_kept = False
        """Whether the step under way is summed up here."""

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Note how to hook, which is done once it is needed."""
        self._hooking, self._gate = hooking, gate
        hooking.keep(CallbackHandle(self.release))

    def on_step_begin(self) -> None:
        """Begin anew, if there is anything to sum up."""
        self.release()
        self.are_kept = self._is_needed() and self._fits()
        if self.are_kept:
            self._hook_parameters()

    def learn(self) -> None:
        """Note that a gradient came on top of one that is reduced already: later steps are summed up here."""
        self._is_known = True

    def release(self) -> None:
        """Let go of all sums."""
        self.are_kept = False
        self._sums.clear()

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the sums so far by position; None where no gradient came."""
        return [self._sums.get(index) for index in range(len(self._monitored.parameters))]

    def _is_needed(self) -> bool:
        each = self._monitored.framework.reduces_each_micro_batch
        if self._wanted is not None or self._hooking is None:
            return bool(self._wanted)
        return each is not False and bool(each or self._is_known)

    def _fits(self) -> bool:
        parameters = [item for item in self._monitored.tensors() if item is not None and item.requires_grad]
        if not parameters:
            return False
        size, free = sum(map(self._bytes_of, parameters)), free_bytes(parameters[0].device)
        if self._wanted or size * _SHARE <= free:
            self._tell(_KEPT, f"this rank's own are summed up apart, in {_text(size)} more memory at measured steps")
            return True
        self._tell(
            _ABSENT,
            "grad_unreduced is absent where micro-batches are reduced one by one: their sum would take "
            f"{_text(size)} of {_text(free)} that are free; sum_micro_batches = true keeps it, and micro_gradients "
            "need none",
        )
        return False

    def _bytes_of(self, parameter: torch.nn.Parameter) -> int:
        form = self._monitored.framework.local_spec(parameter)
        shape = local_tensor(parameter).shape if form is None else form.shape
        return math.prod(shape) * self._dtype_of(parameter).itemsize

    def _dtype_of(self, parameter: torch.nn.Parameter) -> torch.dtype:
        return self._monitored.framework.reduced_spec(parameter).dtype

    def _hook_parameters(self) -> None:
        assert self._hooking is not None
        assert self._gate is not None
        for index, parameter in enumerate(self._monitored.tensors()):
            if parameter is not None and parameter.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                add = functools.partial(self._add, index, self._dtype_of(parameter))
                hook = self._hooking.guarded("a gradient to be summed up", add, self._gate)
                hook_gradient(self._hooking, self._monitored, index, hook)

    def _add(self, index: int, dtype: torch.dtype, gradient: torch.Tensor) -> None:
        if self._hooking is not None:
            self._hooking.gradient_arrives()
        if not self.are_kept:
            return
        own, earlier = local_tensor(gradient).detach(), self._sums.get(index)
        try:
            if earlier is None:
                self._sums[index] = own.to(dtype, copy=True)
            elif earlier.is_sparse and not own.is_sparse:
                self._sums[index] = own.to(dtype) + earlier
            else:
                earlier.add_(own)
        except torch.OutOfMemoryError:  # training may still have enough: it gets back what was taken
            self.release()
            self._wanted = False
            self._tell(
                _SPENT, "memory did not suffice for a sum of micro-batches: grad_unreduced is absent from now on"
            )

    def _tell(self, about: str, sentence: str) -> None:
        if self._hooking is not None and about not in self._told:
            self._told.add(about)
            self._hooking.tell(f"gradients: {sentence}")


def _text(size: int) -> str:
    place = min(len(_UNITS) - 1, max(0, size.bit_length() - 1) // 10)
    return f"{size / 1024**place:.3g} {_UNITS[place]}"


_UNITS: Final = ("bytes", "KiB", "MiB", "GiB")


class MicroGradients(Quantity):
    """`grad_unreduced` with a `micro_step`: what one backward pass adds to `.grad`, before anything is reduced.

    Read in a hook on the parameter, which sees the gradient before it is accumulated: with bucket views too. Where a
    framework runs several micro-batches at once, the n-th gradient that a parameter gets in a step is micro-batch n.
    """

    name: ClassVar[str] = "micro_gradients"

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._interleaved = monitored.framework.interleaves_micro_batches
        self._rows: dict[tuple[int, int], range | None] = {}
        self._passes = [0] * len(self.monitored.parameters)
        self._hooked: set[int] = set()
        self._hooking: Hooking | None = None
        self._gate: SamplingGate | None = None

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Hook every parameter that takes gradients."""
        self._hooking, self._gate = hooking, gate
        self._hook_parameters(hooking, gate)

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Count from the first micro-batch; a parameter may have been thawed since."""
        self._passes = [0] * len(self.monitored.parameters)
        if self._hooking is not None and self._gate is not None:
            self._hook_parameters(self._hooking, self._gate)

    def _hook_parameters(self, hooking: Hooking, gate: SamplingGate) -> None:
        for index, parameter in enumerate(self.monitored.tensors()):
            if parameter is not None and parameter.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                read = functools.partial(self._read, index)
                hook = hooking.guarded("a micro-batch's gradient", read, gate)
                hook_gradient(hooking, self.monitored, index, hook)

    def _read(self, index: int, gradient: torch.Tensor) -> None:
        assert self._hooking is not None
        assert self._gate is not None  # both are set before any hook exists
        self._hooking.gradient_arrives()
        if not self._gate.is_open:
            return
        micro_step = self._passes[index] if self._interleaved else self._hooking.micro_step
        self._passes[index] += 1
        table = self._gate.table
        key = index, micro_step
        if key not in self._rows:
            entry = self.parameter_entry(Kind.GRAD_UNREDUCED, index, local=True, micro_step=micro_step)
            self._rows[key] = table.add([entry], [self.monitored.owners()[index]])
        rows = self._rows[key]
        if rows is not None:
            table.measure([gradient], rows)
