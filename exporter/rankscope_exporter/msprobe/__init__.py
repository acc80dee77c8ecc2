"""The call shapes and the JSON of the training monitor of msprobe, kept for scripts that were written for it.

`TrainerMon` takes what that tool's takes; `Monitor("monitor_config.json")` takes its configuration as it is. What each
option, call and file becomes is told in docs/migration.md. Nothing else of Rankscope depends on this room but
`config.py`, which hands over what it recognises as the other tool's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope_exporter.msprobe.trainer_mon import TrainerMon

__all__ = ["TrainerMon"]


def __getattr__(name: str) -> object:
    """Return `TrainerMon`: it stands upon the configuration, which itself looks into this room."""
    if name != "TrainerMon":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.trainer_mon").TrainerMon
