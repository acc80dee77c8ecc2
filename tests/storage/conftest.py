"""A store in a temporary folder, and rows for it."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.storage.rows import table

from rankscope_storage.api.store import Batch, Store, Writer
from rankscope_storage.connection import Connection, connect


def make_scalars(
    seqs: Iterable[int], *, run: str = "r", rank: int = 0, incarnation: str | None = "i0", value: float = 1.0
) -> pa.Table:
    """Return one scalar per seq; step is seq, ts is seq seconds."""
    names = ("run", "attempt", "rank", "incarnation", "seq", "step", "ts", "name", "value")
    own = [{"seq": seq, "step": seq, "ts": seq * 1_000_000} for seq in seqs]
    rows = [{"run": run, "attempt": 0, "rank": rank, "incarnation": incarnation, **each} for each in own]
    return table("scalars", rows, name="loss", value=value).select(names)


def make_batch(seqs: Iterable[int], *, run: str = "r", rank: int = 0, incarnation: str = "i0") -> Batch:
    listed = list(seqs)
    table = make_scalars(listed, run=run, rank=rank, incarnation=incarnation)
    return Batch(tables={"scalars": table}, watermarks={incarnation: max(listed)})


@pytest.fixture
def scalars() -> Callable[..., pa.Table]:
    return make_scalars


@pytest.fixture
def batch() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Store:
    return Store.open(folder, create=True)


@pytest.fixture
def writer(store: Store) -> Iterator[Writer]:
    with store.claim(owner="host-a pid 1") as writer:
        yield writer


@pytest.fixture
def connection(store: Store) -> Iterator[Connection]:
    with connect(store.root) as connection:
        yield connection
