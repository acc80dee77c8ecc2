"""Adapters of training frameworks: each adapter describes how one framework wraps models and treats gradients.

The other modules are about models of every framework: hooks, names of parameters, tensors in arguments, tracers,
private names of torch.

To add a framework, add a file with a `Framework` subclass to this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from rankscope_exporter.adapters.base import Framework
from rankscope_exporter.adapters.pipeline import Pipeline, Stage
from rankscope_exporter.adapters.torch_private import CALLED, compiled_module, entry, is_stage, submodules_of
from rankscope_exporter.process.discovery import import_folder
from rankscope_exporter.process.errors import ConfigError

__all__ = ["Framework", "Stage", "are_chunks", "framework_of"]


def framework_of(model: Any) -> Framework:
    """Return the adapter for `model`.

    Of all adapters that match the model's wrapper, it is the one with the highest priority, and `Framework` itself
    without a wrapper. If `model` is an adapter, it is returned unchanged. A pipeline stage gets the pipeline adapter,
    which uses the adapter of the stage's module.

    If `model` is a list of several elements, they must be the chunks of one model or all pipeline stages of this rank.
    ConfigError is raised for any other list of several elements. A list of one element is treated as this element.
    """
    if isinstance(model, Framework):
        return model
    if isinstance(model, list | tuple):
        return framework_of(model[0]) if len(model) == 1 else _of_list(model)
    if is_stage(model):
        return _of_stages([model])
    model = _within(model)
    import_folder(__name__)
    adapters = sorted(_subclasses(Framework), key=lambda cls: cls.priority, reverse=True)
    compiled = compiled_module(model)
    inner = model if compiled is None else _within(compiled)
    framework = next((cls for cls in adapters if cls.matches(inner)), Framework)(inner)
    if compiled is not None:
        framework.model = model
        framework.traits = replace(framework.traits, is_compiled=True)
    return framework


def _within(model: Any) -> Any:
    """Return the module that wrappers of trainers call; `model` itself if it is no such wrapper.

    Such a wrapper has no parameters of its own.
    """
    inner = entry(submodules_of(model), "_module" if type(model).__module__.startswith("opacus.") else CALLED)
    if inner is None or not {*map(id, model.parameters())} <= {*map(id, inner.parameters())}:
        return model
    return _within(inner)


def are_chunks(models: Sequence[nn.Module]) -> bool:
    """Return whether `models` are the chunks of one model in a virtual pipeline on this rank."""
    return framework_of(nn.ModuleList(models)).takes_chunks


def _of_list(models: Sequence[Any]) -> Framework:
    if all(is_stage(model) for model in models):
        return _of_stages(sorted(models, key=lambda stage: stage.stage_index))
    framework = framework_of(nn.ModuleList(models)) if all(isinstance(model, nn.Module) for model in models) else None
    if framework is None or not framework.takes_chunks:
        raise ConfigError(
            "a list of models must contain the chunks of one model that Megatron-Core's DDP wraps, or pipeline stages; "
            "for separate models, attach a monitor to each model"
        )
    return framework


def _of_stages(stages: Sequence[Any]) -> Framework:
    return Pipeline(stages, [framework_of(stage.submod) for stage in stages])


def _subclasses(cls: type[Framework]) -> list[type[Framework]]:
    own = cls.__subclasses__()
    return [*own, *(further for subclass in own for further in _subclasses(subclass))]
