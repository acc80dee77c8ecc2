"""This machine: Python and what is installed, programs, and who listens on the ports in question."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from rankscope.doctor.environment import Surroundings
from rankscope.doctor.result import Finding, fail, ok, warn
from rankscope.up.executables import ALERTMANAGER, PROMETHEUS

AREA: Final = "This machine"
PORTS: Final = "Ports"

OLDEST_PYTHON: Final = (3, 11)
_WHERE: Final = {
    "pyarrow": ("everywhere", "pip install rankscope"),
    "prometheus-client": ("everywhere", "pip install rankscope"),
    "torch": ("where training runs", "install the torch that fits this machine; Rankscope never replaces it"),
    "deltalake": ("where the store is read or written", "pip install 'rankscope[store]'"),
    "duckdb": ("where the store is read or written", "pip install 'rankscope[store]'"),
    "aiohttp": ("where the service runs", "pip install 'rankscope[service]'"),
}


def machine(world: Surroundings) -> Iterator[Finding]:
    """Yield versions and programs."""
    python = world.python()
    if numbers(python) < OLDEST_PYTHON:
        yield fail(AREA, f"Python {python}", "use Python 3.11 or newer")
    else:
        yield ok(AREA, f"Python {python}")
    wanted = world.wanted()
    for package, (where, remedy) in _WHERE.items():
        yield _package(package, world.installed(package), wanted.get(package, "0"), where, remedy)
    for program in (PROMETHEUS, ALERTMANAGER):
        found = world.program(program)
        yield ok(AREA, f"{program.title} {found}") if found else warn(AREA, *program.remedy.split(": ", 1))


def ports(world: Surroundings, named: Iterable[tuple[str, int]]) -> Iterator[Finding]:
    """Yield who listens where."""
    for what, port in named:
        listener = world.listener(port)
        yield ok(PORTS, f"{port} ({what}): {listener or 'free'}")


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as one compares them."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _package(package: str, version: str | None, least: str, where: str, remedy: str) -> Finding:
    if version is None:
        return warn(AREA, f"{package} is missing; needed {where}", remedy)
    if numbers(version) < numbers(least):
        return fail(AREA, f"{package} {version}: {least} or newer is needed {where}", remedy)
    return ok(AREA, f"{package} {version}")
