"""Names in msprobe's output: the families with the kinds of Rankscope in each family, and shortened tensor names.

A family is the first word of a file name (`grad_reduced_0-4.csv`), of a TensorBoard task, or of an SQLite metric.
"""

from __future__ import annotations

import re
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
"""msprobe families of tensor statistics, and the kinds of Rankscope in each family.

The family `other` contains the kinds for which msprobe has no family.
"""

FEATURE_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "attention_hook": ("attention_entropy", "softmax_max"),
    "linear_hook": ("stable_rank", "spectral_norm"),
    "moe_router_weight_hook": ("router_similarity",),
    "moe_router_logit_hook": ("router_entropy",),
    "other": ("direction_agreement",),
}
"""msprobe families of features, and the kinds of Rankscope in each family.

Features are numbers that are not tensor statistics.
"""

FAMILY_OF: Final[dict[str, str]] = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}

_TAILS: Final = tuple(
    re.compile(rf"(?s:.*)\.({word}(?s:.*))") for word in (r"layers?\.", r"embeddings?\.", "final", "output", "norm")
)
"""Substrings at which a shortened name begins, in msprobe's order.

The first of them that occurs in the name after a dot is used, at its last position in the name.
"""


def family_names() -> frozenset[str]:
    """Return every value that the option `data_type_list` may contain: msprobe families and kinds of Rankscope."""
    features = {kind for kinds in FEATURE_FAMILIES.values() for kind in kinds}
    return frozenset(FAMILIES) | frozenset(FEATURE_FAMILIES) | frozenset(map(str, FAMILY_OF)) | features


def squashed(name: str) -> str:
    """Return `name` in the short form of msprobe's function `squash_name`: without the modules that wrap the model.

    Example: `layers.0.weight` for `module.decoder.layers.0.weight`.
    """
    return next((match[1] for tail in _TAILS if (match := tail.fullmatch(name))), name)


class Squash:
    """Shortens names as msprobe's function `squash_name` does.

    If two names have the same short form, the later name is not shortened.
    """

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the short form of `name`, or `name` itself if another name already has this short form.

        Each call with the same name returns the same result.
        """
        known = self._given.get(name)
        if known is None:
            short = squashed(name)
            known = self._given[name] = name if short in self._taken else short
            self._taken.add(known)
        return known
