"""The public API: monitor classes for training, and `connect`, `open_run` and `report` for readers of a store.

Names are imported when they are first used. A training process therefore never loads the store, and a query never loads
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from rankscope_contract import __version__

if TYPE_CHECKING:
    from rankscope.reports import open_run, report
    from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
    from rankscope_contract.rules.curve import CurveRule
    from rankscope_contract.rules.score import ScoreRule
    from rankscope_exporter import Anomaly, CaptureConfig, Monitor, MonitorConfig, count_flops
    from rankscope_msprobe.trainer_mon import TrainerMon
    from rankscope_storage.connection import connect

__all__ = [
    "Anomaly",
    "AnomalyNan",
    "AnomalyTurbulence",
    "CaptureConfig",
    "CurveRule",
    "Monitor",
    "MonitorConfig",
    "ScoreRule",
    "TrainerMon",
    "__version__",
    "connect",
    "count_flops",
    "open_run",
    "report",
]

_MODULES: Final = {
    "Anomaly": "rankscope_exporter",
    "AnomalyNan": "rankscope_contract.rules.anomaly",
    "AnomalyTurbulence": "rankscope_contract.rules.anomaly",
    "CaptureConfig": "rankscope_exporter",
    "CurveRule": "rankscope_contract.rules.curve",
    "Monitor": "rankscope_exporter",
    "MonitorConfig": "rankscope_exporter",
    "ScoreRule": "rankscope_contract.rules.score",
    "TrainerMon": "rankscope_exporter",
    "connect": "rankscope_storage.connection",
    "count_flops": "rankscope_exporter",
    "open_run": "rankscope.reports",
    "report": "rankscope.reports",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'rankscope' has no attribute {name!r}: available: {', '.join(sorted(_MODULES))}")
    try:
        value: object = getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"rankscope.{name} needs {missing.name}: {_remedy(missing.name)}") from missing
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _remedy(module: str | None) -> str:
    """Return the command that installs the missing module `name`. torch is never part of this command."""
    if module == "torch":
        return "install the build of torch for this machine"
    return "run pip install '.[store]' in a checkout of Rankscope"
