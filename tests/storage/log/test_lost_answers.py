"""A commit without an answer, and requests that are executed late: no committed row is lost or stored twice."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.storage.conftest import make_scalars
from tests.storage.crashes import operations
from tests.storage.crashes.operations import OPERATIONS, after, prepare, silent

from rankscope_ingest import importers
from rankscope_storage.api.store import Batch
from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance import compaction, vacuum

FAULTS = ("lost answer", "timeout after", "timeout before", "late")
MOST_TRIES = {"lost answer": 1, "timeout after": 1, "timeout before": 40, "late": 40}
"""By fault: the number of calls in which an operation succeeds. A stored commit is recognized in the same call."""


class Network:
    """Makes every third commit fail like a request to a remote log; `late` requests are executed before the next."""

    def __init__(self, fault: str) -> None:
        self.failed = 0
        self._fault = fault
        self._calls = 0
        self._late: Callable[[], object] = lambda: None

    def send(self, log: Log, commit: Callable[[Log], Any]) -> Any:
        self._late()
        self._late = lambda: None
        self._calls += 1
        if self._calls % 3 != 1:
            return commit(log)
        self.failed += 1
        if self._fault in ("lost answer", "timeout after"):
            commit(log)
        if self._fault == "lost answer":
            raise ConflictError("the entry exists already")
        if self._fault == "late":
            stale = Log.open(log.root, sync_to_disk, version=log.version, may_be_older=True)

            def execute() -> None:
                with contextlib.suppress(ConflictError):
                    commit(stale)

            self._late = execute
            raise ConflictError("cannot reach the object store")  # delta-rs does not distinguish such errors
        raise StoreError("timed out")


@contextlib.contextmanager
def faulty(fault: str) -> Iterator[Network]:
    network = Network(fault)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_try_commit", "_try_alter"):
            genuine = getattr(Log, name)
            patched.setattr(Log, name, lambda log, change, send=genuine: network.send(log, lambda to: send(to, change)))
        yield network


def tried(fault: str, run: Callable[[], Any]) -> Any:
    """Return the result of `run`, which is called again after errors of the store."""
    for _ in range(MOST_TRIES[fault] - 1):
        with contextlib.suppress(StoreError):
            return run()
    return run()


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    """Restore the constants that `operations` changes."""
    for module, name in ((compaction, "SMALL_FILES"), (vacuum, "REMOVED_FILES_HOURS"), (importers, "GROUP_LOGS")):
        monkeypatch.setattr(module, name, getattr(module, name))


def outcome(operation: str, root: Path, fault: str | None) -> tuple[int, dict[str, Any]]:
    prepare(operation, root)
    failed = 0
    if fault:
        with faulty(fault) as network:
            tried(fault, lambda: OPERATIONS[operation](root, silent))
        failed = network.failed
    return failed, {name: value for name, value in after(operation, root).items() if name != "found"}


WITHOUT_COMMITS = {"maintain", "copy"}  # their requests are disturbed in tests/object_store/test_requests.py


@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - WITHOUT_COMMITS))
def test_operation_with_lost_answers_has_the_result_of_one_without(operation, tmp_path, monkeypatch):
    monkeypatch.setattr(operations.os, "getpid", lambda: 1)
    results = {fault: outcome(operation, tmp_path / fault / "store", fault) for fault in FAULTS}

    assert 0 not in [failed for failed, _ in results.values()]
    assert dict.fromkeys(FAULTS, outcome(operation, tmp_path / "none" / "store", None)[1]) == {
        fault: found for fault, (_, found) in results.items()
    }


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("waits", [False, True])
def test_rows_without_watermark_are_stored_once_after_lost_answers(store, fault, waits, connection):
    """The batch with an unknown result is appended again immediately, or after another one (`waits`)."""
    batches = [Batch(tables={"scalars": make_scalars([n], incarnation=None)}, watermarks={}) for n in range(6)]
    with faulty(fault), tried(fault, lambda: store.claim(owner="a")) as writer:
        for unknown, other in zip(batches[::2], batches[1::2], strict=True):
            is_known = False
            with contextlib.suppress(StoreError):
                writer.append(unknown)
                is_known = True
            left = [other] if is_known else [other, unknown] if waits else [unknown, other]
            for batch in left:
                tried(fault, lambda batch=batch: writer.append(batch))

    rows = connection.query("SELECT seq FROM scalars ORDER BY seq")
    assert pa.array(range(6), pa.int64()) == rows.column("seq").combine_chunks()
