"""Views and table macros over the datasets: curves, smoothing, what a step should have been. SQL text, like all views.

A macro reads any relation: a view, or what the statement itself names with WITH.
"""

from __future__ import annotations

from typing import Final

from rankscope_storage.macros.curves import SCALAR_CURVE
from rankscope_storage.macros.deviations import DEVIATION_MACROS
from rankscope_storage.macros.histories import HISTORY_VIEWS
from rankscope_storage.macros.latest import NONFINITE, TENSOR_LATEST
from rankscope_storage.macros.smoothing import SMOOTHING_MACROS
from rankscope_storage.macros.thinning import DOWNSAMPLE

MACROS: Final = (
    *HISTORY_VIEWS,
    TENSOR_LATEST,
    NONFINITE,
    *SMOOTHING_MACROS,
    DOWNSAMPLE,
    SCALAR_CURVE,
    *DEVIATION_MACROS,
)
"""Statements that need nothing but the views of the datasets and each other, in an order that works."""
