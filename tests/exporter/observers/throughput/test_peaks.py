"""The table of peaks is searched by torch's device names, as reported by drivers and forums."""

from __future__ import annotations

import pytest
import torch

from rankscope_exporter.observers.throughput.costs import TABLE, peak_tflops

# The dense bfloat16 TFLOP/s of data sheets, and the results of torch.cuda.get_device_name() of machines.
NAMES = {
    2500: ["NVIDIA GB200"],
    2250: ["NVIDIA B200"],
    1307.4: ["AMD Instinct MI300X", "AMD Instinct MI325X"],
    989.4: ["NVIDIA H100 80GB HBM3", "NVIDIA H800", "NVIDIA H200", "NVIDIA GH200 480GB"],
    835.5: ["NVIDIA H100 NVL", "NVIDIA H200 NVL"],
    756.5: ["NVIDIA H100 PCIe"],
    364.2: ["NVIDIA RTX 6000 Ada Generation"],
    362.05: ["NVIDIA L40S"],
    312: ["NVIDIA A100-SXM4-80GB", "A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A800-SXM4-80GB"],
    312 * 3 / 7: ["NVIDIA A100-SXM4-80GB MIG 3g.40gb"],
    209.5: ["NVIDIA GeForce RTX 5090"],
    191.5: ["AMD Instinct MI250X"],
    181.05: ["NVIDIA L40", "AMD Instinct MI250"],
    181: ["AMD Instinct MI210"],
    165.2: ["NVIDIA GeForce RTX 4090"],
    165: ["NVIDIA A30"],
    154.8: ["NVIDIA RTX A6000"],
    149.7: ["NVIDIA A40"],
    148: ["NVIDIA H20"],
    125: ["NVIDIA A10"],
    121: ["NVIDIA L4"],
    71: ["NVIDIA GeForce RTX 3090"],
    70: ["NVIDIA A10G"],
}
# Devices without bfloat16 units, with their float16 TFLOP/s.
OLDER = {125: ["Tesla V100-SXM2-32GB"], 112: ["Tesla V100-PCIE-16GB"], 65: ["Tesla T4"]}
UNKNOWN = ["NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA T400", "A1000", "cpu", ""]


@pytest.mark.parametrize(
    ("name", "half", "bfloat16"),
    [
        *((name, peak, peak) for peak, names in NAMES.items() for name in names),
        *((name, peak, None) for peak, names in OLDER.items() for name in names),
        *((name, None, None) for name in UNKNOWN),
    ],
)
def test_device_is_found_by_the_name_of_torch(name, half, bfloat16):
    found = [peak_tflops(name, dtype, tf32=True) for dtype in (torch.float16, torch.bfloat16)]

    assert [half, bfloat16] == pytest.approx(found)


def test_float32_peak_depends_on_tf32():
    assert 494.7 == peak_tflops("NVIDIA H100 80GB HBM3", torch.float32, tf32=True)
    assert 66.9 == peak_tflops("NVIDIA H100 80GB HBM3", torch.float32, tf32=False)
    assert 15.7 == peak_tflops("Tesla V100-SXM2-16GB", torch.float32, tf32=True)


def test_wider_type_is_never_faster():
    for pattern, peaks in TABLE:
        assert peaks.float32 <= (peaks.tf32 or peaks.half) <= peaks.half, pattern
