"""The process that forks the killed processes, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.storage.crashes.killing import Killer


@pytest.fixture(scope="session")
def killer(tmp_path_factory, require_server) -> Iterator[Killer]:
    """Return the process; it needs a C compiler, because the preloaded library that kills is compiled here."""
    require_server("gcc", "g++")
    made = Killer(tmp_path_factory.mktemp("killer"))
    yield made
    made.close()
