"""Base class of the callbacks for trainers. It holds the monitor of the present training and its present phase.

The report of a run after the end of its training, made by a child process of global rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rankscope_contract.model.events import ExitReason
from rankscope_exporter.adapters import Framework
from rankscope_exporter.api.attachment import Optimizers
from rankscope_exporter.api.monitor import Monitor
from rankscope_exporter.config.monitor_config import Given, MonitorConfig
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.inert import CopiesDoNothing
from rankscope_exporter.process.report_child import ReportJob, make_report
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.publish.console import Console
from rankscope_exporter.publish.serving_config import ServeConfig

ReportChoice = bool | str | Path
"""Path of a report, True for the default path, or False for no report."""

Say = Callable[[str], object]


def start_report(
    monitor: Monitor, choice: ReportChoice, make: Callable[[ReportJob, Say], object] = make_report
) -> OwnThread | None:
    """Start the report of the run of `monitor`, which has ended. Return the thread that waits for it; None without one.

    The interpreter waits for this thread at its exit, at most 60 s, and its exit code does not depend on it.
    """
    say = Console(0, enabled=monitor.config.console).line
    job = report_job(monitor, None if choice is True else Path(str(choice)), say)
    if job is None:
        return None
    waiter = OwnThread(target=make, args=(job, say), name="rankscope-report", daemon=False)
    waiter.start()
    return waiter


def report_job(monitor: Monitor, output: Path | None, say: Say) -> ReportJob | None:
    """Return the report to make for the run of `monitor`; None on other ranks than 0, and if no file has its records.

    If the service has not confirmed all records of this rank, `say` receives the command, and the result is None.
    """
    ended = monitor.ended
    if ended is None or ended.rank != 0 or ended.source is None:
        return None
    job = ReportJob(source=ended.source, run=ended.run, output=output, environment=_access(monitor.config.serve))
    if ended.is_stored:
        return job
    say(f"the service has not confirmed all records of this run; to make its report later: {job.command}")
    return None


def _access(serve: ServeConfig) -> dict[str, str]:
    """Return the variables with which a command reaches the service as this rank does."""
    values = {"TOKEN": serve.secret, "CA_FILE": serve.ca_file, "CERT_FILE": serve.cert_file, "KEY_FILE": serve.key_file}
    return {f"RANKSCOPE_{name}": value for name, value in values.items() if value}


class CallbackBase(CopiesDoNothing):
    """Holds the monitor of the present training, for a callback of a trainer.

    Before and after a training, the methods of this class have no effect.

    No error after the constructor is raised into training.
    """

    def __init__(self, config: Given = None, *, report: ReportChoice = True) -> None:
        """Check the configuration `config`, as Monitor does. Raises ConfigError.

        After the training, rank 0 makes a report of the run in a child process: `report` is its path, True for a file
        in the folder `rankscope-reports`, or False for none.
        """
        self.config = Monitor(config).config
        self._report = report
        self.boundary = ErrorBoundary()
        self.monitor: Monitor | None = None
        self._phase = ExitStack()
        self._phase_name: str | None = None

    def _unattached(self) -> dict[str, Any]:
        return {"boundary": ErrorBoundary(), "monitor": None, "_phase": ExitStack(), "_phase_name": None}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "config": self.config.without_secrets()}

    def begin(
        self,
        model: torch.nn.Module | Framework,
        optimizer: Optimizers,
        *,
        first_step: int,
        total_steps: int | None,
        config: MonitorConfig | None = None,
        hyperparameters: Callable[[], Mapping[str, Any]] = dict,
    ) -> Monitor:
        """Create a monitor for a new training, attach and return it; an open training ends with the reason `unknown`.

        `hyperparameters` returns those of the trainer, stored with the run. Those in the configuration have precedence,
        and are stored alone if the function raises an error.
        """
        self.leave_phase()
        if self.monitor is not None:
            self.monitor.end_of_process(ExitReason.UNKNOWN, "another training began in this process")
        config = config or self.config
        found = self.boundary.call("hyper-parameters", hyperparameters) or {}
        config = replace(config, hyperparameters={**found, **config.hyperparameters})
        self.monitor = Monitor(config, total_steps=total_steps or None, first_step=first_step)
        return self.monitor.attach(model, optimizer)

    def end(self, error: BaseException | None = None) -> None:
        """Record the end of the training and detach the monitor.

        If `error` is not None, it is recorded as the error that ended the training.
        """
        self.leave_phase()
        monitor, self.monitor = self.monitor, None
        if monitor is None:
            return
        monitor.__exit__(type(error) if error is not None else None, error, None)
        if error is None and self._report is not False:
            self.boundary.call("report", start_report, monitor, self._report)

    def log_numbers(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Log those entries of `values` that are numbers, for step number `step`. Lightning replaces the name `log`."""
        if self.monitor is not None:
            numbers = {name: value for name, value in values.items() if name != "step" and _is_number(value)}
            self.monitor.log(step=step, **numbers)

    def enter_phase(self, name: str) -> None:
        """End the present phase, if there is one, and begin the phase `name`.

        This has no effect if `name` is the present phase.
        """
        if self.monitor is None or self._phase_name == name:
            return
        self.leave_phase()
        self._phase_name = name
        self._phase.enter_context(self.monitor.phase(name))

    def leave_phase(self) -> None:
        """End the present phase, if there is one."""
        self._phase_name = None
        self._phase.close()


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, str))
