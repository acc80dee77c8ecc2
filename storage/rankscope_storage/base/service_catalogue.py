"""Every metric that the service exports, as in `rankscope_contract.metrics.catalogue`, and all metrics of both."""

from __future__ import annotations

from functools import partial
from typing import Final

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.spec import MetricSpec, metric

service_gauge = partial(metric, "gauge", "service")
service_counter = partial(metric, "counter", "service")
_run_gauge = partial(service_gauge, labels="run")

TARGETS = service_gauge(
    "rankscope_ingest_targets", "Processes of ranks that have registered at the service, by health.", "health"
)
RECORDS_INGESTED = service_counter(
    "rankscope_ingest_records_total", "Records of ranks that the service has fetched and decoded."
)
BYTES_INGESTED = service_counter("rankscope_ingest_bytes_total", "Bytes received from ranks.")
ROWS_COMMITTED = service_counter("rankscope_ingest_rows_committed_total", "Rows committed to the store.", "dataset")
ROWS_PENDING = service_gauge(
    "rankscope_ingest_rows_pending", "Rows that the service has fetched but not yet committed to the store."
)
ROWS_SET_ASIDE = service_counter(
    "rankscope_ingest_rows_set_aside_total", "Rows that no store accepts; the service keeps them in _quarantine."
)
COMMITS = service_counter("rankscope_ingest_commits_total", "Commits to the store.")
COMMIT_SECONDS = service_gauge(
    "rankscope_ingest_commit_seconds", "Duration of the latest flush to the store, including its commit."
)
COMPACTED_FILES = service_counter(
    "rankscope_ingest_compacted_files_total",
    "Files of the store that compactions of this service removed, and larger ones that they added, by change.",
    "change",
)
SCRAPE_FAILURES = service_counter(
    "rankscope_ingest_scrape_failures_total", "Failed polls of ranks, by reason.", "reason"
)
LOST_RECORDS = service_counter(
    "rankscope_ingest_lost_records_total",
    "Records that a rank overwrote before the service had fetched them, or that were lost with the rank.",
    "run",
)
LOST_RECORDS_AGE = _run_gauge(
    "rankscope_ingest_lost_records_age_seconds", "Time since records of a run were lost; absent before the first loss."
)
UNKNOWN_RANK: Final = "unknown"
"""Value of the label `rank` for events that concern no single rank, such as a divergence without a majority."""

