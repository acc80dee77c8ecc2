"""Consistency of the metric catalogue: names follow Prometheus' rules, and stored metrics have a column."""

from __future__ import annotations

import re

import pytest

from rankscope_contract.metrics.catalogue import CATALOG, SCALARS_WITH_OWN_METRIC, MetricSpec
from rankscope_contract.model.schema import DATASETS

SPECS = list(CATALOG.values())
UNIT_SUFFIX = {"seconds": "_seconds", "bytes": "_bytes"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_metric_is_named_by_convention(spec: MetricSpec):
    assert re.fullmatch(r"rankscope_[a-z0-9_]*[a-z0-9]", spec.name)
    assert (spec.type == "counter") == spec.name.endswith("_total")
    assert not spec.name.endswith(("_count", "_sum", "_bucket"))
    if spec.unit in UNIT_SUFFIX:
        assert UNIT_SUFFIX[spec.unit] in spec.name


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_metric_says_what_it_is(spec: MetricSpec):
    assert spec.help.endswith(".")
    assert len(set(spec.all_labels)) == len(spec.all_labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in spec.all_labels)
    assert not {"job", "instance", "le", "quantile"} & set(spec.all_labels)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.stored_as], ids=lambda spec: spec.name)
def test_what_is_stored_has_a_column(spec: MetricSpec):
    dataset, _, column = spec.stored_as.partition(".")
    if column:
        assert column in {field.name for field in DATASETS[dataset]}
    else:
        assert spec.stored_as.startswith("scalars:")


def test_a_rank_says_who_it_is_and_the_service_does_not():
    assert all(spec.all_labels[:2] == ("run", "rank") for spec in SPECS if spec.page == "rank")
    assert all(not spec.name.startswith("rankscope_ingest") for spec in SPECS if spec.page == "rank")


def test_each_scalar_has_at_most_one_metric_of_its_own():
    names = [spec.stored_as for spec in SPECS if spec.stored_as and spec.stored_as.startswith("scalars:")]

    assert len(set(names)) == len(names) == len(SCALARS_WITH_OWN_METRIC)
