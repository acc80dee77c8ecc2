"""Tests of the metric catalogue: names follow the rules of Prometheus, and stored metrics have a column."""

from __future__ import annotations

import re

import pytest

from rankscope_contract.metrics.catalogue import CATALOG, SCALARS_WITH_OWN_METRIC, MetricSpec
from rankscope_contract.model.schema import DATASETS

SPECS = list(CATALOG.values())
UNIT_SUFFIX = {"seconds": "_seconds", "bytes": "_bytes"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_metric_name_follows_the_conventions_of_prometheus(spec: MetricSpec):
    assert re.fullmatch(r"rankscope_[a-z0-9_]*[a-z0-9]", spec.name)
    assert (spec.type == "counter") == spec.name.endswith("_total")
    assert not spec.name.endswith(("_count", "_sum", "_bucket"))
    if spec.unit in UNIT_SUFFIX:
        assert UNIT_SUFFIX[spec.unit] in spec.name


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_metric_has_a_help_sentence_and_valid_labels(spec: MetricSpec):
    assert spec.help.endswith(".")
    assert len(set(spec.all_labels)) == len(spec.all_labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in spec.all_labels)
    assert not {"job", "instance", "le", "quantile"} & set(spec.all_labels)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.stored_as], ids=lambda spec: spec.name)
def test_stored_metric_has_a_column_or_a_scalar(spec: MetricSpec):
    dataset, _, column = spec.stored_as.partition(".")
    if column:
        assert column in {field.name for field in DATASETS[dataset]}
    else:
        assert spec.stored_as.startswith("scalars:")


def test_metrics_of_ranks_begin_with_run_and_rank_labels():
    assert all(spec.all_labels[:2] == ("run", "rank") for spec in SPECS if spec.page == "rank")
    assert all(not spec.name.startswith("rankscope_ingest") for spec in SPECS if spec.page == "rank")


def test_each_scalar_has_at_most_one_metric():
    names = [spec.stored_as for spec in SPECS if spec.stored_as and spec.stored_as.startswith("scalars:")]

    assert len(set(names)) == len(names) == len(SCALARS_WITH_OWN_METRIC)
