"""A store of a few files that belongs to nobody any more, to be broken."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def left(store, writer, batch) -> Path:
    """Three commits of five rows each, of two runs; the service has gone."""
    for number in range(3):
        writer.append(
            batch(range(5 * number, 5 * number + 5), run="r" if number else "first", incarnation=f"i{number}")
        )
    writer.close()
    return store.root
