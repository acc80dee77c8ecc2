"""Pipeline parallelism (`torch.distributed.pipelining`): each rank trains one stage, micro-batch by micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn

from rankscope_exporter.frameworks.base import Form, Framework, Holder, Hooking, Removable
from rankscope_exporter.frameworks.layout import Layout
from rankscope_exporter.frameworks.loaded import loaded
from rankscope_exporter.naming import NamedParameter

# Before its first step a stage runs forward and backward on memory that nobody has filled, to learn shapes.
_TRIALS: Final = ("_forward_metadata_inference", "_backward_metadata_inference")


class Stage(Protocol):
    """What is needed of a stage of a pipeline: its module."""

    @property
    def submod(self) -> nn.Module:
        """The part of the model that this rank trains."""
        ...


class Pipeline(Framework):
    """What a `PipelineStage` makes of the framework around its own module.

    Gradients of micro-batches are summed, and divided by their number at the end of `schedule.step()`: before that they
    are unreduced, after it reduced. There is no hook for that moment, so the stage's method is replaced by one that
    says so, until detach().
    """

    name: ClassVar[str] = "pipeline"
    priority: ClassVar[int] = -2  # asked for a module it never matches

    def __init__(self, stage: Any, inner: Framework) -> None:
        super().__init__(stage.submod)
        self.stage = stage
        self.pp_stage = getattr(stage, "stage_index", None)
        self._inner = inner
        self._finishing = False

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return False for every module: a stage is none."""
        return is_stage(model)

    @property
    def module(self) -> nn.Module:
        """Return the user's own module of this stage."""
        return self._inner.module

    @property
    def replicated(self) -> bool:
        """Return whether stages of several pipelines are kept equal."""
        return self._inner.replicated

    def copies(self, world_size: int) -> int:
        """Return how many pipelines there are."""
        return self._inner.copies(max(1, world_size // self.stage.group_size))

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return what the inner framework says."""
        return self._inner.layout(parameter)

    def local_form(self, parameter: torch.Tensor) -> Form | None:
        """Return what the inner framework says."""
        return self._inner.local_form(parameter)

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        """Return what the inner framework says."""
        return self._inner.is_same_on(parameter, ranks)

    def is_in_place(self, named: NamedParameter) -> bool:
        """Return what the inner framework says."""
        return self._inner.is_in_place(named)

    @property
    def local_until_backward_ends(self) -> bool:
        """Return what the inner framework says."""
        return self._inner.local_until_backward_ends

    @property
    def interleaves_micro_batches(self) -> bool:
        """Return True: all schedules do, but for the last stage of some."""
        return True

    @property
    def reduces(self) -> bool:
        """Return whether what is left after `schedule.step()` is what the optimizer gets."""
        return self._inner.reduces or self.stage.group_size == torch.distributed.get_world_size()

    @property
    def finishes_after_backward(self) -> bool:
        """Return True: gradients are scaled, and reduced over pipelines, when all micro-batches are through."""
        return True

    def reduces_in_backward(self) -> bool:
        """Return False during backward passes, True when the stage finishes."""
        return self._finishing

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        """Return what the inner framework says."""
        return self._inner.holds_gradient(parameter)

    def install(self, hooking: Hooking) -> None:
        """Learn when the stage finishes its gradients."""
        self._inner.install(hooking)

        def finish(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._finishing = True
            hooking.reduced()
            self._finishing = False
            return result

        def see_nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with hooking.paused():
                return original(*args, **kwargs)

        hooking.keep(_Replaced(self.stage, "perform_reduce_grad", finish))
        for name in _TRIALS:
            hooking.keep(_Replaced(self.stage, name, see_nothing))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[Holder], None]) -> Removable:
        """Do what the inner framework does."""
        return self._inner.on_accumulated(parameter, hook)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Do what the inner framework does."""
        return self._inner.on_gradient(parameter, hook)


class _Replaced:
    """The stage's own method, behind one of the same name on the object. A method that is not there is left alone."""

    def __init__(self, stage: Any, name: str, around: Callable[..., Any]) -> None:
        self._stage = stage
        self._name = name
        original = getattr(stage, name, None)
        if original is not None:
            setattr(stage, name, functools.partial(around, original))

    def remove(self) -> None:
        self._stage.__dict__.pop(self._name, None)


def is_stage(model: Any) -> bool:
    """Return whether `model` is a stage of a pipeline rather than a module."""
    return isinstance(model, loaded("torch.distributed.pipelining.stage", "_PipelineStageBase"))
