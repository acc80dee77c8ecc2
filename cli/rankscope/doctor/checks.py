"""Results of the checks of `rankscope doctor`, their text and JSON, and the access to the machine and the network."""

from __future__ import annotations

import enum
import importlib.metadata
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rankscope.access.service import ClientTls, Response, request
from rankscope.up.machine import Executable, executable_version, listeners
from rankscope_contract.model.redaction import MAX_DOCUMENT, redacted_text


class State(enum.StrEnum):
    """State of the result of one check: passed, needs attention, or failed."""

    OK = "OK"
    WARN = "WARN"  # works or is optional, but needs attention
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `remedy` is the recommended action; it is empty if none is needed."""

    area: str
    state: State
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        """Mask secrets: a text may contain an address or an answer."""
        object.__setattr__(self, "text", redacted_text(self.text, MAX_DOCUMENT))


def ok(area: str, text: str) -> CheckResult:
    """Return the result of a check that passed."""
    return CheckResult(area, State.OK, text)


def warn(area: str, text: str, remedy: str = "") -> CheckResult:
    """Return the result of a check that found something that needs attention."""
    return CheckResult(area, State.WARN, text, remedy)


def fail(area: str, text: str, remedy: str) -> CheckResult:
    """Return the result of a failed check: a part of the installation does not work."""
    return CheckResult(area, State.FAIL, text, remedy)


def is_healthy(results: Iterable[CheckResult]) -> bool:
    """Return True if no check failed. Checks with a warning do not count as failed."""
    return all(result.state is not State.FAIL for result in results)


def report_lines(results: Sequence[CheckResult]) -> Iterator[str]:
    """Yield the lines of the text report: the results grouped by area, then the summary."""
    area = ""
    for result in results:
        if result.area != area:
            yield from ([""] if area else [])
            yield result.area
            area = result.area
        first, *rest = result.text.splitlines() or [""]
        yield f"  {result.state:<4}  {first}"
        yield from (f"        {line}" for line in rest)
        if result.remedy:
            yield f"        -> {result.remedy}"
    yield ""
    yield summary(results)


def summary(results: Sequence[CheckResult]) -> str:
    """Return the summary line of the report, with the numbers of problems and warnings."""
    counts = {state: sum(result.state is state for result in results) for state in State}
    if not counts[State.FAIL] and not counts[State.WARN]:
        return "All checks passed."
    return f"Failed: {counts[State.FAIL]}. Warnings: {counts[State.WARN]}."


def as_json(results: Sequence[CheckResult]) -> str:
    """Return the report of `rankscope doctor` as JSON text."""
    document = {"healthy": is_healthy(results), "results": [asdict(result) for result in results]}
    return json.dumps(document, indent=2, ensure_ascii=False)


class Environment:
    """Everything that the checks of `rankscope doctor` read from the machine and the network. Tests replace it."""

    def __init__(self, client_tls: ClientTls | None = None) -> None:
        self._trust = client_tls

    def python(self) -> str:
        """Return the version of Python."""
        return platform.python_version()

    def installed_version(self, package: str) -> str | None:
        """Return the version of a Python package from its metadata, without importing the package.

        None if it is not installed.
        """
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def required_versions(self) -> Mapping[str, str]:
        """Return the lowest supported version of each required package, from the package metadata of Rankscope."""
        asked = importlib.metadata.requires("rankscope") or []
        pairs = (requirement.partition(";")[0].replace("==", ">=").partition(">=") for requirement in asked)
        return {name.strip().replace("_", "-"): least.strip() for name, sign, least in pairs if sign}

    def executable(self, executable: Executable) -> str | None:
        """Return the version that the executable prints, and its path; None if it is not on PATH."""
        path = executable.find()
        return None if path is None else f"{executable_version(path) or 'of unknown version'} ({path})"

    def get(self, url: str, token: str | None = None) -> Response:
        """Send GET `url` and return the response. Raises UnreachableError if no response was received."""
        return request(url, token=token, client_tls=self._trust)

    def free_bytes(self, path: Path) -> int:
        """Return the number of free bytes, measured at the nearest parent folder of `path` that exists."""
        return shutil.disk_usage(next(part for part in (path, *path.absolute().parents) if part.exists())).free

    def check_writable(self, folder: Path) -> None:
        """Create a temporary file without a name in `folder`; it disappears when it is closed.

        Raises OSError if no file can be created in `folder`.
        """
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")

    def listener(self, port: int) -> str | None:
        """Return the process that listens on the port; None if the port is free."""
        return listeners().get(port)

    def now(self) -> float:
        """Return the system time in seconds since the epoch."""
        return time.time()
