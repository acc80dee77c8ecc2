"""`Trainer(callbacks=[RankscopeCallback()])` for Lightning. The exporter package contains the code."""

from rankscope_exporter.integrations.lightning import RankscopeCallback

__all__ = ["RankscopeCallback"]
