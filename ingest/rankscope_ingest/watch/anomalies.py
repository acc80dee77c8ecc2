"""Group the firings of rules for the rows of a followed log into incidents, as the service does for ranks.

The module performs no I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from rankscope_contract.model.events import RunState
from rankscope_ingest.base.config import NotifySection, RunsSection
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.detect.symptoms import symptoms
from rankscope_ingest.runs.incident import Incident
from rankscope_ingest.runs.models import Attempt, Liveness, Rank
from rankscope_ingest.runs.text import wrong_values
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_ingest.watch.judge import Condition, Verdict
from rankscope_storage.base.rule_names import SLOW_STEPS


class LogAnomalies:
    """The incidents of the anomalies in one followed log."""

    def __init__(self, run: str, address: str) -> None:
        self._run = run
        self._address = address
        self._runs = RunTracker(RunsSection())
        self._incidents = IncidentTracker(group_wait_seconds=0.0, quiet_steps=NotifySection().quiet_steps)
        self.last_seqs: dict[str, int] = {}  # of observed anomalies, by incarnation

    def restore(self, incident: Incident, *, is_open: bool) -> None:
        """Add an incident that an earlier process has stored."""
        (self._incidents.restore if is_open else self._incidents.remember)(incident)

    def with_open(self, verdict: Verdict) -> Verdict:
        """Return `verdict` with the number and the worst of the open incidents, and the severity of the worst."""
        found = [one for one in self._incidents.open() if one.first.rule != SLOW_STEPS]  # the condition has them
        if not found:
            return verdict
        worst = max(found, key=lambda incident: incident.first.urgency)
        cause = f"{wrong_values(worst) or worst.first.rule} at step {worst.first.step}"
        if worst.first.value is not None and worst.largest > worst.first.value:
            cause = f"{wrong_values(worst, is_largest=True)}, since step {worst.first.step}"
        state = "finished" if verdict.condition is Condition.FINISHED else f"{verdict.reason},"
        reason = f"{state} with {len(found)} open incident{'s' if len(found) > 1 else ''}: {cause}"
        return dataclasses.replace(verdict, reason=reason, severity=worst.severity)

    def observe(self, anomalies: pa.Table, now: float, *, stride: int) -> list[Incident]:
        """Return the new incidents of `anomalies`, which are those of one incarnation in the order of the log.

        `now` is in monotonic seconds, and `stride` is the number of steps between two rows.
        """
        self._incidents.quiet_steps = NotifySection().quiet_steps * stride
        found: list[Incident] = []
        for number in sorted(pc.unique(anomalies["attempt"]).to_pylist()):
            for one in symptoms(anomalies.filter(pc.field("attempt") == number)):
                self._incidents.observe(dataclasses.replace(one, ranks=self._address), now)
                found += self._incidents.settle(now, {})
        self.last_seqs |= zip(anomalies["incarnation"].to_pylist(), anomalies["seq"].to_pylist(), strict=True)
        return found

    def resolved(self, last_steps: Mapping[int, int], state: RunState) -> list[Incident]:
        """Return the incidents whose cause is gone, from the last step of each attempt and the state of the last one.

        While it runs, some steps without a firing must follow, as for a rank.
        """
        for number, step in last_steps.items():
            attempt = Attempt(run=self._run, number=number, launch_id="", world_size=1, started_at=0, last_step=step)
            if number == max(last_steps):
                attempt.state = state
            if attempt.state is RunState.RUNNING:
                life = Liveness(last_sign=0.0)
                attempt.ranks[0] = Rank(
                    number=0, incarnation="", host="", liveness=life, known_since=0.0, last_step=step
                )
            self._runs.restore(attempt)
        return self._incidents.resolve(self._runs)
