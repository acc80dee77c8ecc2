"""Settings of TFLOP/s and MFU, and a table with the peak of each device in dense TFLOP/s, by torch's device names.

The figures are from data sheets. Data sheets print tensor core figures with sparsity, which are twice the figures for
dense matrices; the table has dense figures. For consumer cards the table has the figures with float32 accumulation,
which training uses. A device with two dies that torch shows as two devices is listed per die.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args

import torch

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.base.validation import at_least, number, validate

Method = Literal["auto", "given", "formula", "6n", "off"]
AboveZero = Annotated[float, number("a number above 0", math.ulp(0.0))]

_COUNTED: Final = ("counted", "count")
"""Values of `throughput.method` in earlier releases, which counted FLOPs automatically. They are rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """Settings of TFLOP/s and MFU. FLOPs are those of forward and backward pass, without recomputed activations."""

    method: Method = "auto"
    """Method for the FLOPs of a step.

    "auto" uses the first available of: given, formula, 6n. "given" uses only FLOPs from the settings or the script. If
    no FLOPs are given, "formula" uses only the formula for the sizes in the model's configuration, and "6n" only the
    formula with six FLOPs per parameter and token (four per frozen parameter). "off" publishes neither TFLOP/s nor MFU.
    """
    flops_per_token: AboveZero | None = None
    """FLOPs of the full model for one token, even if each rank holds only a part of the model."""
    flops_per_sample: AboveZero | None = None
    """FLOPs of the full model for one sample, even if each rank holds only a part of the model."""
    peak_tflops: AboveZero | None = None
    """Peak of one device in TFLOP/s for dense matrices.

    The default comes from a built-in table, by torch's device name.
    """
    model_parallel: Annotated[int, at_least(1, "a number of ranks")] | None = None
    """Number of ranks that together compute one copy of the model.

    The default is derived from the framework and the process groups that attach() receives.
    """

    def __post_init__(self) -> None:
        if self.method in _COUNTED:
            raise ConfigError(
                f"throughput.method must be one of {', '.join(get_args(Method))}; {self.method!r} is not supported, "
                "because FLOPs are not counted during training: call rankscope.count_flops() before attach() and set "
                "throughput.flops_per_token or throughput.flops_per_sample to the result"
            )
        validate(self, ConfigError, "throughput.")


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak TFLOP/s of a device for dense matrices, by data type.

    A value is None if the device does not support the type.
    """

    half: float  # float16 and bfloat16
    tf32: float | None
    float32: float
    bfloat16: bool = True


_SLICES: Final = 7
"""Number of compute slices into which MIG divides one GPU."""

# The first pattern that matches the name is used, so narrower patterns are listed first.
TABLE: Final[tuple[tuple[str, Peaks], ...]] = (
    (r"\bGB200\b", Peaks(2500, 1250, 80)),  # NVIDIA GB200 NVL72 data sheet, a 72nd part
    (r"\bB200\b", Peaks(2250, 1125, 75)),  # NVIDIA HGX B200 data sheet, an eighth
    (r"\bGH200\b", Peaks(989.4, 494.7, 66.9)),  # NVIDIA GH200 data sheet: an H100 or H200 with HBM
    (r"\bH200 NVL\b", Peaks(835.5, 417.5, 60)),  # NVIDIA H200 data sheet, column NVL
    (r"\bH200\b", Peaks(989.4, 494.7, 66.9)),  # NVIDIA H200 data sheet, column SXM
    (r"\bH100 NVL\b", Peaks(835.5, 417.5, 60)),  # NVIDIA H100 data sheet, column NVL
    (r"\bH100 PCIe\b", Peaks(756.5, 378, 51.2)),  # NVIDIA H100 data sheet of 2022, column PCIe
    (r"\bH[18]00\b", Peaks(989.4, 494.7, 66.9)),  # NVIDIA H100 Tensor Core GPU Architecture, SXM5
    (r"\bH20\b", Peaks(148, 74, 44)),  # NVIDIA H20 data sheet
    (r"\bA[18]00\b", Peaks(312, 156, 19.5)),  # NVIDIA A100 data sheet; SXM4 and PCIe alike
    (r"\bA10G\b", Peaks(70, 35, 35)),  # NVIDIA A10G data sheet
    (r"\bA10\b", Peaks(125, 62.5, 31.2)),  # NVIDIA A10 data sheet
    (r"\bA30\b", Peaks(165, 82, 10.3)),  # NVIDIA A30 data sheet
    (r"\bA40\b", Peaks(149.7, 74.8, 37.4)),  # NVIDIA A40 data sheet
    (r"\bRTX A6000\b", Peaks(154.8, 77.4, 38.7)),  # NVIDIA RTX A6000 data sheet
    (r"\bRTX 6000 Ada\b", Peaks(364.2, 182.1, 91.1)),  # NVIDIA RTX 6000 Ada data sheet
    (r"\bL40S\b", Peaks(362.05, 183, 91.6)),  # NVIDIA L40S data sheet
    (r"\bL40\b", Peaks(181.05, 90.5, 90.5)),  # NVIDIA L40 data sheet
    (r"\bL4\b", Peaks(121, 60, 30.3)),  # NVIDIA L4 data sheet
    (r"\bV100S\b", Peaks(130, None, 16.4, bfloat16=False)),  # NVIDIA V100 data sheet, column V100S PCIe
    (r"\bV100-(SXM|DGXS)", Peaks(125, None, 15.7, bfloat16=False)),  # NVIDIA V100 data sheet, column SXM2
    (r"\bV100\b", Peaks(112, None, 14, bfloat16=False)),  # NVIDIA V100 data sheet, column PCIe
    (r"\bT4\b", Peaks(65, None, 8.1, bfloat16=False)),  # NVIDIA T4 data sheet
    (r"\bRTX 5090\b", Peaks(209.5, 104.8, 104.8)),  # NVIDIA RTX Blackwell GPU Architecture, float32 accumulation
    (r"\bRTX 4090\b", Peaks(165.2, 82.6, 82.6)),  # NVIDIA Ada GPU Architecture, float32 accumulation
    (r"\bRTX 3090\b(?! Ti)", Peaks(71, 35.6, 35.6)),  # NVIDIA GA102 GPU Architecture, float32 accumulation
    (r"\bMI300X\b", Peaks(1307.4, 653.7, 163.4)),  # AMD Instinct MI300X data sheet
    (r"\bMI325X\b", Peaks(1307.4, 653.7, 163.4)),  # AMD Instinct MI325X data sheet
    (r"\bMI250X\b", Peaks(191.5, None, 47.9)),  # AMD Instinct MI250X data sheet, one die of two
    (r"\bMI250\b", Peaks(181.05, None, 45.3)),  # AMD Instinct MI250 data sheet, one die of two
    (r"\bMI210\b", Peaks(181, None, 45.3)),  # AMD Instinct MI210 data sheet
)


def peak_tflops(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Return the peak TFLOP/s of the device `name` for matrices of `dtype`; None if it is unknown.

    `name` is torch's name.

    `tf32` is true if torch multiplies float32 matrices in TF32.
    """
    peaks = next((peaks for pattern, peaks in TABLE if re.search(pattern, name)), None)
    whole = None if peaks is None else _of_dtype(peaks, dtype, tf32=tf32)
    slices = re.search(r"\bMIG (\d)g\.", name)
    return whole if whole is None or slices is None else whole * int(slices[1]) / _SLICES


def _of_dtype(peaks: Peaks, dtype: torch.dtype, *, tf32: bool) -> float | None:
    if dtype in (torch.float16, torch.bfloat16):
        return peaks.half if dtype is torch.float16 or peaks.bfloat16 else None
    if dtype is torch.float32:
        return peaks.tf32 if tf32 and peaks.tf32 is not None else peaks.float32
    return None
