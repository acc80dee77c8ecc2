"""The process that is forked to be killed, once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.storage.crashes.killing import Killer


@pytest.fixture(scope="session")
def killer(tmp_path_factory, require_server) -> Iterator[Killer]:
    """Needs a C compiler: what kills is preloaded, and compiled here."""
    require_server("gcc", "g++")
    made = Killer(tmp_path_factory.mktemp("killer"))
    yield made
    made.close()
