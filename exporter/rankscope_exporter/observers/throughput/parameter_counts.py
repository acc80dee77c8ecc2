"""Computes three properties of a model that FLOP formulas need.

They are the number of parameters used per token, the dtype of matrix products, and the number of ranks per copy of the
model. Parameters are read from the dictionary `_parameters` of each module. A parametrized weight is a property:
reading the attribute would run code of the user, which may change buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from rankscope_exporter.adapters import Framework
from rankscope_exporter.adapters.placement import loaded
from rankscope_exporter.model.parameter_names import named_parameters, plain_name
from rankscope_exporter.observers.throughput.model_shape import sizes_of
from rankscope_exporter.process.identity import place_in


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


@dataclass(frozen=True, slots=True)
class Met:
    """Numbers of trained and frozen parameters with which one token is multiplied.

    Lookup tables do not count, and of all experts only those that process the token.
    """

    trained: float
    frozen: float


def parameters_met(framework: Framework, parallel: Parallel) -> Met:
    """Return the numbers of trained and frozen parameters that this rank contributes to one copy of the model.

    Of all experts, only the share that processes a token counts. The sums over all ranks of the copy are the numbers
    for the whole copy.
    """
    module = framework.module
    sizes = sizes_of(module)
    share = min(1.0, sizes["active_experts"] / sizes["experts"]) if {"active_experts", "experts"} <= sizes.keys() else 1
    counts = [0.0, 0.0]
    for name, elements, is_frozen in [*_of_flat_parameters(framework.model)] or _multiplied(module):
        counts[is_frozen] += (share if ".experts." in f".{name}." else 1) * elements
    ranks = 1 if framework.traits.parameters_are_local_parts else parallel.tensor
    return Met(counts[0] / ranks, counts[1] / ranks)


def _of_flat_parameters(model: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield each parameter in FSDP1's flat parameters, except embedding tables that no other module shares.

    A yielded tuple contains the parameter's name, the number of elements of the unsharded parameter, and whether the
    parameter is frozen.
    """
    for child in model.modules():
        flat = getattr(vars(child).get("_handle"), "flat_param", None)
        if flat is None or not hasattr(flat, "_param_infos"):
            continue
        tied = {(id(shared.prim_module), shared.prim_param_name) for shared in flat._shared_param_infos}  # noqa: SLF001 - FSDP1 has no public way
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):  # noqa: SLF001 - as above
            if not isinstance(info.module, nn.Embedding) or (id(info.module), info.param_name) in tied:
                yield f"{info.module_name}.{info.param_name}", shape.numel(), not flat.requires_grad


def _multiplied(module: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield each parameter of `module`, except embedding tables that no other module shares.

    A yielded tuple contains the parameter's name, the number of elements of the unsharded parameter, and whether the
    parameter is frozen.
    """
    # The values keep the parameters alive: FSDP2 replaces parameters, and a new one could get the id of a freed one.
    tables = {
        id(parameter): parameter
        for child in module.modules()
        if isinstance(child, nn.Embedding)
        for parameter in child.parameters()
    }
    for named in named_parameters(module):
        # A table that is tied to the output layer has a second name and is multiplied there.
        parameter = named.parameter
        if parameter is not None and (id(parameter) not in tables or named.aliases):
            yield named.name, whole_shape(parameter).numel(), not parameter.requires_grad


def why_not_six_n(module: nn.Module) -> str | None:
    """Return the reason why the formula 6 N is wrong for `module`, for example parameters that a token uses twice.

    Return None if no such reason was found.
    """
    sizes = sizes_of(module)
    for name, child in module.named_modules():
        if isinstance(child, nn.EmbeddingBag):
            return f"{plain_name(name)} combines many tokens to one row"
    for named in named_parameters(module):
        parameter = named.parameter
        shape = [] if parameter is None else [size for size in whole_shape(parameter) if size > 1]
        if ".experts." in f".{named.name}.":
            if not {"active_experts", "experts"} <= sizes.keys():
                return f"the configuration has no number of experts per token ({named.name})"
        elif len(shape) > 2:  # neither a matrix nor a vector: kernels of a convolution, or fused experts
            return f"{named.name} has {len(shape)} dimensions"
    return None


def convolution_in(module: nn.Module) -> str | None:
    """Return the name of the first convolution module in `module`; None if it contains no convolution."""
    return next((plain_name(name) for name, child in module.named_modules() if isinstance(child, _ConvNd)), None)


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
        policy = getattr(module, "mixed_precision", None) or _policy(module)
        dtype = getattr(policy, "param_dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    elements: dict[torch.dtype, int] = {}
    for parameter in framework.module.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    return max(elements, key=lambda dtype: elements[dtype]) if elements else torch.float32


def _policy(module: nn.Module) -> Any:
    if not isinstance(module, loaded("torch.distributed.fsdp", "FSDPModule")):
        return None
    return getattr(module._get_fsdp_state(), "_mp_policy", None)  # noqa: SLF001 - FSDP2 has no other way to ask


def multiplies_in_tf32() -> bool:
    """Return whether torch may multiply float32 matrices in TF32."""
    # Not torch.get_float32_matmul_precision(): it raises if a script has set the attribute that torch 2.9 added.
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)
