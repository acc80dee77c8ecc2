"""What tests of all rooms share: real servers or an honest skip, a folder for a store, a free port."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable

import pytest

# Two ranks' worth of threads on a two-core machine measure only each other; torch reads this when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _require_server(program: str, package: str | None = None) -> str:
    path = shutil.which(program)
    if path is not None:
        return path
    reason = f"{program} is not installed: apt-get install {package or program}"
    if os.environ.get("RANKSCOPE_REQUIRE_SERVERS"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def require_server() -> Callable[..., str]:
    """Return the path of a program; without it the test is skipped, and fails where servers are required.

    `require_server("promtool", "prometheus")` names the Debian package where it differs from the program.
    """
    return _require_server


@pytest.fixture
def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
