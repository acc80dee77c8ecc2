"""Computes TFLOP/s of this rank's device, and the share of the device's peak (MFU), for steps with a known duration.

The publisher thread computes both values.

The FLOPs of a step are those that the script logs, or those of a token or sample times the number that the script logs.
Without a setting, the FLOPs of a token are 6 N. No code of the user runs to count them. Parameters are therefore read
from the dictionary `_parameters` of each module, because a parametrized weight is a property. Recomputed activations do
not count: the result is the model FLOPs utilization (MFU), not the hardware FLOPs utilization. What is unknown is not
published.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Final, Literal

import torch
from torch import nn

from rankscope_exporter.adapters import Framework, torch_private
from rankscope_exporter.adapters.fsdp import is_sharded, units
from rankscope_exporter.adapters.parameter_names import named_parameters, plain_name
from rankscope_exporter.adapters.placement import loaded
from rankscope_exporter.adapters.process_group import place_in
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.validation import at_least, number, validate
from rankscope_exporter.records.record import Cause, Pending, Scalar, StepObserver, StepRecord


@dataclass(frozen=True, slots=True)
class Parallel:
    """Numbers of ranks that divide one copy of the model, for tensor and pipeline parallelism and in total."""

    tensor: int = 1
    pipeline: int = 1
    ranks: int = 1
    """Number of all ranks that together compute one copy, including those that divide sequences or experts."""


ALONE: Final = Parallel()
"""The numbers of ranks for a model that is not divided: each rank computes a full copy."""


def parallel_of(framework: Framework, world_size: int, groups: Mapping[str, Any]) -> Parallel:
    """Return the numbers of ranks that divide the model.

    The source is the framework and the process groups passed to `attach`.
    """
    ranks = max(1, world_size // max(1, framework.copies(world_size)))
    stages = getattr(framework, "stages", ())  # of torch's pipeline
    pipeline = _size(groups.get("pp_group")) or (int(stages[0].group_size) if stages else 1)
    tensor = _size(groups.get("tp_group")) or _mesh_size(framework.module, "tp") or max(1, ranks // pipeline)
    return Parallel(tensor, pipeline, max(ranks, tensor * pipeline))


def _size(group: Any) -> int | None:
    place = place_in(group)
    return None if place is None else len(place[1])


def _mesh_size(module: nn.Module, name: str) -> int | None:
    distributed = loaded("torch.distributed.tensor", "DTensor")
    for parameter in module.parameters() if distributed else ():
        if isinstance(parameter, distributed):
            mesh = parameter.device_mesh
            names = mesh.mesh_dim_names or ()
            if name in names:
                return int(mesh.shape[names.index(name)])
    return None


def six_n(framework: Framework, parallel: Parallel) -> float:
    """Return the FLOPs of a token on this rank: 6 for each trained parameter, and 4 for each frozen one.

    Lookup tables do not count. The sum over all ranks of a copy of the model is the number for the whole copy.
    """
    parameters = [*_of_flat_parameters(framework.model)] or _multiplied(framework.module)
    flops = sum((6 if is_trained else 4) * elements for elements, is_trained in parameters)
    return flops / (1 if framework.traits.parameters_are_local_parts else parallel.tensor)


def misfit(module: nn.Module) -> str | None:
    """Return the reason why 6 N does not fit a model; None if a token is multiplied once with each parameter."""
    for name, child in module.named_modules():
        if isinstance(child, torch_private.CONVOLUTION):
            return f"{plain_name(name)} is a convolution"
        if isinstance(child, nn.EmbeddingBag):
            return f"{plain_name(name)} combines many tokens to one row"
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False) is True:
        return "the encoder and the decoder of the model receive different tokens"
    for named in named_parameters(module):
        if ".experts." in f".{named.name}.":
            return f"a token uses only some of the experts ({named.name})"
        shape = [] if named.parameter is None else [size for size in whole_shape(named.parameter) if size > 1]
        if len(shape) > 2:  # neither a matrix nor a vector, such as fused experts
            return f"{named.name} has {len(shape)} dimensions"
    return None


def _of_flat_parameters(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield the elements of each unsharded parameter in FSDP1's flat parameters, and whether it is trained.

    Embedding tables that no other module shares are left out.
    """
    for unit in units(model):
        flat = torch_private.flat_parameter(unit)
        tied = {(id(shared.prim_module), shared.prim_param_name) for shared in torch_private.shared_infos(flat)}
        for info, shape in zip(torch_private.flat_infos(flat), torch_private.flat_shapes(flat), strict=True):
            if not isinstance(info.module, nn.Embedding) or (id(info.module), info.param_name) in tied:
                yield shape.numel(), flat.requires_grad


