"""Write a Delta checkpoint every CHECKPOINT_COMMITS commits, in a background thread.

A delta-rs table handle keeps all entries of the Delta log since the checkpoint it was opened with. It reads them again
at each refresh and each commit: 0.7 ms of CPU time per entry. Commits of all writers count towards the interval.
Appends do not wait for a checkpoint. If a checkpoint is missing, the store is still correct, but slower.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import Sync
from rankscope_storage.log.delta import CHECKPOINT_COMMITS, Log
from rankscope_storage.log.entries import newest_checkpoint

_log = logging.getLogger(__name__)


class Checkpointer:
    """Writer of checkpoints for the store at `root`, used while a shard's writer commits. Not thread-safe."""

    def __init__(self, root: Path, sync: Sync, write: Callable[[Path, Sync], None] | None = None) -> None:
        self._root = root
        self._sync = sync
        self._write = write or write_checkpoint
        self._newest = newest_checkpoint(root)
        self._thread: threading.Thread | None = None

    def after_commit(self, version: int) -> None:
        """Start writing a checkpoint in a thread if CHECKPOINT_COMMITS commits were made since the last one.

        `version` is the newest version. After a failure, the next attempt is made CHECKPOINT_COMMITS commits later.
        """
        if version - self._newest < CHECKPOINT_COMMITS or (self._thread is not None and self._thread.is_alive()):
            return
        self._newest = max(
            self._newest, newest_checkpoint(self._root)
        )  # the writer of another shard may have written one
        if version - self._newest >= CHECKPOINT_COMMITS:
            self._newest = version
            self._thread = threading.Thread(target=self._work, name="rankscope-checkpoint")
            self._thread.start()

    def close(self) -> None:
        """Wait until the checkpoint that is being written is complete. May be called repeatedly."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        try:
            self._write(self._root, self._sync)
        except StoreError as error:
            _log.warning("cannot write a checkpoint, retrying after %d commits: %s", CHECKPOINT_COMMITS, error)
        except Exception:  # noqa: BLE001 - appended rows are stored without a checkpoint
            _log.exception("unexpected error in the checkpoint thread, retrying after %d commits", CHECKPOINT_COMMITS)


def write_checkpoint(root: Path, sync: Sync) -> None:
    """Write a checkpoint of the newest version of the store at `root`. The checkpoint is durable on return."""
    Log.open(root, sync).checkpoint()
