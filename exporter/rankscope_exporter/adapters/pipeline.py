"""Adapter for pipeline parallelism (`torch.distributed.pipelining`): each rank trains one stage or several stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, FrameworkTraits, GradientSource
from rankscope_exporter.adapters.hook_context import HookContext
from rankscope_exporter.adapters.monitored_model import Borrowed, as_one, numbers_of
from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.parameter_names import NamedParameter, TensorSpec
from rankscope_exporter.adapters.placement import Layout
from rankscope_exporter.adapters.torch_private import SHAPE_INFERENCE


class Stage(Protocol):
    """A stage of a pipeline. The adapter uses only its module."""

    @property
    def submod(self) -> nn.Module:
        """The module of the stage: the part of the model that this rank trains."""


class Pipeline(Framework):
    """Adapter for one or several `PipelineStage` objects of this rank. It uses the adapters of their modules.

    Gradients of micro-batches are summed. After the last backward pass of a stage, the stage divides them by the number
    of micro-batches. Gradients count as unreduced before this division, and as reduced after it. There is no hook for
    this division, so until detach() the dividing method of the stage is replaced by one that also reports the division.
    Of several stages, one may finish while others still compute.

    Methods with a parameter as an argument call the adapter of the stage that contains the parameter.
    """

    def __init__(self, stages: Sequence[Any], inner: Sequence[Framework]) -> None:
        super().__init__(stages[0].submod)
        self.stages: Sequence[Any] = Borrowed(stages)
        self.pp_stage = getattr(stages[0], "stage_index" if len(stages) == 1 else "group_rank", None)
        self._inner = tuple(inner)
        self.chunk_numbers = numbers_of([framework.module for framework in inner])
        self._finished: set[int] = set()  # positions of the stages that have finished their last backward pass
        self._finishing = False
        traits = inner[0].traits
        self.traits = FrameworkTraits(
            replicated=traits.replicated,
            # One pipeline over all ranks: the gradients after `schedule.step()` are the ones that the optimizer gets.
            reduces=traits.reduces or stages[0].group_size == torch.distributed.get_world_size(),
            reduces_each_micro_batch=None,  # with separate weight gradients, a schedule never holds a complete sum
            reduces_after_last_backward=True,
            # One of several stages may already have divided its gradients while another still computes.
            local_until_backward_ends=len(stages) == 1 and traits.local_until_backward_ends,
            interleaves_micro_batches=True,
            is_compiled=traits.is_compiled,
        )

    @property
    def module(self) -> nn.Module:
        # If this rank has several stages, return a list of their modules.
        # Created for each use: a list that is kept would keep the modules alive.
        return as_one([framework.module for framework in self._inner])

    def is_training(self) -> bool:
        return super().is_training() and self.stages[0].has_backward  # False in `schedule.eval()`

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return [stage.submod for stage in self.stages]

    def _of(self, identity: int) -> Framework:
        return self._inner[self.chunk_numbers.get(identity, 0)]

    def copies(self, world_size: int) -> int:
        return self._inner[0].copies(max(1, world_size // self.stages[0].group_size))

    def layout(self, parameter: torch.Tensor) -> Layout:
        return self._of(id(parameter)).layout(parameter)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        return self._of(id(parameter)).local_spec(parameter)

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        return self._of(id(parameter)).is_same_on(parameter, ranks)

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        return self._of(id(parameter)).replicas(parameter)

    def is_in_place(self, named: NamedParameter) -> bool:
        return self._of(named.identity).is_in_place(named)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        return self._of(named.identity).parameter(named)

    def reduces_in_backward(self) -> bool:
        # True only while the monitor is notified that all stages of this rank have divided their gradients.
        return self._finishing

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        return self._of(id(parameter)).holds_gradient(parameter)

    def install(self, hooking: HookContext) -> None:
        # While a stage infers the shapes of its tensors, the hooks of the monitor do nothing.
        for number, (stage, inner) in enumerate(zip(self.stages, self._inner, strict=True)):
            inner.install(hooking)
            self._watch(stage, number, hooking)

    def _watch(self, stage: Any, number: int, hooking: HookContext) -> None:
        def finish(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._finished.add(number)
            if len(self._finished) == len(self.stages):
                self._finished.clear()
                self._finishing = True
                hooking.reduced()
                self._finishing = False
            return result

        def run_unseen(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            was_active, hooking.active = hooking.active, False
            try:
                return original(*args, **kwargs)
            finally:
                hooking.active = was_active

        hooking.keep(PatchedMethod(stage, "perform_reduce_grad", finish))
        for name in SHAPE_INFERENCE:
            if hasattr(stage, name):
                hooking.keep(PatchedMethod(stage, name, run_unseen))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        return self._of(id(parameter)).on_accumulated(parameter, hook)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        return self._of(id(parameter)).on_gradient(parameter, hook)
