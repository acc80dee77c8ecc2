"""Callback for Lightning: `Trainer(callbacks=[RankscopeCallback()])`.

The package `rankscope_exporter` contains the code.
"""

from rankscope_exporter import Monitor
from rankscope_exporter.process.inert import Inert

if issubclass(Monitor, Inert):  # the exporter cannot be imported
    from lightning.pytorch import Callback

    class RankscopeCallback(Inert, Callback):  # type: ignore[misc]  # has no types
        """A callback that does nothing."""

else:
    from rankscope_exporter.integrations.lightning import RankscopeCallback

__all__ = ["RankscopeCallback"]
