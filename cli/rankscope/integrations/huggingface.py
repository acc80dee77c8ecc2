"""`Trainer(callbacks=[RankscopeCallback()])` for Hugging Face. The exporter package contains the code."""

from rankscope_exporter.integrations.huggingface import RankscopeCallback

__all__ = ["RankscopeCallback"]
