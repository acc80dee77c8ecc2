"""Start the report of a run in a child process after the end of its training, on global rank 0 only."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

from rankscope_contract.reports.child import ReportJob, make_report
from rankscope_exporter.api.monitor import Monitor
from rankscope_exporter.publishing.console import Console
from rankscope_exporter.serving.config import ServeConfig

ReportChoice = bool | str | Path
"""Path of a report, True for the default path, or False for no report."""

Make = Callable[[ReportJob, Callable[[str], object]], object]


def start_report(monitor: Monitor, choice: ReportChoice, make: Make = make_report) -> threading.Thread | None:
    """Start the report of the run of `monitor`, which has ended. Return the thread that waits for it.

    Other ranks do nothing. The interpreter waits for this thread at its exit, at most 60 s, and its exit code does not
    depend on it. If the service has not confirmed all records, only the command is printed.
    """
    ended = monitor.ended
    if ended is None or ended.rank != 0 or ended.source is None:
        return None
    say = Console(ended.rank, enabled=monitor.config.console).line
    output = None if choice is True else Path(str(choice)).absolute()
    job = ReportJob(source=ended.source, run=ended.run, output=output, environment=_access(monitor.config.serve))
    if not ended.is_stored:
        say(f"the service has not confirmed all records of this run; to make its report later: {job.command}")
        return None
    waiter = threading.Thread(target=functools.partial(make, job, say), name="rankscope-report", daemon=False)
    waiter.start()
    return waiter


def _access(serve: ServeConfig) -> dict[str, str]:
    """Return the variables with which a command reaches the service as this rank does."""
    values = {"TOKEN": serve.secret, "CA_FILE": serve.ca_file, "CERT_FILE": serve.cert_file, "KEY_FILE": serve.key_file}
    return {f"RANKSCOPE_{name}": value for name, value in values.items() if value}