ANOMALIES_INGESTED = service_counter(
    "rankscope_ingest_anomaly_events_total",
    "Rule firings received from a rank. Exported for some time after the rank and its page are gone.",
    "run rank rule kind",
)
ANOMALIES_INGESTED_AGE = service_gauge(
    "rankscope_ingest_anomaly_age_seconds",
    "Time since the service received the latest firing of a rule; absent before the first one.",
    "run rank rule kind",
)
INCIDENT_AGE = service_gauge(
    "rankscope_ingest_incident_age_seconds",
    "Time since the latest firing of an incident. The labels describe its first firing, in causal order of all ranks.",
    "run rank rule severity kind tensor op step",
    stored_as="events.type",
)
EVENT_LAST = service_gauge(
    "rankscope_event_last_timestamp_seconds",
    "Time of the latest event of each type in a run, by the clock that recorded it, in UTC.",
    "run type",
    stored_as="events.ts",
)
LAG_RECORDS = service_gauge(
    "rankscope_ingest_lag_records",
    "Records that a rank has published but the service has not yet committed.",
    "run rank",
)
RUN_STATE = service_gauge(
    "rankscope_run_state",
    "1 for the current state of a run, 0 for other states.",
    "run state",
    stored_as="attempts.state",
)
RUN_FAILURE = service_gauge(
    "rankscope_run_failure",
    "1 for a failed run, as soon as it is final which rank failed first. Label reason: its exception or signal.",
    "run rank reason",
)
RANKS_MISSING = _run_gauge(
    "rankscope_run_ranks_missing",
    "World size of the latest attempt minus its live ranks; 0 if the attempt completed or was stopped.",
)
RUN_ATTEMPT = _run_gauge(
    "rankscope_run_attempt", "Number of the latest attempt of a run, starting at 0.", stored_as="attempts.attempt"
)
RUN_START = _run_gauge(
    "rankscope_run_start_timestamp_seconds", "Start of the latest attempt, in UTC.", stored_as="attempts.started_at"
)
RUN_END = _run_gauge(
    "rankscope_run_end_timestamp_seconds",
    "End of the latest attempt, in UTC; absent while it is active.",
    stored_as="attempts.ended_at",
)
RUN_STEP = _run_gauge(
    "rankscope_run_step", "Highest step received from any rank of the latest attempt.", stored_as="attempts.last_step"
)
RUN_LAST_STEP = _run_gauge(
    "rankscope_run_last_step_timestamp_seconds",
    "Time of the latest step of any rank, by the clock of that rank, in UTC.",
)
RUN_STEPS_PLANNED = _run_gauge(
    "rankscope_run_steps_planned",
    "Planned number of steps of a run; absent if unknown.",
    stored_as="attempts.planned_steps",
)
RUN_PROGRESS = _run_gauge(
    "rankscope_run_progress_ratio", "Completed steps divided by planned steps.", stored_as="attempts.last_step"
)
RUN_LOSS = _run_gauge(
    "rankscope_run_loss", "Loss of an ended run: mean of ranks with its last step.", stored_as="scalars.value"
)
RUN_ETA = _run_gauge(
    "rankscope_run_eta_seconds",
    "Estimated time for the remaining steps at the speed of the last 30 s; absent after the end of the run.",
)
RANKS_EXPECTED = _run_gauge(
    "rankscope_run_ranks_expected", "World size of the latest attempt.", stored_as="attempts.world_size"
)
RANKS_UP = _run_gauge("rankscope_run_ranks_up", "Ranks that registered and have not ended.")
RANK_VANISHED = service_gauge(
    "rankscope_rank_vanished", "1 for a rank that stopped responding without an exit event, else 0.", "run rank"
)
LAST_COMMIT = service_gauge(
    "rankscope_ingest_last_commit_timestamp_seconds", "Time of the latest commit, in UTC; 0 before the first commit."
)
BACKGROUND_ERRORS = service_counter(
    "rankscope_ingest_background_errors_total",
    "Unexpected errors in background tasks of the service, by task; the task is started again.",
    "task",
)
NOTIFICATIONS = service_counter("rankscope_ingest_notifications_total", "Notifications sent, by outcome.", "outcome")
NOTIFICATION_ATTEMPTS = service_counter(
    "rankscope_ingest_notification_attempts_total",
    "Attempts of the service to deliver a notification to one address, by outcome; a failed attempt is repeated.",
    "outcome",
)

EXPORTERS = service_gauge(
    "rankscope_ingest_exporters", "External exporters that the service scrapes, by result of the last scrape.", "health"
)
EXPORTER_SCRAPES = service_counter(
    "rankscope_ingest_exporter_scrapes_total",
    "Scrapes of external exporters. Outcome skipped: the store is behind, or too many exporters do not respond.",
    "outcome",
)
EXPORTER_SAMPLES = service_counter(
    "rankscope_ingest_exporter_samples_total",
    "Samples read from external exporters. Label how: layout if only the numbers of the page changed, else exact.",
    "how",
)
EXPORTER_SAMPLES_DROPPED = service_counter(
    "rankscope_ingest_exporter_samples_dropped_total",
    "Samples of external exporters not stored: duplicates on a page, or timestamp already stored or out of range.",
    "reason",
)
REMOTE_WRITE_REQUESTS = service_counter(
    "rankscope_ingest_remote_write_requests_total",
    "Remote-write requests of Prometheus. Outcome busy: Prometheus must retry. Outcome repeated: already stored. "
    "Outcome refused: for example without a valid token.",
    "outcome",
)
REMOTE_WRITE_SAMPLES = service_counter(
    "rankscope_ingest_remote_write_samples_total", "Samples that the service received by remote write."
)
REMOTE_WRITE_DROPPED = service_counter(
    "rankscope_ingest_remote_write_dropped_total",
    "Remote-write items that are not stored: exemplars, histograms, metadata, oversized series, repeated samples.",
    "reason",
)
RUN_GOODPUT = _run_gauge(
    "rankscope_run_goodput_ratio",
    "Time in steps that were not superseded, divided by the time since the run first started. Restarts and lost steps "
    "count as elapsed time.",
)

CATALOG: Final[dict[str, MetricSpec]] = catalogue.CATALOG | {
    spec.name: spec for spec in tuple(globals().values()) if isinstance(spec, MetricSpec)
}
"""Every metric family of ranks and of the service by name."""
