"""The input and results of the checks of `rankscope doctor`: addresses, the machine and the network, and the report.

The first available address is used, in this order: a command-line option; for the service, `listen` in the file given
with --config; the address that `rankscope up` saved; the default port on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rankscope.access.service import ClientTls, Response, environment_tls, request, service_address, service_tls
from rankscope.up.machine import DEFAULT_PORTS, Executable, StateDir, executable_version, listeners
from rankscope.up.plan import TOKEN_FILE
from rankscope_contract.model.redaction import MAX_DOCUMENT, redacted_text

if TYPE_CHECKING:
    from rankscope_ingest.base.config import ServiceConfig


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


def as_json_text(results: Sequence[CheckResult]) -> str:
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
        """Return the number of free bytes, measured at the nearest parent folder of `path` that can be found."""
        parts = (path, *path.absolute().parents)
        found = next(part for part in parts if os.path.exists(part))  # noqa: PTH110 - no error below a closed folder
        return shutil.disk_usage(found).free

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Addresses that `rankscope doctor` checks, and the token and TLS settings for the service.

    The addresses are those of the service, Prometheus, Alertmanager and the store.
    """

    service: str
    prometheus: str
    alertmanager: str
    store: str
    token: str | None = None
    client_tls: ClientTls | None = None

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Return the program name and port of each configured address that is on this machine."""
        named = {"service": self.service, "prometheus": self.prometheus, "alertmanager": self.alertmanager}
        return [(name, port) for name, url in named.items() if (port := _local_port(url))]


def find_endpoints(
    settings: ServiceConfig, state: Path | None, *, given: Mapping[str, str], is_explicit: bool
) -> Endpoints:
    """Return the addresses that `rankscope doctor` checks.

    The first available address of a program is used: its command-line option (`given`); for the service, `listen` in
    the file given with --config; the address that `rankscope up` saved; the default port on 127.0.0.1.
    The token that `rankscope up` saved is used only for the service address that `rankscope up` saved.
    """
    folder = StateDir(state) if state else StateDir.next_to(settings.store.path)
    saved = folder.load_notes().get("urls", {})
    default = {name: f"http://127.0.0.1:{port}" for name, port in DEFAULT_PORTS.items()}
    configured = service_address(settings)
    if is_explicit and configured:
        saved["service"] = configured
    urls = {**default, **saved, **given}
    is_ours = "service" in saved and "service" not in given and not is_explicit
    return Endpoints(
        **urls,
        store=settings.store.path,
        token=settings.token or (_token_of(folder) if is_ours else None),
        client_tls=service_tls(settings) or environment_tls(),
    )


def _token_of(folder: StateDir) -> str | None:
    """Return the token in the state folder of `rankscope up`, which only the owner can read; None without a token."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return folder.config(TOKEN_FILE).read_text(encoding="utf-8").strip() or None
    return None


def _local_port(url: str) -> int | None:
    with contextlib.suppress(ValueError):  # the check of the program reports a wrong address
        parts = urlsplit(url)
        return parts.port if parts.hostname in {"127.0.0.1", "::1", "localhost"} else None
    return None
