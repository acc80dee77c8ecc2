"""One store with runs of all states and shapes, for all tests of pages and their numbers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.view.browser import Browser, browser
from tests.view.training import Size, Trajectory, write, write_store

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


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes tables, and then further batches of tables, to a store; it returns its path."""
    return lambda *later, **tables: write(tmp_path / "store", tables, *later)


@pytest.fixture
def opened(stored: Callable[..., Path]) -> Iterator[Callable[..., Connection]]:
    with ExitStack() as stack:
        yield lambda *later, **tables: stack.enter_context(connect(stored(*later, **tables)))
