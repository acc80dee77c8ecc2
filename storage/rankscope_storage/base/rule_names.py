"""Names of rules that no rank evaluates: of the service, of imports, and of incidents of runs and logs."""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.events import GPU_THROTTLED, INGEST_LOSING, RULES_OF_MACHINES

SLOW_RANK: Final = "SlowRank"

RUN_FAILED: Final = "RunFailed"
"""Rule name of the incident that reports a failed run."""

RUN_STALLED: Final = "RunStalled"
"""Rule name of the incident that reports a stalled run."""

RUN_SLOW: Final = "RunSlow"
"""Rule name of the incident that reports slow steps in a log."""

RUN_FINISHED: Final = "RunFinished"
"""Rule name of the incident that reports the planned end of a run according to its log."""

RUN_STOPPED: Final = "RunStopped"
"""Rule name of the incident that reports that a user or the scheduler stopped a run, according to its log."""

LOG_UNREADABLE: Final = "LogUnreadable"
"""Rule name of the incident that reports that a log cannot be read."""

RULES_OF_RUNS: Final = frozenset({RUN_FAILED, RUN_STALLED, RUN_SLOW, RUN_FINISHED, RUN_STOPPED, LOG_UNREADABLE})
"""Rule names of the incidents of runs and logs. All other incidents are groups of anomalies."""

ENDS_WITH_RUN: Final = frozenset({RUN_STALLED, SLOW_RANK, GPU_THROTTLED, INGEST_LOSING})
"""Rule names of the incidents that are over at the end of the attempt."""

WITH_SENTENCE: Final = RULES_OF_MACHINES | {SLOW_RANK}
"""Rule names of firings with a complete sentence as message, which replaces the statistic and its value."""

SLOW_STEPS: Final = "SlowSteps"
SLOW_FACTOR: Final = 2.0
"""Ratio of a step time to the median from which a step is slow, of followed and of imported logs."""
