"""Every metric that a rank exports: name, type, unit, labels and column of the store.

A metric exists if and only if it is defined here or in `hardware`. Exporters, documentation and queries are generated
from these definitions; tests check that they agree with them.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics import hardware
from rankscope_contract.metrics.spec import MetricSpec as MetricSpec  # noqa: PLC0414 - readers of the catalogue import it from here
from rankscope_contract.metrics.spec import counter, gauge, logged_counter, logged_gauge
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
RULE_SCORE = gauge(
    "rankscope_rule_score",
    "Largest score of a rule in the last minute at least; the rule fires above its threshold.",
    "rule",
    stored_as="scalars:rule_score",
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
ADAM_BETA1 = logged_gauge("rankscope_adam_beta1", "First beta of a parameter group, stored when it changes.", "group")
ADAM_BETA2 = logged_gauge("rankscope_adam_beta2", "Second beta of a parameter group, stored when it changes.", "group")
ADAM_EPS = logged_gauge("rankscope_adam_eps", "Epsilon of a parameter group, stored when it changes.", "group")
WEIGHT_DECAY = logged_gauge(
    "rankscope_weight_decay", "Weight decay of a parameter group, stored when it changes.", "group"
)
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

CATALOG: Final[dict[str, MetricSpec]] = {
    spec.name: spec for spec in (*globals().values(), *vars(hardware).values()) if isinstance(spec, MetricSpec)
}
"""Every metric family of a rank by name."""

SCALARS_WITH_OWN_METRIC: Final[dict[str, MetricSpec]] = {
    spec.stored_as.removeprefix("scalars:"): spec
    for spec in CATALOG.values()
    if spec.stored_as and spec.stored_as.startswith("scalars:")
}
"""Metric with the same meaning as a logged scalar, by name of the scalar.

Scalars without such a metric are exported as samples of rankscope_scalar.
"""
