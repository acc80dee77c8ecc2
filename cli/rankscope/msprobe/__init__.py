"""msprobe's converters and its anomaly processor, with the names, arguments and results of msprobe's manual.

They read the folders that msprobe or Rankscope wrote, and need no store. Steps are those of msprobe, from 0. A script
that imports from `msprobe.pytorch.monitor.csv2tb` or from `msprobe.core.monitor` imports from `rankscope.msprobe`
instead; the modules of this package have the names of msprobe's modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.msprobe.csv2db import CSV2DBConfig, csv2db
from rankscope.msprobe.csv2tb import csv2tensorboard_by_step

if TYPE_CHECKING:
    from rankscope.msprobe.anomaly_processor import analyse_anomalies

__all__ = ["CSV2DBConfig", "analyse_anomalies", "csv2db", "csv2tensorboard_by_step"]


def __getattr__(name: str) -> object:
    if name != "analyse_anomalies":
        raise AttributeError(f"module 'rankscope.msprobe' has no attribute {name!r}: available: {', '.join(__all__)}")
    # Not imported above: `python -m rankscope.msprobe.anomaly_processor` warns if the package imports the module.
    from rankscope.msprobe.anomaly_processor import analyse_anomalies

    return analyse_anomalies
