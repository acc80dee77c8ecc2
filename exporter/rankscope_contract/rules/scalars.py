"""Names of the scalars to which a limit applies: losses and norms."""

from __future__ import annotations

import re
from typing import Final

LIMITED: Final = "(?i).*(loss|losses|norm|norms)([^a-z].*)?"
NOT_LIMITED: Final = (
    "(?i)(.*[^a-z])?(scale|scaler|mask|bytes|time|seconds|ms|tokens|count|num|coef|coefficient)([^a-z].*)?"
)
"""Regular expressions for whole names, in the syntax that Python and Prometheus share.

A limit applies to a name that matches the first and not the second, such as `grad_norm` but not `loss_scale`.
"""


def is_limited(name: str) -> bool:
    """Return whether a limit on magnitudes applies to the scalar `name`, because it is a loss or a norm."""
    return re.fullmatch(LIMITED, name) is not None and re.fullmatch(NOT_LIMITED, name) is None
