"""Every metric that a rank or the service exports: name, type, unit, labels and column of the store.

A metric exists if and only if it is defined here or in `hardware`. Exporters, documentation and queries are generated
from these definitions; tests check that they agree with them.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from rankscope_contract.metrics import hardware
from rankscope_contract.metrics.spec import MetricSpec as MetricSpec  # noqa: PLC0414 - readers of the catalogue import it from here
from rankscope_contract.metrics.spec import counter, gauge, logged_counter, logged_gauge, service_counter, service_gauge
from rankscope_contract.model import phases

TENSOR_VALUE = gauge(
    "rankscope_tensor_value",
    "Statistic of a tensor at the latest sampled step of its kind.",
    "kind tensor op",
    stored_as="tensor_stats.norm",
)
TENSOR_BASELINE = gauge(
    "rankscope_tensor_baseline",
    "Baseline with which the rules compared the statistic.",
    "kind tensor op",
    stored_as="tensor_stats.norm_baseline",
)
RULE_THRESHOLD = gauge(
    "rankscope_rule_threshold", "Configured threshold of a rule; NaN if the rule has no threshold.", "rule"
)
RULE_FIRING = gauge(
    "rankscope_rule_firing", "1 while the rule fires on at least one series of the kind, else 0.", "rule kind"
)
FEATURE_VALUE = gauge(
    "rankscope_feature_value",
    "Feature of a module at its latest measurement: op is min or max, over heads or experts and micro-batches.",
    "kind module op",
    stored_as="features.value",
)
ANOMALY_EVENTS = counter(
    "rankscope_anomaly_events_total",
    "Rule firings since process start. Exported with 0 from the start, so that increase() counts the first firing.",
    "rule kind",
)
ANOMALY_AGE = gauge(
    "rankscope_anomaly_age_seconds", "Time since the latest firing of a rule; absent before the first one.", "rule kind"
)
TENSOR_ANOMALY_EVENTS = counter(
    "rankscope_tensor_anomaly_events_total",
    'Rule firings by tensor statistic, from its first firing on; firings beyond 200 series have tensor="_other".',
    "rule kind tensor op",
)
REPLICA_HASH = gauge(
    "rankscope_replica_hash",
    "Combined hash, below 2^48, of all tensors that must be bit-identical on the ranks in `replicas`.",
    "replicas",
)
REPLICA_HASH_STEP = gauge(
    "rankscope_replica_hash_step", "Step of the latest replica hash.", "replicas", stored_as="hashes.step"
)
KIND_STEP = gauge("rankscope_kind_step", "Latest sampled step of a kind.", "kind")
STEP = gauge("rankscope_step", "Latest completed step, including skipped steps.", stored_as="tensor_stats.step")
STEPS_PLANNED = gauge("rankscope_steps_planned", "Planned number of training steps.", stored_as="runs.planned_steps")
LOSS = logged_gauge("rankscope_loss", "Latest logged loss.", "loss")
LEARNING_RATE = logged_gauge("rankscope_learning_rate", "Learning rate of a parameter group.", "group")
GRAD_NORM = logged_gauge("rankscope_grad_norm", "Gradient norm that the training script logged.")
SCALAR = gauge(
    "rankscope_scalar",
    "Latest value of a logged scalar that has no metric of its own.",
    "name",
    stored_as="scalars.value",
)
TOKENS = logged_counter("rankscope_tokens_total", "Tokens on which this rank has trained.")
SAMPLES = logged_counter("rankscope_samples_total", "Samples on which this rank has trained.")
STEP_SECONDS = logged_gauge("rankscope_step_seconds", "Duration of the latest step.")
SKIPPED_STEPS = counter("rankscope_skipped_steps_total", "Steps without an optimizer update.", stored_as="events.type")
PHASE_SECONDS = counter(
    "rankscope_phase_seconds_total",
    "Time spent in a phase since the monitor was attached. The sum over all phases is the elapsed time.",
    phases.LABEL,
    stored_as=f"scalars:{phases.PHASE_SECONDS}",
)
STEP_PHASE_SECONDS = logged_gauge(
    "rankscope_step_phase_seconds",
    "Duration of each phase in one step: the latest step with a known end.",
    phases.LABEL,
)
PRE_COLLECTIVE_SECONDS = logged_gauge(
    "rankscope_pre_collective_seconds",
    "Compute time in the latest step before the rank waits for other ranks. High on a straggler. Absent if unknown.",
)
PRE_COLLECTIVE_TOTAL = logged_counter(
    "rankscope_pre_collective_seconds_total",
    "Sum of rankscope_pre_collective_seconds since the monitor was attached, without the first step.",
)
OVERHEAD_SECONDS = counter(
    "rankscope_overhead_seconds_total",
    "CPU time of Rankscope on this rank: its hooks in the training thread, torch threads they use, its own threads.",
    "thread",
    stored_as="scalars:overhead_seconds",
)
SAMPLING_STRETCH = logged_gauge(
    "rankscope_sampling_stretch",
    "Factor by which max_overhead multiplies the sampling interval; 1 without a reduction.",
)
COLLECTIVE_CALLS = counter(
    "rankscope_collective_calls_total",
    "Collectives of this rank that were read from torch's flight recorder, including those that torch itself calls.",
    "op",
    stored_as="collectives.op",
)
COLLECTIVE_BYTES = counter(
    "rankscope_collective_bytes_total",
    "Message bytes of the collectives that were read from torch's flight recorder: the larger of input and output.",
    "op",
    stored_as="collectives.bytes",
)
FAULTS = counter("rankscope_exporter_faults_total", "Internal errors that Rankscope caught so that training continues.")
DROPPED = counter("rankscope_dropped_total", "Records, series or events that the rank dropped, by reason.", "reason")
RING_RECORDS = gauge("rankscope_ring_records", "Records in the ring, the in-memory buffer of the rank.")
RING_UNCOMMITTED = gauge("rankscope_ring_uncommitted_records", "Records in the ring that no store has committed yet.")
RUN_INFO = gauge(
    "rankscope_run_info",
    "Constant 1. The labels identify the process of the rank.",
    "host local_rank world_size incarnation launch_id device",
)
BUILD_INFO = gauge(
    "rankscope_build_info",
    "Constant 1. The labels are the versions of Rankscope, of the schema and of torch.",
    "version schema_version torch",
)

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

CATALOG: Final[dict[str, MetricSpec]] = {
    spec.name: spec for spec in (*globals().values(), *vars(hardware).values()) if isinstance(spec, MetricSpec)
}
"""Every metric family by name."""

SCALARS_WITH_OWN_METRIC: Final[dict[str, MetricSpec]] = {
    spec.stored_as.removeprefix("scalars:"): spec
    for spec in CATALOG.values()
    if spec.stored_as and spec.stored_as.startswith("scalars:")
}
"""Metric with the same meaning as a logged scalar, by name of the scalar.

Scalars without such a metric are exported as samples of rankscope_scalar.
"""