def _multiplied(module: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield the elements of each unsharded parameter of `module`, and whether it is trained.

    Embedding tables that no other module shares are left out.
    """
    # The list keeps the parameters alive: FSDP2 replaces parameters, and a new one could get the id of a freed one.
    tables = [p for child in module.modules() if isinstance(child, nn.Embedding) for p in child.parameters()]
    ids = set(map(id, tables))
    for named in named_parameters(module):
        # A table that is tied to the output layer has a second name and is multiplied there.
        parameter = named.parameter
        if parameter is not None and (id(parameter) not in ids or named.aliases):
            yield whole_shape(parameter).numel(), parameter.requires_grad


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the full shape of a sharded parameter, or the shape on this rank if the full shape is unknown."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def compute_dtype(framework: Framework, autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the model computes matrix products.

    It is the dtype of autocast. Without autocast, it is the parameter dtype of FSDP's mixed precision. Without both, it
    is the floating-point dtype with the most parameter elements.
    """
    if autocast is not None:
        return autocast
    for module in framework.model.modules():
        own = torch_private.mixed_precision_policy(module) if is_sharded(module) else None
        policy = getattr(module, "mixed_precision", None) or own
        dtype = getattr(policy, "param_dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    elements: Counter[torch.dtype] = Counter()
    for parameter in framework.module.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] += parameter.numel()
    return max(elements, key=elements.__getitem__, default=torch.float32)


def multiplies_in_tf32() -> bool:
    """Return whether torch may multiply float32 matrices in TF32."""
    # Not torch.get_float32_matmul_precision(): it raises if a script has set the attribute that torch 2.9 added.
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)


