"""One store with runs of all states and shapes, for all tests of pages and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.view.browser import Browser, browser
from tests.view.training import Size, Trajectory, write_store

from rankscope_storage.connection import Connection, connect


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trajectory]:
    folder = tmp_path_factory.mktemp("view") / "store"
    return folder, write_store(folder, Size())


@pytest.fixture(scope="session")
def store_path(written: tuple[Path, Trajectory]) -> Path:
    return written[0]


@pytest.fixture(scope="session")
def course(written: tuple[Path, Trajectory]) -> Trajectory:
    return written[1]


@pytest.fixture(scope="session")
def connection(store_path: Path) -> Iterator[Connection]:
    with connect(store_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def chromium(require_server: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(require_server("chromium"), tmp_path_factory.mktemp("chromium")) as found:
        yield found
