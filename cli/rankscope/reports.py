"""Reports for scripts and notebooks: `rankscope.report` after a training, and `rankscope.open_run` for a reader."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope_exporter.process.report_child import LIMIT_SECONDS, ReportJob
from rankscope_exporter.process.report_child import make_report as make_in_child

if TYPE_CHECKING:
    from rankscope_exporter import Monitor
    from rankscope_storage.base.location import Location
    from rankscope_view.data.series import History
    from rankscope_view.data.summary import Summary


def report(
    source: Monitor | str | Path,
    run: str | None = None,
    *,
    output: str | Path | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Path | None:
    """Print the summary of a run and write its report at the end of a training script; return the path of the file.

    `source` is a monitor that has ended, a store, a folder with records of ranks, a log, or the URL of a service. `run`
    is the name of the run; by default, the run of the monitor or the newest one. The default path is a file in the
    folder `rankscope-reports`.

    A child process does the work, so that this process never loads the store, and is killed after `limit_seconds`. If
    it fails, or if the extras `cli` and `store` are not installed, the command is printed and the result is None. With
    a monitor, only global rank 0 makes the report.
    """
    path = None if output is None else Path(output)
    if isinstance(source, str | Path):
        job: ReportJob | None = ReportJob(source=str(source), run=run, output=path)
    else:
        from rankscope_exporter.integrations.callback_base import report_job

        job = report_job(source, path, print)
    return None if job is None else make_in_child(job, print, limit_seconds=limit_seconds)


class OpenedRun:
    """One run of a store, for notebooks, which show it as text, curve and table. Each call reads the newest data."""

    def __init__(self, store: Location, run: str) -> None:
        self.store = store
        self.run = run

    def summary(self) -> Summary:
        """Return progress, losses, parameters, times, speed and hints of the run."""
        from rankscope.access.stores import open_store
        from rankscope_view.data.summary import read_summary

        with open_store(self.store) as connection:
            found = read_summary(connection, self.run)
        if found is None:
            raise LookupError(f"{self.store} has no rows of the run {self.run!r}")
        return found

    def curve(self, name: str = "loss") -> History:
        """Return all rows of a scalar as arrays, one element per attempt and step."""
        from rankscope.access.stores import open_store
        from rankscope_view.data.detail import read_chart

        with open_store(self.store) as connection:
            return read_chart(connection, self.run, name)

    def report(self, output: str | Path | None = None) -> Path:
        """Write the report of the run as an HTML file, and return its path."""
        from rankscope.access.stores import open_store
        from rankscope.output.report_file import make_report

        with open_store(self.store) as connection:
            made = make_report(connection, self.run, str(self.store))
        return made.write(None if output is None else Path(output), self.run)

    def __repr__(self) -> str:
        return f"OpenedRun(store={str(self.store)!r}, run={self.run!r})"

    def _repr_html_(self) -> str:
        from rankscope.access.stores import open_store
        from rankscope_view.report import fragment, read_content

        with open_store(self.store) as connection:
            content = read_content(connection, self.run, made_at=time.time(), source=str(self.store))
        return repr(self) if content is None else fragment(content)


def open_run(store: str | Location = "history", run: str | None = None) -> OpenedRun:
    """Return the run `run` of a store or of a folder with records of ranks; by default, the newest one.

    Raises CommandError if there is no such store or run. Its message names the nearest name.
    """
    from rankscope.access.stores import open_store, resolve_run
    from rankscope_storage.base.location import located

    folder = located(store)
    with open_store(folder) as connection:
        return OpenedRun(folder, resolve_run(connection, run))