Method = Literal["auto", "given", "6n", "off"]
AboveZero = Annotated[float, number("a number above 0", math.ulp(0.0))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """Settings of TFLOP/s and MFU. FLOPs are those of forward and backward pass, without recomputed activations."""

    method: Method = "auto"
    """Source of the FLOPs of a step.

    "auto" and "6n" use FLOPs from the script or the settings, and otherwise 6 N: six FLOPs for each parameter and
    token (four for a frozen parameter). "given" does not use 6 N. "off" publishes neither TFLOP/s nor MFU.
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
        given: str = self.method
        if given == "formula":
            raise ConfigError(
                'throughput.method "formula" was removed: call rankscope.count_flops() before attach() and set '
                "throughput.flops_per_token to its result"
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
    (r"\bH[12]00 NVL\b", Peaks(835.5, 417.5, 60)),  # NVIDIA H100 and H200 data sheets, column NVL
    (r"\bG?H200\b", Peaks(989.4, 494.7, 66.9)),  # NVIDIA data sheets: H200, column SXM; GH200, H100 or H200 with HBM
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
    (r"\bMI3(00|25)X\b", Peaks(1307.4, 653.7, 163.4)),  # AMD Instinct MI300X and MI325X data sheets
    (r"\bMI250X\b", Peaks(191.5, None, 47.9)),  # AMD Instinct MI250X data sheet, one die of two
    (r"\bMI250\b", Peaks(181.05, None, 45.3)),  # AMD Instinct MI250 data sheet, one die of two
    (r"\bMI210\b", Peaks(181, None, 45.3)),  # AMD Instinct MI210 data sheet
)


def peak_tflops(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Return the peak TFLOP/s of torch's device `name` for matrices of `dtype`, in TF32 if float32 is so set."""
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


GIVEN: Final = "given"

SIX_N: Final = "6n"

_AMOUNTS: Final = ("flops", "tokens", "samples")
"""Names of logged numbers from which the FLOPs of a step follow."""


@dataclass(eq=False)
class Throughput(StepObserver):
    """Computes TFLOP/s and MFU from the duration and the amount of work of each step."""

    framework: Framework
    config: ThroughputConfig
    parallel: Parallel
    _: KW_ONLY
    device: torch.device
    report: Callable[[str], None]
    """Function that publishes its text as an event and as a console line."""
    is_first: bool = True
    """True on rank 0."""

    def __post_init__(self) -> None:
        self.parallel = replace(self.parallel, ranks=self.config.model_parallel or self.parallel.ranks)
        # Without a pipeline, all ranks have the same reason.
        self._reports_absence = self.is_first or self.parallel.pipeline > 1
        self._absence = "the steps log no tokens; call monitor.log(tokens=…)"
        self._autocast: torch.dtype | None = None

    # On the training thread.

    def on_forward_begin(self) -> None:
        if self._autocast is None and torch.is_autocast_enabled(self.device.type):
            self._autocast = torch.get_autocast_dtype(self.device.type)

    def on_step_timed(self, record: StepRecord, cause: Cause, logged: Sequence[Pending]) -> None:
        if self.config.method != "off" and cause != "end":
            record.later.append(functools.partial(self._scalars, logged, record.pending))

    # On the publisher's thread.

    def _scalars(self, logged: Sequence[Pending], timed: Sequence[Pending]) -> list[Scalar]:
        """Return TFLOP/s and MFU of a step. Waits for copies of logged tensors to the host."""
        seconds = next((item.value for item in timed if item.name == "step_seconds"), 0.0)
        if not isinstance(seconds, float) or seconds <= 0 or (found := self._flops(logged)) is None:
            return []
        flops, method = found
        if not 0 < flops < math.inf:  # for example 0 tokens or NaN was logged
            return []
        tflops = flops / seconds / 1e12
        scalars = [Scalar("tflops_per_gpu", tflops, "TFLOP/s", {"method": method})]
        if self._peak is not None:
            scalars.append(Scalar("mfu", tflops / self._peak, "ratio", {"method": method}))
        return scalars

    def _flops(self, logged: Sequence[Pending]) -> tuple[float, str] | None:
        """Return the FLOPs of the step on this rank's device, and the method that computed this number.

        Return None if the FLOPs are unknown.
        """
        config, ranks = self.config, self.parallel.ranks
        amounts: dict[str, float] = {}
        for item in logged:
            if item.name in _AMOUNTS:
                amounts[item.name] = amounts.get(item.name, 0.0) + item.scalar().value
        tokens, samples = amounts.get("tokens"), amounts.get("samples")
        if "flops" in amounts:
            return amounts["flops"], GIVEN
        if config.flops_per_token is not None and tokens is not None:
            return config.flops_per_token * tokens / ranks, GIVEN
        if config.flops_per_sample is not None and samples is not None:
            return config.flops_per_sample * samples / ranks, GIVEN
        if config.method == GIVEN:
            return None
        try:
            per_token = None if tokens is None else self._flops_per_token
        except ReferenceError:  # the script has deleted its model
            return None
        if tokens is None or per_token is None:
            self._report_absence(is_expected=tokens is not None)
            return None
        return per_token * tokens, SIX_N

    @functools.cached_property
    def _flops_per_token(self) -> float | None:
        reason = misfit(self.framework.module)
        if reason is not None:
            self._absence = f"{reason}; use rankscope.count_flops()"
            return None
        return six_n(self.framework, self.parallel)

    def _report_absence(self, *, is_expected: bool) -> None:
        """Report once why TFLOP/s and MFU are not published, if the user probably expects them.

        This is so if the script logs tokens, or if a throughput setting is not the default.
        """
        is_due, self._reports_absence = self._reports_absence, False
        if is_due and (is_expected or self.config != ThroughputConfig()):
            self.report(f"TFLOP/s and MFU are absent: {self._absence}")

    @functools.cached_property
    def _peak(self) -> float | None:
        name = device_name(self.device)
        if self.config.peak_tflops is not None or name is None:
            return self.config.peak_tflops
        dtype = compute_dtype(self.framework, self._autocast)
        peak = peak_tflops(name, dtype, tf32=multiplies_in_tf32())
        if peak is None:
            self.report(f"the peak FLOP/s of {name!r} in {dtype} is unknown: set throughput.peak_tflops for MFU")
        return peak


def device_name(device: torch.device) -> str | None:
    """Return torch's name of an accelerator; None for a CPU, or if torch has no names for this type of device."""
    if device.type == "cpu":
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return None if name is None else str(name(device))
