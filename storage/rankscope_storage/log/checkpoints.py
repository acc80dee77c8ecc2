"""Checkpoints beside the appends: every so many commits, in a thread of their own.

delta-rs keeps all entries since the checkpoint that a handle was opened with, and reads every one of them at each
refresh and each commit: 0.7 ms of CPU for each. So a checkpoint is due every CHECKPOINT_COMMITS commits, whoever made
them, and nobody who appends waits until it is written. Without one all is correct, and slower.
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
    """Writes the checkpoints of the store at `root` as one writer commits. One thread at a time calls it."""

    def __init__(self, root: Path, sync: Sync, write: Callable[[Path, Sync], None] | None = None) -> None:
        self._root = root
        self._sync = sync
        self._write = write or write_checkpoint
        self._begun_at = newest_checkpoint(root)
        self._thread: threading.Thread | None = None

    def after_commit(self, version: int) -> None:
        """Begin a checkpoint when one is due at `version`; one that failed is due again after as many commits."""
        if version - self._begun_at < CHECKPOINT_COMMITS or (self._thread is not None and self._thread.is_alive()):
            return
        self._begun_at = max(self._begun_at, newest_checkpoint(self._root))  # another shard's writer may have been here
        if version - self._begun_at >= CHECKPOINT_COMMITS:
            self._begun_at = version
            self._thread = threading.Thread(target=self._work, name="rankscope-checkpoint")
            self._thread.start()

    def close(self) -> None:
        """Wait until the checkpoint that was begun, if any, is written; idempotent."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        try:
            self._write(self._root, self._sync)
        except StoreError as error:
            _log.warning("no checkpoint could be written, the next one tries again: %s", error)
        except Exception:  # noqa: BLE001 - of a library: rows are stored all the same
            _log.exception("no checkpoint could be written for a reason nobody thought of, the next one tries again")


def write_checkpoint(root: Path, sync: Sync) -> None:
    """Write a checkpoint of the newest version of the store at `root`; durable on return."""
    Log.open(root, sync).checkpoint()
