"""The report of a run after the end of its training, made by a child process of global rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rankscope_contract.reports.child import ReportJob, make_report
from rankscope_exporter.api.monitor import Monitor
from rankscope_exporter.process.threads import OwnThread
from rankscope_exporter.publishing.console import Console
from rankscope_exporter.serving.config import ServeConfig

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
