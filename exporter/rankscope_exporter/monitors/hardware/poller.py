"""Thread that reads the state of the GPU, the process and the machine every few seconds.

Each reading is published as a separate record with its time and without a step, so no value is repeated at later steps.

Reads CPU, memory, page faults and disk I/O of this process and its machine.

The source is psutil if installed, otherwise /proc.
"""

from __future__ import annotations

import importlib
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from rankscope_exporter.monitors.hardware.gpu import Gpu, load_nvml, uuid_of
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.records.record import Scalar, StepRecord

_PROC: Final = Path("/proc")


State = Mapping[str, float]
"""State of the process and the machine at one time: the known values by the name of their metric.

In addition, it has the sums of the busy seconds, and of the busy and idle seconds, of all CPUs. They are not published,
but used to compute the CPU utilization.
"""

_BUSY: Final = "busy_seconds"
_ALL: Final = "all_seconds"


def host_scalars(before: State, now: State) -> Iterator[Scalar]:
    """Yield a metric for each value of the state `now`, and one for the CPU utilization of the machine.

    The utilization is that of the time between the earlier state `before` and the state `now`.
    """
    for name in now:
        if name not in (_BUSY, _ALL):
            yield Scalar(name, now[name], next((unit for unit in ("bytes", "seconds") if unit in name), None))
    passed = now[_ALL] - before[_ALL] if _ALL in now and _ALL in before else 0.0
    if passed > 0:
        yield Scalar("host_cpu_utilization", min(1.0, max(0.0, (now[_BUSY] - before[_BUSY]) / passed)), "ratio")


