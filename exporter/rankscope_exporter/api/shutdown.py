"""The end of a session: the last step and the exit event, then publishing and the wait for the service's commit."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rankscope_contract.model.events import ExitReason
from rankscope_exporter.api.session import Session
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.process import lifecycle

PUBLISH_SECONDS = 3.0
"""The last steps are published even with exit_wait_seconds = 0: milliseconds, unless the machine is overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a training, as far as it is known before its last step is finished."""

    reason: ExitReason
    error: str | None
    total_steps: int | None
    signal: str | None
    """The signal that asked for an end."""


def record_end(session: Session, boundary: ErrorBoundary, ending: Ending) -> None:
    """Finish the last step and record the exit."""
    last_step = boundary.call("end of training", session.recorder.finish)
    boundary.call("end of training", session.reactions.finish, session.publisher.catch_up)
    reason, error = lifecycle.weighed_reason(ending.reason, ending.error, last_step, ending.total_steps, ending.signal)
    session.recorder.event(lifecycle.exit_event(reason, error, last_step))


def drain(session: Session, boundary: ErrorBoundary, deadline: float, wait_seconds: float) -> None:
    """Publish the remaining records and wait for their commit until `deadline`; report records that are left."""
    left_seconds = max(PUBLISH_SECONDS, deadline - time.monotonic())
    boundary.call("detach()", session.step_observers.collectives.stop, left_seconds)
    for part in (session.publisher, session.reactions):
        boundary.call("end of training", part.stop, max(PUBLISH_SECONDS, deadline - time.monotonic()))
    left = session.channel.drain(max(0.0, deadline - time.monotonic()))
    if left and session.channel.service_url:
        folder = session.channel.persistence.folder
        fate = f"wait in {folder} for a service or the next rank here" if folder else "are lost with this process"
        session.console.line(
            f"rank {session.identity.rank}: {left} records were not committed by {session.channel.service_url} "
            f"within {wait_seconds:g} s and {fate}"
        )
