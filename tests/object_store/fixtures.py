"""Fixtures with an S3 server: one server for all tests of a process, one bucket for each test."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.object_store.proxy import Proxy
from tests.object_store.radosgw import installed, radosgw
from tests.object_store.servers import S3Server, moto

_NUMBERS = itertools.count(1)


RADOSGW_FOLDER = os.environ.get("RANKSCOPE_RADOSGW")
"""Folder for radosgw's programs, with which `make test-scale` runs the tests; without it, the server is moto's."""


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory, require_server: Callable[..., str]) -> Iterator[S3Server]:
    """Run an S3 server."""
    if RADOSGW_FOLDER:
        require_server("dpkg-deb", "dpkg")
        with radosgw(installed(Path(RADOSGW_FOLDER)), tmp_path_factory.mktemp("radosgw")) as server:
            yield server
    else:
        with moto() as server:
            yield server


@pytest.fixture(scope="session")
def _proxy_of_session(s3_server: S3Server) -> Iterator[Proxy]:
    with Proxy(server=s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def s3_proxy(_proxy_of_session: Proxy) -> Iterator[Proxy]:
    """Return the proxy through which the clients of a test reach the server; it counts requests and injects faults."""
    _proxy_of_session.arm()
    yield _proxy_of_session
    _proxy_of_session.arm()
    _proxy_of_session.aged, _proxy_of_session.victim = False, None


@pytest.fixture
def bucket(s3_server: S3Server, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an empty bucket, and set the variables AWS_* for the test and the processes it starts."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment(s3_proxy.url).items():
        monkeypatch.setenv(name, value)
    name = f"test-{next(_NUMBERS)}"
    s3_server.create_bucket(name)
    s3_proxy.arm()
    return name
