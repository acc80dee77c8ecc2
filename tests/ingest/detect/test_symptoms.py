"""Firings that the service has polled remain on its page after the end of the rank."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from tests.ingest.builders import attempt

from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.detect.symptoms import firings, latest_events
from rankscope_ingest.reporting.service_metrics import ServiceMetrics

NAME = "rankscope_ingest_anomaly_events_total"


def events(*rows):
    return rows_table("events", [{"run": "r", "type": kind, "rule": rule, "kind": of} for kind, rule, of in rows])


def counted(metrics):
    families = text_string_to_metric_families(metrics.page().decode())
    samples = (sample for family in families for sample in family.samples if sample.name == NAME)
    return {tuple(sample.labels[name] for name in ("run", "rank", "rule", "kind")): sample.value for sample in samples}


def test_latest_event_of_each_type_has_its_time_in_seconds():
    times = [("hang", 5_000_000), ("exit", 7_500_000), ("hang", 6_000_000)]
    happened = rows_table("events", [{"run": "r", "type": kind, "ts": at} for kind, at in times])

    assert {"hang": 6.0, "exit": 7.5} == latest_events(happened)
    assert {} == latest_events(None)


def test_firings_are_counted_by_rule_and_kind():
    happened = events(
        ("anomaly", "AnomalyNan", "grad_reduced"),
        ("anomaly", "AnomalyNan", "grad_reduced"),
        ("anomaly", "AnomalyNan", None),
        ("anomaly", None, "grad_reduced"),
        ("exit", "AnomalyNan", "grad_reduced"),
    )

    assert {("AnomalyNan", "grad_reduced"): 2, ("AnomalyNan", ""): 1} == firings(happened)
    assert {} == firings(None)
    assert {} == firings(events(("exit", None, None)))


def test_counter_increases_and_remains_while_the_run_is_known():
    metrics = ServiceMetrics()
    metrics.fired("gone", 0, {("AnomalyNan", ""): 1})
    metrics.fired("r", 1, {("AnomalyNan", "grad_reduced"): 2})
    metrics.fired("r", 1, {("AnomalyNan", "grad_reduced"): 3})
    metrics.fired("r", None, {("ReplicaDesync", "param_after"): 1})
    metrics.show([], [attempt()], [], 0)
    expected = {("r", "1", "AnomalyNan", "grad_reduced"): 5.0, ("r", "unknown", "ReplicaDesync", "param_after"): 1.0}

    assert expected == counted(metrics)
