"""Every metric of the catalogue is on the service's page, and figures of a run mean what they say."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankscope_contract.metrics import CATALOG
from rankscope_ingest.progress import RunMeter, last_value
from rankscope_ingest.service_metrics import FAILURE_REASONS, ServiceMetrics
from rankscope_ingest.tables import rows_table


def scalars(*rows):
    return rows_table("scalars", [{"run": "r", "name": name, "value": value} for name, value in rows])


def test_page_has_exactly_the_families_of_the_catalogue():
    metrics = ServiceMetrics()
    metrics.show([], [], 0)
    families = {family.name for family in text_string_to_metric_families(metrics.page().decode())}
    expected = {spec.name.removesuffix("_total") for spec in CATALOG.values() if spec.page == "service"}

    assert expected == families - {name for name in families if name.endswith("_created")}


def test_failures_stand_at_zero_before_the_first():
    page = ServiceMetrics().page().decode()

    for reason in FAILURE_REASONS:
        assert f'rankscope_ingest_scrape_failures_total{{reason="{reason}"}} 0.0' in page


def test_last_value_prefers_the_unlabelled_and_keeps_nan():
    table = rows_table(
        "scalars",
        [
            {"run": "r", "name": "loss", "value": 1.0},
            {"run": "r", "name": "loss", "value": 9.0, "labels": '{"loss":"aux"}'},
            {"run": "r", "name": "loss", "value": math.nan},
        ],
    )

    assert math.isnan(last_value(table, "loss"))
    assert last_value(table, "absent") is None


def test_tokens_of_all_ranks_add_up_and_a_new_counter_starts_anew():
    meter = RunMeter()
    for second in range(5):
        for rank in (0, 1):
            meter.observe(rank, scalars(("tokens_total", 100.0 * second)), second * 1_000_000, second)
    before = meter.tokens_per_second()
    meter.observe(0, scalars(("tokens_total", 0.0)), 5_000_000, 5)
    meter.observe(0, scalars(("tokens_total", 50.0)), 6_000_000, 6)

    assert (200.0, 150.0) == (before, meter.tokens_per_second())


def test_eta_follows_the_present_speed():
    meter = RunMeter()
    for second in range(0, 100, 2):
        meter.observe(0, None, second * 1_000_000, second // 2)

    assert pytest.approx(2 * 51) == meter.eta_seconds(100, 49)
    assert meter.eta_seconds(None, 49) is None
    assert 0 == meter.eta_seconds(40, 49)
