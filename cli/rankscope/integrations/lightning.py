"""`Trainer(callbacks=[RankscopeCallback()])` for Lightning. The callback lives in the exporter's room."""

from rankscope_exporter.integrations.lightning import RankscopeCallback

__all__ = ["RankscopeCallback"]
