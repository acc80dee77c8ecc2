"""A store of a few files without a running service, which tests damage."""

from pathlib import Path

import pytest


@pytest.fixture
def left(store, writer, batch) -> Path:
    """Return a store with three commits of five rows each, of two runs, without a running service."""
    for number in range(3):
        writer.append(
            batch(range(5 * number, 5 * number + 5), run="r" if number else "first", incarnation=f"i{number}")
        )
    writer.close()
    return store.root
