"""Access of tests to the parts of an attached monitor: the only place that reads its private session."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope_exporter import Monitor
from rankscope_exporter.api.session import Session
from rankscope_exporter.records.step_record import StepRecord


def session_of(monitor: Monitor | None) -> Session:
    """Return the parts of an attached monitor: `channel` with its `ring`, `recorder`, `publisher`, and `hooks`."""
    session = None if monitor is None else monitor._session
    assert session is not None, "the monitor is not attached"
    return session


def records_of(session: Session) -> Sequence[StepRecord]:
    """Return all records in the ring, also after detach."""
    return session.channel.ring.after(-1, 1 << 30).records
