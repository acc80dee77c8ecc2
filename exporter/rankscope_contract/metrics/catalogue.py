"""Every metric on a rank's page and on the service's: name, type, unit, labels, and its place in the store.

A metric exists by standing here; pages, documentation and queries are made from it, and tests hold them together.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics import hardware, timing
from rankscope_contract.metrics.spec import MetricSpec as MetricSpec  # noqa: PLC0414 - readers of the catalogue take it from here
from rankscope_contract.metrics.spec import counter, gauge


def _service_gauge(name: str, help: str, *labels: str, unit: str | None = None) -> MetricSpec:  # noqa: A002 - Prometheus' word
    return MetricSpec(name=name, type="gauge", help=help, labels=labels, unit=unit, page="service")


TENSOR_VALUE = gauge(
    "rankscope_tensor_value",
    "Statistic of a tensor at the latest sampled step of its kind.",
    "kind",
    "tensor",
    "op",
    stored_as="tensor_stats.norm",
)
TENSOR_BASELINE = gauge(
    "rankscope_tensor_baseline",
    "Baseline the rules compared the statistic with.",
    "kind",
    "tensor",
    "op",
    stored_as="tensor_stats.norm_baseline",
)
RULE_THRESHOLD = gauge("rankscope_rule_threshold", "Configured threshold of a rule; NaN without one.", "rule")
RULE_FIRING = gauge(
    "rankscope_rule_firing", "1 while the rule fires on at least one series of the kind, else 0.", "rule", "kind"
)
ANOMALY_EVENTS = counter(
    "rankscope_anomaly_events_total",
    "Firings since start; 0 from the start, so that increase() sees the first.",
    "rule",
    "kind",
)
TENSOR_ANOMALY_EVENTS = counter(
    "rankscope_tensor_anomaly_events_total",
    'Firings per series from the first on; beyond 200 series they count under tensor="_other".',
    "rule",
    "kind",
    "tensor",
    "op",
)
REPLICA_HASH = gauge(
    "rankscope_replica_hash",
    "All hashes of what the ranks `replicas` hold alike, as one number below 2^48: equal on all of them.",
    "replicas",
)
REPLICA_HASH_STEP = gauge(
    "rankscope_replica_hash_step", "Step at which they were taken.", "replicas", unit="steps", stored_as="hashes.step"
)
KIND_STEP = gauge("rankscope_kind_step", "Latest sampled step of a kind.", "kind", unit="steps")
STEP = gauge(
    "rankscope_step", "Latest finished step, skipped ones included.", unit="steps", stored_as="tensor_stats.step"
)
STEPS_PLANNED = gauge(
    "rankscope_steps_planned", "Steps the training intends to make.", unit="steps", stored_as="runs.planned_steps"
)
LOSS = gauge("rankscope_loss", "Latest logged loss.", "loss", stored_as="scalars:loss")
LEARNING_RATE = gauge(
    "rankscope_learning_rate", "Learning rate of a parameter group.", "group", stored_as="scalars:learning_rate"
)
GRAD_NORM = gauge("rankscope_grad_norm", "Gradient norm as the training logged it.", stored_as="scalars:grad_norm")
SCALAR = gauge("rankscope_scalar", "Latest value of any other logged scalar.", "name", stored_as="scalars.value")
TOKENS = counter(
    "rankscope_tokens_total", "Tokens this rank has trained on.", unit="tokens", stored_as="scalars:tokens_total"
)
SAMPLES = counter(
    "rankscope_samples_total", "Samples this rank has trained on.", unit="samples", stored_as="scalars:samples_total"
)
STEP_SECONDS = gauge(
    "rankscope_step_seconds", "Duration of the latest step.", unit="seconds", stored_as="scalars:step_seconds"
)
SKIPPED_STEPS = counter(
    "rankscope_skipped_steps_total", "Steps whose optimizer was not run.", unit="steps", stored_as="events.type"
)
OVERHEAD_SECONDS = counter(
    "rankscope_overhead_seconds_total",
    "CPU time of Rankscope on this rank: what training calls of it, torch's threads that help with that, and its own.",
    "thread",
    unit="seconds",
    stored_as="scalars:overhead_seconds",
)
SAMPLING_STRETCH = gauge(
    "rankscope_sampling_stretch",
    "Of the steps chosen to be measured every so many-th is: above 1 where max_overhead was reached.",
    stored_as="scalars:sampling_stretch",
)
COLLECTIVE_CALLS = counter(
    "rankscope_collective_calls_total",
    "Collectives of this rank, torch's own included, as far as torch's record of them was read.",
    "op",
    stored_as="collectives.op",
)
COLLECTIVE_BYTES = counter(
    "rankscope_collective_bytes_total",
    "Bytes of their messages: of what the rank gives or gets, whichever is more.",
    "op",
    unit="bytes",
    stored_as="collectives.bytes",
)
FAULTS = counter("rankscope_exporter_faults_total", "Errors swallowed so that training could go on.")
DROPPED = counter("rankscope_dropped_total", "Records, series or events left out, by reason.", "reason")
RING_RECORDS = gauge("rankscope_ring_records", "Records in the ring.")
RING_UNCOMMITTED = gauge("rankscope_ring_uncommitted_records", "Records in the ring that no store has committed yet.")
RUN_INFO = gauge(
    "rankscope_run_info",
    "1, with what identifies the process.",
    "host",
    "local_rank",
    "world_size",
    "incarnation",
    "launch_id",
    "device",
)
BUILD_INFO = gauge("rankscope_build_info", "1, with the versions in use.", "version", "schema_version", "torch")

NODE_RANKS = MetricSpec(
    name="rankscope_node_ranks",
    type="gauge",
    help="Ranks of a launch on a host: on the node's page (shown), or alive and without an answer in time (silent).",
    labels=("run", "host", "state"),
    page="node",
)

TARGETS = MetricSpec(
    name="rankscope_ingest_targets", type="gauge", help="Targets by health.", labels=("health",), page="service"
)
RECORDS_INGESTED = MetricSpec(
    name="rankscope_ingest_records_total", type="counter", help="Records fetched and decoded.", page="service"
)
BYTES_INGESTED = MetricSpec(
    name="rankscope_ingest_bytes_total", type="counter", help="Bytes received from ranks.", unit="bytes", page="service"
)
ROWS_COMMITTED = MetricSpec(
    name="rankscope_ingest_rows_committed_total",
    type="counter",
    help="Rows committed to the store.",
    labels=("dataset",),
    page="service",
)
ROWS_PENDING = MetricSpec(
    name="rankscope_ingest_rows_pending", type="gauge", help="Rows fetched but not yet committed.", page="service"
)
ROWS_SET_ASIDE = MetricSpec(
    name="rankscope_ingest_rows_set_aside_total",
    type="counter",
    help="Rows that can never be stored, kept in _quarantine in the store.",
    page="service",
)
COMMITS = MetricSpec(
    name="rankscope_ingest_commits_total", type="counter", help="Commits to the store.", page="service"
)
COMMIT_SECONDS = MetricSpec(
    name="rankscope_ingest_commit_seconds",
    type="gauge",
    help="Duration of the latest flush and commit.",
    unit="seconds",
    page="service",
)
SCRAPE_FAILURES = MetricSpec(
    name="rankscope_ingest_scrape_failures_total",
    type="counter",
    help="Failed polls by reason.",
    labels=("reason",),
    page="service",
)
LOST_RECORDS = MetricSpec(
    name="rankscope_ingest_lost_records_total",
    type="counter",
    help="Records overwritten on a rank before they were fetched, or lost with it.",
    labels=("run",),
    page="service",
)
UNKNOWN_RANK: Final = "unknown"
"""Label `rank` of events that single out no rank, such as replicas that differ without a majority."""

ANOMALIES_INGESTED = MetricSpec(
    name="rankscope_ingest_anomaly_events_total",
    type="counter",
    help="Firings of rules that arrived from a rank; stays for a while after the rank and its page are gone.",
    labels=("run", "rank", "rule", "kind"),
    page="service",
)
LAG_RECORDS = MetricSpec(
    name="rankscope_ingest_lag_records",
    type="gauge",
    help="Records published by a rank but not yet committed.",
    labels=("run", "rank"),
    page="service",
)
RUN_STATE = MetricSpec(
    name="rankscope_run_state",
    type="gauge",
    help="1 for the state a run is in, 0 for the others.",
    labels=("run", "state"),
    page="service",
)
RANKS_MISSING = MetricSpec(
    name="rankscope_run_ranks_missing",
    type="gauge",
    help="Ranks of the world that are not alive.",
    labels=("run",),
    page="service",
)
RUN_ATTEMPT = _service_gauge("rankscope_run_attempt", "Number of the latest launch of a run, from 0.", "run")
RUN_START = _service_gauge(
    "rankscope_run_start_timestamp_seconds", "When the latest launch began, in UTC.", "run", unit="seconds"
)
RUN_STEP = _service_gauge(
    "rankscope_run_step", "Highest step the service has from any rank of the latest launch.", "run", unit="steps"
)
RUN_LAST_STEP = _service_gauge(
    "rankscope_run_last_step_timestamp_seconds",
    "When a rank last made a step, by its own clock, in UTC.",
    "run",
    unit="seconds",
)
RUN_STEPS_PLANNED = _service_gauge(
    "rankscope_run_steps_planned", "Steps the run intends to make; absent when it did not say.", "run", unit="steps"
)
RUN_PROGRESS = _service_gauge("rankscope_run_progress_ratio", "Steps made, of the steps planned.", "run")
RUN_ETA = _service_gauge(
    "rankscope_run_eta_seconds",
    "Time the remaining steps take at the speed of the last half minute; absent once the run ended.",
    "run",
    unit="seconds",
)
RANKS_EXPECTED = _service_gauge("rankscope_run_ranks_expected", "World size of the latest launch.", "run")
RANKS_UP = _service_gauge("rankscope_run_ranks_up", "Ranks that registered and have not ended.", "run")
RANK_VANISHED = _service_gauge(
    "rankscope_rank_vanished", "1 for a rank that fell silent without a word, else 0.", "run", "rank"
)
LAST_COMMIT = _service_gauge(
    "rankscope_ingest_last_commit_timestamp_seconds",
    "When the service last committed to the store, in UTC; 0 before its first commit.",
    unit="seconds",
)
NOTIFICATIONS = MetricSpec(
    name="rankscope_ingest_notifications_total",
    type="counter",
    help="Notifications sent, by outcome.",
    labels=("outcome",),
    page="service",
)

EXPORTERS = _service_gauge(
    "rankscope_ingest_exporters", "Exporters of others that are scraped, by how the last scrape went.", "health"
)
EXPORTER_SCRAPES = MetricSpec(
    name="rankscope_ingest_exporter_scrapes_total",
    type="counter",
    help="Scrapes of other exporters; skipped are those that the store or too many hanging exporters left no room for.",
    labels=("outcome",),
    page="service",
)
EXPORTER_SAMPLES = MetricSpec(
    name="rankscope_ingest_exporter_samples_total",
    type="counter",
    help="Samples read from their pages, by the layout of the page before, or exactly, by the rules of the format.",
    labels=("how",),
    page="service",
)
EXPORTER_SAMPLES_DROPPED = MetricSpec(
    name="rankscope_ingest_exporter_samples_dropped_total",
    type="counter",
    help="Samples not stored: doubled on their page, or with a time of their own that is stored or out of bounds.",
    labels=("reason",),
    page="service",
)
REMOTE_WRITE_REQUESTS = MetricSpec(
    name="rankscope_ingest_remote_write_requests_total",
    type="counter",
    help="Requests of Prometheus' remote write; busy ones come again, repeated ones were stored already.",
    labels=("outcome",),
    page="service",
)
REMOTE_WRITE_SAMPLES = MetricSpec(
    name="rankscope_ingest_remote_write_samples_total",
    type="counter",
    help="Samples taken from them.",
    page="service",
)
REMOTE_WRITE_DROPPED = MetricSpec(
    name="rankscope_ingest_remote_write_dropped_total",
    type="counter",
    help="What came with them and is not stored: exemplars, histograms, metadata, oversized series, repeated samples.",
    labels=("reason",),
    page="service",
)

CATALOG: Final[dict[str, MetricSpec]] = {
    spec.name: spec
    for spec in (*globals().values(), *vars(hardware).values(), *vars(timing).values())
    if isinstance(spec, MetricSpec)
}
"""Every metric by name."""

SCALARS_WITH_OWN_METRIC: Final[dict[str, MetricSpec]] = {
    spec.stored_as.removeprefix("scalars:"): spec
    for spec in CATALOG.values()
    if spec.stored_as and spec.stored_as.startswith("scalars:")
}
"""Scalar names that the page shows under a metric of their own; all others are samples of rankscope_scalar."""