class Host:
    """Reads the state of this process and its machine. Only one thread may use it.

    A psutil function that fails, for example because a container hides a file of /proc, is reported once and skipped.
    """

    def __init__(self, report: Callable[[str, BaseException], None], psutil: Any = None) -> None:
        self._report = report
        self._reported: set[str] = set()
        self._psutil = psutil if psutil is not None else _installed()
        self._process = None if self._psutil is None else self._call("Process", self._psutil.Process)

    def state(self) -> State:
        return from_proc() if self._process is None else from_psutil(self._psutil, self._process, self._call)

    def _call(self, name: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - psutil raises its own errors, OSError, NotImplementedError and more
            if name not in self._reported:
                self._reported.add(name)
                self._report(f"psutil.{name}()", error)
            return None


def _installed() -> Any:
    try:
        return importlib.import_module("psutil")
    except Exception:  # noqa: BLE001 - not installed, or not for this system: /proc is read instead
        return None


def _of_process() -> dict[str, float]:
    """Return the values that every operating system has for a process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "process_cpu_seconds_total": usage.ru_utime + usage.ru_stime,
        "process_major_faults_total": float(usage.ru_majflt),
        "process_involuntary_switches_total": float(usage.ru_nivcsw),
    }


def from_psutil(psutil: Any, process: Any, call: Callable[[str, Callable[[], Any]], Any]) -> State:
    """Return the state of the process and the machine from psutil. Some operating systems lack some of the values.

    The function `call` calls its second argument, a function of psutil, and returns the result, or None after an error.
    Its first argument is the name of this function for the report of the error.
    """
    found = _of_process()
    if (threads := call("num_threads", process.num_threads)) is not None:
        found["process_threads"] = threads
    if hasattr(process, "io_counters") and (io := call("io_counters", process.io_counters)) is not None:
        found |= {"process_read_bytes_total": io.read_bytes, "process_written_bytes_total": io.write_bytes}
    if (memory := call("virtual_memory", psutil.virtual_memory)) is not None:
        found |= {"host_memory_available_bytes": memory.available, "host_memory_total_bytes": memory.total}
    if (swap := call("swap_memory", psutil.swap_memory)) is not None:
        found["host_swap_used_bytes"] = swap.used
    if (machine := call("cpu_times of the machine", psutil.cpu_times)) is not None:
        # The time of guests is already part of the user time.
        all_seconds = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
        found |= {_ALL: all_seconds, _BUSY: all_seconds - machine.idle - getattr(machine, "iowait", 0.0)}
    return {name: float(value) for name, value in found.items()}


def from_proc() -> State:
    """Return the state of the process and the machine from the files of /proc.

    On systems without /proc, such as macOS, only the CPU time, page faults and context switches are known.
    """
    memory, io, status = (_table(name) for name in ("meminfo", "self/io", "self/status"))
    swap = [memory[name] for name in ("SwapTotal", "SwapFree") if name in memory]
    ticks = _processor_ticks()
    found = {
        "process_threads": status.get("Threads"),
        "process_read_bytes_total": io.get("read_bytes"),
        "process_written_bytes_total": io.get("write_bytes"),
        "host_memory_available_bytes": memory.get("MemAvailable"),
        "host_memory_total_bytes": memory.get("MemTotal"),
        "host_swap_used_bytes": swap[0] - swap[1] if len(swap) == 2 else None,
        _BUSY: sum(ticks) - sum(ticks[3:5]) if ticks else None,
        _ALL: sum(ticks) if ticks else None,
    }
    return _of_process() | {name: value for name, value in found.items() if value is not None}


def _table(name: str) -> dict[str, float]:
    """Return the numbers of a file in /proc with lines `name: number` or `name: number kB`, in bytes, by name.

    The result is empty if the file cannot be read.
    """
    try:
        lines = (_PROC / name).read_text().splitlines()
    except OSError:
        return {}
    pairs = ((line.partition(":")[0], line.partition(":")[2].split()) for line in lines)
    return {
        key: float(words[0]) * (1024 if words[1:] == ["kB"] else 1)
        for key, words in pairs
        if words and words[0].isdigit()
    }


def _processor_ticks() -> list[float]:
    """Return the user, nice, system, idle, iowait, irq, softirq and steal time of all CPUs in clock ticks."""
    # The result is empty if the times are unknown.
    try:
        return [float(word) for word in (_PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, IndexError):
        return []


_STOP_SECONDS: Final = 2.0
"""Maximum seconds that the end of training waits for a reading of the hardware metrics that is in progress."""


@dataclass(eq=False)
class HardwarePoller:
    """Reads and publishes hardware metrics on one daemon thread, which runs from `start` to `stop`."""

    device: torch.device
    every_seconds: float
    hand_over: Callable[[StepRecord], None]
    boundary: ErrorBoundary
    nvml: Callable[[], Any] = field(default=load_nvml, kw_only=True)

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = OwnThread(target=self._run, name="rankscope-hardware", on_fault=self.boundary.report)

    @property
    def cpu_seconds(self) -> float:
        return self._thread.cpu_seconds

    def start(self) -> None:
        """Start the hardware thread. Does nothing if the interval between readings is 0."""
        if self.every_seconds > 0:
            self._thread.start()

    def stop(self) -> None:
        """End the hardware thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        gpu = self.boundary.call("opening the GPU", self._open)
        host = Host(self.boundary.report)
        before = self.boundary.call("reading the machine", host.state)
        while not self._stopped.wait(self.every_seconds):
            before = self.boundary.call("publishing the hardware", self._publish, gpu, host, before) or before
        if gpu is not None:
            self.boundary.call("closing the GPU", gpu.close)

    def _open(self) -> Gpu | None:
        uuid = uuid_of(self.device)
        nvml = None if uuid is None else self.nvml()
        return None if uuid is None or nvml is None else Gpu.open(nvml, uuid)

    def _publish(self, gpu: Gpu | None, host: Host, before: Any) -> Any:
        """Publish the current hardware metrics, and return the state of the machine.

        The caller passes this state as `before` to the next call, which derives the CPU utilization from it.

        GPU and machine are read independently: an error of one does not affect the other.
        """
        call, report = self.boundary.call, self.boundary.report
        events = [] if gpu is None else call("reading XIDs", gpu.xids, report) or []
        of_gpu = [] if gpu is None else call("reading the GPU", gpu.read, report) or []
        state = call("reading the machine", host.state)
        of_host = [] if before is None or state is None else list(host_scalars(before, state))
        scalars = [*of_host, *of_gpu]
        if scalars or events:
            self.hand_over(StepRecord.now(events=events, later=[lambda: scalars]))
        return state
