"""Find the addresses of the service, Prometheus and Alertmanager for `rankscope doctor`, and check this machine.

The checks of the machine concern the versions of Python and packages, executables, and the processes that listen on the
ports.

The first available address is used, in this order: a command-line option; for the service, `listen` in the file given
with --config; the address that `rankscope up` saved; the default port on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from rankscope.access.service import ClientTls, environment_tls, service_address, service_tls
from rankscope.doctor.checks import CheckResult, Environment, fail, ok, warn
from rankscope.up.machine import ALERTMANAGER, DEFAULT_PORTS, PROMETHEUS, StateDir
from rankscope.up.programs import TOKEN_FILE

AREA: Final = "This machine"
PORTS: Final = "Ports"

OLDEST_PYTHON: Final = (3, 11)
_WHERE: Final = {
    "pyarrow": ("everywhere", "run pip install . in a checkout of Rankscope"),
    "prometheus-client": ("everywhere", "run pip install . in a checkout of Rankscope"),
    "torch": ("where training runs", "install the build of torch for this machine; Rankscope never replaces torch"),
    "deltalake": ("where the store is read or written", "run pip install '.[store]' in a checkout of Rankscope"),
    "duckdb": ("where the store is read or written", "run pip install '.[store]' in a checkout of Rankscope"),
    "aiohttp": ("where the service runs", "run pip install '.[service]' in a checkout of Rankscope"),
}


def machine(environment: Environment) -> Iterator[CheckResult]:
    """Yield the results of the checks of package versions and executables."""
    python = environment.python()
    if numbers(python) < OLDEST_PYTHON:
        yield fail(AREA, f"Python {python}", "use Python 3.11 or newer")
    else:
        yield ok(AREA, f"Python {python}")
    required_versions = environment.required_versions()
    for package, (where, remedy) in _WHERE.items():
        yield _package(
            package, environment.installed_version(package), required_versions.get(package, "0"), where, remedy
        )
    for executable in (PROMETHEUS, ALERTMANAGER):
        found = environment.executable(executable)
        yield ok(AREA, f"{executable.title} {found}") if found else warn(AREA, *executable.remedy.split(": ", 1))


def ports(environment: Environment, named: Iterable[tuple[str, int]]) -> Iterator[CheckResult]:
    """Yield a result for each port in `named`, which names the process that listens on the port."""
    for what, port in named:
        listener = environment.listener(port)
        yield ok(PORTS, f"{port} ({what}): {listener or 'free'}")


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version text as a tuple for comparisons; empty if there are none."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _package(package: str, version: str | None, least: str, where: str, remedy: str) -> CheckResult:
    if version is None:
        return warn(AREA, f"{package} is not installed; required {where}", remedy)
    if numbers(version) < numbers(least):
        return fail(AREA, f"{package} {version}: {least} or newer is required {where}", remedy)
    return ok(AREA, f"{package} {version}")


if TYPE_CHECKING:
    from rankscope_ingest.base.config import ServiceConfig


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


def explicit_addresses(service: str | None, prometheus: str | None, alertmanager: str | None) -> dict[str, str]:
    """Return the addresses that command-line options name, by program, without a trailing slash."""
    given = {"service": service, "prometheus": prometheus, "alertmanager": alertmanager}
    return {name: url.rstrip("/") for name, url in given.items() if url}


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
