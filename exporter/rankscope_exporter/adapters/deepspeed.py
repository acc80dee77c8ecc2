"""DeepSpeed: an engine around the model makes the update, from gradients that it has reduced, divided or not (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from rankscope_exporter.adapters.base import Framework, Hooking, TensorSpec
from rankscope_exporter.adapters.deepspeed_zero import ZeroStage, stage_of
from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod, unwrapped
from rankscope_exporter.adapters.partitioned_optimizer import PartitionedOptimizer
from rankscope_exporter.adapters.placement import Layout, loaded, sharded_over

# The engine calls this one method, at the boundary of an accumulation only, to clip and to step. There is no public
# hook for that moment, and none for what ZeRO has divided: a test runs against the pinned DeepSpeed.
_UPDATE = "_take_model_step"
_LAST_WHOLE_STAGE = 2


class _OfEngine:
    """What an engine says itself, whatever its optimizer is."""

    _engine: Any

    @property
    def module(self) -> nn.Module:
        """Return the user's own module."""
        module: nn.Module = self._engine.module
        return module

    @property
    def replicated(self) -> bool:
        """Return True."""
        return True

    def copies(self, world_size: int) -> int:
        """Return how many ranks train on different data."""
        return int(getattr(self._engine, "dp_world_size", world_size))

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks that end every update with the same parameters: of stage 3 none, nor those of experts."""
        group = getattr(self._engine, "seq_data_parallel_group", None)
        is_expert = getattr(parameter, "allreduce", True) is False
        if group is None or is_expert or self._engine.zero_optimization_stage() > _LAST_WHOLE_STAGE:
            return ()
        return dist.get_process_group_ranks(group)


class DeepSpeed(_OfEngine, Framework):
    """ZeRO stage 0 in float32: gradients are all-reduced when the last backward of a step is over.

    Clipping happens inside of `engine.step()`, and leaves no trace in the version of a gradient.
    """

    name: ClassVar[str] = "deepspeed"
    priority: ClassVar[int] = 30

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._engine: Any = model
        self._reduced = False

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` is an engine whose optimizer steps the model's own parameters."""
        return _is_engine(model) and _stage(model) is None

    @property
    def reduces(self) -> bool:
        """Return True."""
        return True

    @property
    def reduces_after_last_backward(self) -> bool:
        """Return True: the reduction follows the backward pass."""
        return True

    def reduces_in_backward(self) -> bool:
        """Return whether an update is about to begin."""
        return self._reduced

    @property
    def optimizer_takes_copies(self) -> bool:
        """Return True: see the class."""
        return True

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        """Return the engine's own, where the script names none."""
        return super().optimizers(given or _optimizers(self._engine))

    def install(self, hooking: Hooking) -> None:
        """Learn when an update begins: all gradients are reduced then, and none is clipped."""

        def reduced() -> None:
            self._reduced = True
            hooking.reduced()
            self._reduced = False

        before = hooking.always("the beginning of an update", reduced)

        def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before()
            return original(*args, **kwargs)

        hooking.keep(PatchedMethod(self._engine, _UPDATE, update))


class DeepSpeedZero(_OfEngine, PartitionedOptimizer):
    """ZeRO 1, 2 and 3, and all that keeps float32 copies: the optimizer is given flat parts of them."""

    name: ClassVar[str] = "deepspeed_zero"
    priority: ClassVar[int] = 30

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._engine: Any = model
        stage = _stage(model)
        assert stage is not None
        self._stage = stage
        self.parts = stage.parts()

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` is an engine with an optimizer of DeepSpeed's own kind."""
        return _is_engine(model) and _stage(model) is not None

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return the ranks among which it is divided, if it is."""
        whole = super().layout(parameter)
        groups = self._stage.process_groups
        return sharded_over(groups[id(parameter)], whole) if id(parameter) in groups else whole

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        """Return that each rank has a share of every element, of its own data."""
        return Layout("partial") if self.copies(world_size) > 1 else super().layout(parameter)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec | None:
        """Return the form of the whole gradient, in the type of the forward pass."""
        return TensorSpec(tuple(getattr(parameter, "ds_shape", parameter.shape)), parameter.dtype)

    def reduced_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return the form of the part, in the type that DeepSpeed accumulates in."""
        return TensorSpec(self.form(parameter).shape, self._stage.accumulates_in or parameter.dtype)

    @property
    def scatters(self) -> bool:
        """Return what the stage says."""
        return self._stage.scatters

    @property
    def reduces_each_micro_batch(self) -> bool | None:
        """Return whether the engine is told of several; what its boundary is set to by hand shows later."""
        return super().reduces_each_micro_batch if self._engine.gradient_accumulation_steps() == 1 else self.scatters

    def reduced_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return it from where the stage has it."""
        return self._stage.reduced(parameter)

    def earlier_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return it from where the stage has it."""
        return None if self._stage.scatters else self._stage.earlier(parameter)

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:  # noqa: ARG002 - all are the same
        """Return the engine's own, whichever of its wrappers the script names."""
        return tuple(unwrapped(item) for item in _optimizers(self._engine))

    def install(self, hooking: Hooking) -> None:
        """Learn when an update begins and ends."""
        self.watch(self._engine, _UPDATE, hooking)


def _is_engine(model: nn.Module) -> bool:
    return isinstance(model, loaded("deepspeed.runtime.engine", "DeepSpeedEngine"))


def _stage(engine: Any) -> ZeroStage | None:
    optimizer = engine.optimizer
    return None if optimizer is None or isinstance(optimizer, torch.optim.Optimizer) else stage_of(optimizer)


def _optimizers(engine: Any) -> tuple[Any, ...]:
    return () if engine.optimizer is None else (engine.optimizer,)
