"""Tags of values in TensorBoard's event files, and histograms in the form of these files.

The tag of a statistic has the form `{vpp}:{name}.{input|output}:{micro}/{rank}/{task}_{op}`. Parameters and
gradients have neither side nor micro step: `{vpp}:{name}/{rank}/{task}_{op}`. The rank is written as `rank0`, and the
task is a family of tensors. The functions have no side effects.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_SCHEME: Final = re.compile(r"linear:(?P<low>[^:]+):(?P<high>[^:]+):(?P<bins>\d{1,6})")


def event_tag(name: str, task: str, *, rank: int, vpp_stage: int = 0, micro_step: int | None = None) -> str:
    """Return the tag of a value. `name` has a module's slot (`layers.0.input_1`), `task` a statistic (`actv_norm`)."""
    encoded = name.replace("%", "%25").replace(":", "%3A")
    micro = "" if micro_step is None else f":{micro_step}"
    return f"{vpp_stage}:{encoded}{micro}/rank{rank}/{task}"


def scalar_tag(name: str, labels: Mapping[str, Any]) -> str:
    """Return the tag of a scalar: its name, followed by its labels by name, such as `learning_rate/group=a`."""
    return "/".join([name, *(f"{key}={value}" for key, value in sorted(labels.items()))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A histogram in the form of event files.

    `limits` has the upper limit of each bucket; the first bucket begins at `low`. `total` and `squares` are the sum of
    the values and of their squares, computed from the centers of the buckets.
    """

    low: float
    limits: Sequence[float]
    counts: Sequence[int]
    total: float
    squares: float


def buckets(row: Mapping[str, Any]) -> Buckets | None:
    """Return the histogram of a row of the dataset `histograms`; None if its bins are not linear.

    Values outside of the range of the bins are in one additional bucket on each side, if there are such values. An
    additional bucket is as wide as a bin, because the values in it are not known. Values that are not finite are
    omitted.
    """
    scheme = _SCHEME.fullmatch(row["scheme"])
    if scheme is None:
        return None
    low, high, bins = float(scheme["low"]), float(scheme["high"]), int(scheme["bins"])
    if bins != len(row["counts"]) or not low < high:
        return None
    width = (high - low) / bins
    edges = [low + width * place for place in range(bins)] + [high]
    counts = list(row["counts"])
    if row["below"]:
        edges, counts = [low - width, *edges], [row["below"], *counts]
    if row["above"]:
        edges, counts = [*edges, high + width], [*counts, row["above"]]
    centers = [(left + right) / 2 for left, right in itertools.pairwise(edges)]
    return Buckets(
        low=edges[0],
        limits=edges[1:],
        counts=counts,
        total=sum(center * count for center, count in zip(centers, counts, strict=True)),
        squares=sum(center * center * count for center, count in zip(centers, counts, strict=True)),
    )
