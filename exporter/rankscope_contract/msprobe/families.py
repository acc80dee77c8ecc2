"""The families of the existing tool's output, and the kinds of ours that each holds.

A family is the first word of a file name (`grad_reduced_0-4.csv`), of a TensorBoard task and of an SQLite metric.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.model.kinds import Kind

FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "actv": (Kind.ACT_IN, Kind.ACT_OUT),
    "actv_grad": (Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT),
    "grad_unreduced": (Kind.GRAD_UNREDUCED,),
    "grad_reduced": (Kind.GRAD_REDUCED,),
    "exp_avg": (Kind.EXP_AVG,),
    "exp_avg_sq": (Kind.EXP_AVG_SQ,),
    "param_origin": (Kind.PARAM_BEFORE,),
    "param_updated": (Kind.PARAM_AFTER,),
    "other": (Kind.COMM_IN, Kind.COMM_OUT, Kind.GRAD_CLIPPED, Kind.MOMENTUM),
}
"""`other` takes what the tool has no family for, so that no kind of ours is without one."""

FEATURE_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "attention_hook": ("attention_entropy", "softmax_max"),
    "linear_hook": ("stable_rank", "spectral_norm"),
    "moe_router_weight_hook": ("router_similarity",),
    "moe_router_logit_hook": ("router_entropy",),
    "other": ("direction_agreement",),
}
"""Families of features, and the kinds in each."""

FAMILY_OF: Final[dict[str, str]] = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}


def family_names() -> frozenset[str]:
    """Return every name that `data_type_list` may hold: families, and our own kinds."""
    features = {kind for kinds in FEATURE_FAMILIES.values() for kind in kinds}
    return frozenset(FAMILIES) | frozenset(FEATURE_FAMILIES) | frozenset(map(str, FAMILY_OF)) | features
