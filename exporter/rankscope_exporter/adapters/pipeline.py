"""Pipeline parallelism (`torch.distributed.pipelining`): each rank trains stages of it, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, GradientSource, Hooking, Removable, TensorSpec
from rankscope_exporter.adapters.monitored_model import Borrowed, as_one, numbers_of
from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod
from rankscope_exporter.adapters.placement import Layout, loaded
from rankscope_exporter.model.parameter_names import NamedParameter

# Before its first step a stage runs forward and backward on memory that nobody has filled, to learn shapes.
_TRIALS: Final = ("_forward_metadata_inference", "_backward_metadata_inference")


class Stage(Protocol):
    """A stage of a pipeline, as far as it is used: its module."""

    @property
    def submod(self) -> nn.Module:
        """The part of the model that this rank trains."""
        ...


class Pipeline(Framework):
    """What one or several `PipelineStage` make of the frameworks around their own modules.

    Gradients of micro-batches are summed, and divided by their number when a stage has had its last backward pass:
    before that they are unreduced, after it reduced. There is no hook for that moment, so the stage's method is
    replaced by one that says so, until detach(). Of several stages each finishes for itself while others still compute.
    """

    name: ClassVar[str] = "pipeline"
    priority: ClassVar[int] = -2  # asked for a module it never matches

    def __init__(self, stages: Sequence[Any], inner: Sequence[Framework]) -> None:
        super().__init__(stages[0].submod)
        self.stages: Sequence[Any] = Borrowed(stages)
        self.pp_stage = getattr(stages[0], "stage_index" if len(stages) == 1 else "group_rank", None)
        self._inner = tuple(inner)
        self._numbers = numbers_of([framework.module for framework in inner])
        self._finished: set[int] = set()  # positions of the stages that have had their last backward pass
        self._finishing = False

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return False for every module: a stage is none."""
        return is_stage(model)

    @property
    def module(self) -> nn.Module:
        """Return the user's own module of this stage, or a list of those of all stages."""
        # Created for each use: a list that is kept would keep the modules alive.
        module = as_one([framework.module for framework in self._inner])
        if len(self._inner) > 1:
            module.training = self._inner[0].module.training  # a list is not told
        return module

    @property
    def numbers_of_chunks(self) -> Mapping[int, int]:
        """Return the stage of each parameter and module by its position here; nothing where there is one only."""
        return self._numbers

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """Return what the schedule calls for each micro-batch."""
        return [stage.submod for stage in self.stages]

    def _of(self, parameter: torch.Tensor) -> Framework:
        return self._of_identity(id(parameter))

    def _of_identity(self, identity: int) -> Framework:
        return self._inner[self._numbers.get(identity, 0)]

    @property
    def replicated(self) -> bool:
        """Return whether stages of several pipelines are kept equal."""
        return self._inner[0].replicated

    def copies(self, world_size: int) -> int:
        """Return how many pipelines there are."""
        return self._inner[0].copies(max(1, world_size // self.stages[0].group_size))

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Ask the inner framework."""
        return self._of(parameter).layout(parameter)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec | None:
        """Ask the inner framework."""
        return self._of(parameter).local_spec(parameter)

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        """Ask the inner framework."""
        return self._of(parameter).is_same_on(parameter, ranks)

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Ask the inner framework."""
        return self._of(parameter).replicas(parameter)

    def is_in_place(self, named: NamedParameter) -> bool:
        """Ask the inner framework."""
        return self._of_identity(named.identity).is_in_place(named)

    def parameter(self, named: NamedParameter) -> nn.Parameter | None:
        """Ask the inner framework."""
        return self._of_identity(named.identity).parameter(named)

    @property
    def local_until_backward_ends(self) -> bool:
        """Return what the inner framework says; of several stages one may have divided while another computes."""
        return len(self.stages) == 1 and self._inner[0].local_until_backward_ends

    @property
    def interleaves_micro_batches(self) -> bool:
        """Return True: all schedules do, but for the last stage of some."""
        return True

    @property
    def reduces(self) -> bool:
        """Return whether what is left after `schedule.step()` is what the optimizer gets."""
        return self._inner[0].reduces or self.stages[0].group_size == torch.distributed.get_world_size()

    @property
    def reduces_after_last_backward(self) -> bool:
        """Return True: gradients are scaled, and reduced over pipelines, when all micro-batches are through."""
        return True

    @property
    def reduces_each_micro_batch(self) -> bool | None:
        """Return None: schedules that compute gradients of weights apart have no moment at which their sum is whole."""
        return None

    def reduces_in_backward(self) -> bool:
        """Return False during backward passes, True when the last stage finishes."""
        return self._finishing

    def holds_gradient(self, parameter: nn.Parameter) -> bool:
        """Ask the inner framework."""
        return self._of(parameter).holds_gradient(parameter)

    def install(self, hooking: Hooking) -> None:
        """Learn when the stages finish their gradients."""
        for number, (stage, inner) in enumerate(zip(self.stages, self._inner, strict=True)):
            inner.install(hooking)
            self._follow(stage, number, hooking)

    def _follow(self, stage: Any, number: int, hooking: Hooking) -> None:
        def finish(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._finished.add(number)
            if len(self._finished) == len(self.stages):
                self._finished.clear()
                self._finishing = True
                hooking.reduced()
                self._finishing = False
            return result

        def see_nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with hooking.paused():
                return original(*args, **kwargs)

        hooking.keep(PatchedMethod(stage, "perform_reduce_grad", finish))
        for name in _TRIALS:
            if hasattr(stage, name):
                hooking.keep(PatchedMethod(stage, name, see_nothing))

    def on_accumulated(self, parameter: nn.Parameter, hook: Callable[[GradientSource], None]) -> Removable:
        """Do what the inner framework does."""
        return self._of(parameter).on_accumulated(parameter, hook)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Removable:
        """Do what the inner framework does."""
        return self._of(parameter).on_gradient(parameter, hook)


def is_stage(model: Any) -> bool:
    """Return whether `model` is a stage of a pipeline rather than a module."""
    return isinstance(model, loaded("torch.distributed.pipelining.stage", "_PipelineStageBase"))
