"""Tests of the metric catalogue: names follow the rules of Prometheus, and stored metrics have a column."""

import re
from pathlib import Path

import pytest

import rankscope_exporter
from rankscope_contract.metrics.catalogue import SCALARS_WITH_OWN_METRIC, MetricSpec
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.service_catalogue import CATALOG
from rankscope_view.data.metrics import SCALAR_TITLES

SPECS = list(CATALOG.values())
UNIT_SUFFIX = {"seconds": "_seconds", "bytes": "_bytes"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_metric_follows_the_conventions_of_prometheus(spec: MetricSpec):
    assert re.fullmatch(r"rankscope_[a-z0-9_]*[a-z0-9]", spec.name)
    assert (spec.type == "counter") == spec.name.endswith("_total")
    assert not spec.name.endswith(("_count", "_sum", "_bucket"))
    assert UNIT_SUFFIX.get(spec.unit or "", "") in spec.name
    assert spec.help.endswith(".")
    assert len(set(spec.all_labels)) == len(spec.all_labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in spec.all_labels)
    assert not {"job", "instance", "le", "quantile"} & set(spec.all_labels)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.stored_as], ids=lambda spec: spec.name)
def test_stored_metric_has_a_column_or_a_scalar(spec: MetricSpec):
    dataset, _, column = spec.stored_as.partition(".")

    assert column in {field.name for field in DATASETS[dataset]} if column else dataset.startswith("scalars:")


def test_metrics_of_ranks_begin_with_run_and_rank_and_have_own_scalars():
    names = [spec.stored_as for spec in SPECS if spec.stored_as and spec.stored_as.startswith("scalars:")]

    assert all(spec.all_labels[:2] == ("run", "rank") for spec in SPECS if spec.page == "rank")
    assert all(not spec.name.startswith("rankscope_ingest") for spec in SPECS if spec.page == "rank")
    assert len(set(names)) == len(names) == len(SCALARS_WITH_OWN_METRIC)


TITLES = {
    "device_memory_alloc_retries_total": "Device memory alloc retries in total",
    "device_memory_allocated_bytes": "Device memory allocated, bytes",
    "device_memory_ooms_total": "Device memory failures in total",
    "gpu_clock_hertz": "GPU clock, Hz",
    "gpu_ecc_errors_total": "GPU ECC errors in total",
    "gpu_energy_joules_total": "GPU energy in total, J",
    "gpu_memory_total_bytes": "GPU memory total, bytes",
    "gpu_memory_utilization": "GPU memory utilization, share",
    "gpu_nvlink_bytes_total": "GPU NVLink in total, bytes",
    "gpu_pcie_bytes_per_second": "GPU PCIe bytes per second",
    "gpu_power_watts": "GPU power, W",
    "gpu_temperature_celsius": "GPU temperature, °C",
    "gpu_throttled": "GPU throttled",
    "gpu_xid_errors_total": "GPU XID errors in total",
    "host_cpu_utilization": "Host CPU utilization, share",
    "mfu": "Share of the peak FLOP/s (MFU)",
    "process_cpu_seconds_total": "Process CPU in total, s",
    "step_phase_seconds": "Time of a step by phase, s",
    "tflops_per_gpu": "TFLOP/s of the device",
}


def test_every_name_that_the_monitor_writes_has_a_title():
    """The titles above have each word and each unit that is not that of the name."""
    source = "".join(file.read_text() for file in Path(rankscope_exporter.__file__).parent.rglob("*.py"))
    written = set(re.findall(r"""\b(?:Scalar|_one|_each)\(\s*"(\w+)",""", source))

    assert TITLES.items() <= SCALAR_TITLES.items()
    assert [] == [title for title in SCALAR_TITLES.values() if "_" in title]
    assert len(written) > 15
    assert set() == written - SCALAR_TITLES.keys()
