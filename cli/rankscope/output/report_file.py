"""Make a report from a store, or get it from a service, and write its file."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rankscope.access.service import UnreachableError, environment_tls, environment_token, request
from rankscope.output.run_texts import lines_of
from rankscope.shell.errors import USAGE, CommandError, command_errors
from rankscope.shell.options import output_file
from rankscope_contract.wire.escaping import file_name
from rankscope_storage.base.escaping import path_segment

if TYPE_CHECKING:
    from rankscope_storage.connection import Connection

SERVICE_SECONDS: Final = 60.0
"""Longest time in seconds that a service may take for a report."""

_SUMMARY: Final = re.compile(r'<script type="application/json" id="summary">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A report as HTML, which contains the sections of the summary as JSON."""

    html: str

    @property
    def summary(self) -> str:
        """Return the summary of the run as text."""
        found = _SUMMARY.search(self.html)
        title, sections = json.loads(found[1]) if found else ("", [])
        return "\n".join([*lines_of(title, sections), ""])

    def write(self, path: Path | None, run: str) -> Path:
        """Write the file, by default in the working directory, and return its path, as given. Raises CommandError."""
        path = path or Path(f"{file_name(run)}.html")
        with output_file(path) as file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.html.encode("utf-8", "replace"))
        return path


def make_report(connection: Connection, run: str, source: str) -> ReportFile:
    """Return the report of a run of a store. Raises CommandError if the store has no rows of the run."""
    from rankscope_view.report import report

    found = report(connection, run, made_at=time.time(), source=source)
    if found is None:
        raise CommandError(f"{run} has no rows in the store")
    return ReportFile(found)


def fetch_report(url: str, run: str) -> ReportFile:
    """Return the report of a run that the service at `url` makes. Raises CommandError."""
    dots = run in {".", ".."}  # a segment of this name would be removed from the address
    segment, query = ("-", f"?run={run}") if dots else (path_segment(run), "")
    address = f"{url.rstrip('/')}/runs/{segment}/report{query}"
    token, tls = environment_token(), environment_tls()
    with command_errors(UnreachableError):
        answer = request(address, token=token, timeout_seconds=SERVICE_SECONDS, client_tls=tls)
    if answer.status == 404:
        raise CommandError(f"the service at {url} has no run {run!r}", code=USAGE)
    if answer.status != 200:
        raise CommandError(f"{address}: status {answer.status}")
    return ReportFile(answer.body.decode("utf-8", "replace"))
