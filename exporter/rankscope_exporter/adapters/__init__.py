"""How a training framework wraps a model. A framework is added by adding a file with a `Framework` subclass."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from torch import nn

from rankscope_exporter.adapters.base import Framework
from rankscope_exporter.adapters.pipeline import Pipeline, Stage, is_stage
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.model.parameter_names import entry

__all__ = ["Framework", "Stage", "are_chunks", "framework_of"]


def framework_of(model: Any) -> Framework:
    """Return the adapter for `model`: the one of highest priority that knows its wrapper; an adapter is its own.

    Of a stage of a pipeline it is the stage's, around the adapter for its module; a list has the chunks of one model,
    or all stages of this rank.
    """
    if isinstance(model, Framework):
        return model
    if isinstance(model, list | tuple):
        return framework_of(model[0]) if len(model) == 1 else _of_chunks(model)
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    candidates = sorted(_derived(Framework), key=lambda cls: cls.priority, reverse=True)
    if is_stage(model):
        return _of_stages([model])
    inner = entry(model._modules, "_orig_mod") or model  # noqa: SLF001 - what torch.compile was given, by its name there
    framework = next(cls(inner) for cls in candidates if cls.matches(inner))
    framework.model = model
    return framework


def are_chunks(models: Sequence[nn.Module]) -> bool:
    """Return whether `models` are parts of one model that a rank of a virtual pipeline holds, measured together."""
    return framework_of(nn.ModuleList(models)).takes_chunks


def _of_chunks(chunks: Sequence[Any]) -> Framework:
    if all(is_stage(chunk) for chunk in chunks):
        return _of_stages(sorted(chunks, key=lambda stage: stage.stage_index))
    framework = framework_of(nn.ModuleList(chunks)) if all(isinstance(chunk, nn.Module) for chunk in chunks) else None
    if framework is None or not framework.takes_chunks:
        raise ConfigError(
            "a list is for chunks of one model that Megatron-Core's DDP wraps, or for stages of a pipeline: "
            "attach a monitor to each model"
        )
    return framework


def _of_stages(stages: Sequence[Any]) -> Framework:
    return Pipeline(stages, [framework_of(stage.submod) for stage in stages])


def _derived(cls: type[Framework]) -> list[type[Framework]]:
    own = cls.__subclasses__()
    return [*own, *(further for subclass in own for further in _derived(subclass))]
