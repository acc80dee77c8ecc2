"""The table of peaks is searched by torch's device names, as reported by drivers and forums."""

from __future__ import annotations

import pytest
import torch

from rankscope_exporter.observers.throughput.costs import TABLE, peak_tflops

# torch.cuda.get_device_name() of machines, and the dense bfloat16 TFLOP/s of their data sheets.
NAMES = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H800": 989.4,
    "NVIDIA H20": 148,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 120GB": 989.4,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "A100-SXM4-40GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb": 312 * 3 / 7,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA A30": 165,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "AMD Instinct MI210": 181,
    "AMD Instinct MI250": 181.05,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI325X": 1307.4,
}


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_device_is_found_by_the_name_of_torch(name, expected):
    assert expected == pytest.approx(peak_tflops(name, torch.bfloat16, tf32=False))


@pytest.mark.parametrize(
    ("name", "half"), [("Tesla V100-SXM2-32GB", 125), ("Tesla V100-PCIE-16GB", 112), ("Tesla T4", 65)]
)
def test_older_devices_have_no_bfloat16_units(name, half):
    assert half == peak_tflops(name, torch.float16, tf32=False)
    assert peak_tflops(name, torch.bfloat16, tf32=False) is None


def test_float32_peak_depends_on_tf32():
    assert 494.7 == peak_tflops("NVIDIA H100 80GB HBM3", torch.float32, tf32=True)
    assert 66.9 == peak_tflops("NVIDIA H100 80GB HBM3", torch.float32, tf32=False)
    assert 15.7 == peak_tflops("Tesla V100-SXM2-16GB", torch.float32, tf32=True)


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA T400", "A1000", "cpu", ""]
)
def test_unknown_device_has_no_peak(name):
    assert peak_tflops(name, torch.bfloat16, tf32=True) is None


def test_wider_type_is_never_faster():
    for pattern, peaks in TABLE:
        assert peaks.float32 <= (peaks.tf32 or peaks.half) <= peaks.half, pattern
