"""Forks of the process while threads of the monitor use libraries with locks of their own, such as pyarrow.

A child that is forked while another thread holds such a lock can never take it. A fork therefore waits until no thread
of the monitor is inside a section of `no_fork`, and at most FORK_WAITS_SECONDS, because such a thread may hang.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final

FORK_WAITS_SECONDS: Final = 1.0

_own = threading.local()


class _Sections:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside = 0


_sections = _Sections()


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Let forks of other threads wait for the end of the `with` block, which may contain further sections."""
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    with _sections.changed:
        _own.depth = getattr(_own, "depth", 0) + by
        _sections.inside += by
        _sections.changed.notify_all()


def _before_fork() -> None:
    _sections.changed.acquire()
    own = getattr(_own, "depth", 0)
    _sections.changed.wait_for(lambda: _sections.inside <= own, FORK_WAITS_SECONDS)


def _after_in_parent() -> None:
    _sections.changed.release()


def _after_in_child() -> None:
    _sections.changed = threading.Condition()  # other threads waited at the old one
    _sections.inside = getattr(_own, "depth", 0)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
