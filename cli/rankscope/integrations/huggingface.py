"""Callback for Hugging Face: `Trainer(callbacks=[RankscopeCallback()])`.

The package `rankscope_exporter` contains the code.
"""

from rankscope_exporter.integrations.huggingface import RankscopeCallback

__all__ = ["RankscopeCallback"]
