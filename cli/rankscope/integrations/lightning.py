"""Callback for Lightning: `Trainer(callbacks=[RankscopeCallback()])`.

The package `rankscope_exporter` contains the code.
"""

from rankscope_exporter.integrations.lightning import RankscopeCallback

__all__ = ["RankscopeCallback"]
