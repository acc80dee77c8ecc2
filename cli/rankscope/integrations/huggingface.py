"""`Trainer(callbacks=[RankscopeCallback()])` for Hugging Face. The callback lives in the exporter's room."""

from rankscope_exporter.integrations.huggingface import RankscopeCallback

__all__ = ["RankscopeCallback"]
