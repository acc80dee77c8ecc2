"""Check this machine: versions of Python and packages, executables, and the processes that listen on the ports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from rankscope.doctor.environment import Environment
from rankscope.doctor.result import CheckResult, fail, ok, warn
from rankscope.up.executables import ALERTMANAGER, PROMETHEUS

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
    """Yield a result for each port: the process that listens on it."""
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
