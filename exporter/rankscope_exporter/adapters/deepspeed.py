"""Adapters for DeepSpeed, whose engine wraps the model and updates it.

The engine reduces gradients and, with ZeRO, divides them among the ranks. When all micro-batches of a step are
accumulated, it calls one method, `_take_model_step`, to clip gradients and to step the optimizer. DeepSpeed has no
public hook for this call, and no public access to the parts of tensors that a rank has with ZeRO. The adapters
therefore use private names of DeepSpeed. A test checks them with the pinned version of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from rankscope_exporter.adapters.base import Framework, FrameworkTraits, Hooking, TensorSpec
from rankscope_exporter.adapters.deepspeed_zero import ZeroStage, stage_of
from rankscope_exporter.adapters.optimizer_wrapping import PatchedMethod, unwrapped
from rankscope_exporter.adapters.partitioned_optimizer import PartitionedOptimizer
from rankscope_exporter.adapters.placement import Layout, loaded, sharded_over

_UPDATE = "_take_model_step"
_LAST_WHOLE_STAGE = 2


class _Engine(Framework):
    """Base class of two adapters: for DeepSpeed optimizers that step the model's own parameters, and for all others.

    It has the methods that read only the DeepSpeed engine, not its optimizer.
    """

    priority: ClassVar[int] = 30

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._engine: Any = model

    @property
    def module(self) -> nn.Module:
        """Return the user's own module, which the engine wraps."""
        module: nn.Module = self._engine.module
        return module

    def copies(self, world_size: int) -> int:
        """Return the number of ranks that train on different data."""
        return int(getattr(self._engine, "dp_world_size", world_size))

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks that have equal parameters after every update.

        The result is empty for ZeRO stage 3 and for parameters of experts.
        """
        group = getattr(self._engine, "seq_data_parallel_group", None)
        is_expert = getattr(parameter, "allreduce", True) is False
        if group is None or is_expert or self._engine.zero_optimization_stage() > _LAST_WHOLE_STAGE:
            return ()
        return dist.get_process_group_ranks(group)


class DeepSpeed(_Engine):
    """Adapter for ZeRO stage 0 in float32, which all-reduces gradients after the last backward pass of a step.

    `engine.step()` clips gradients without a change of `Tensor._version`.
    """

    name: ClassVar[str] = "deepspeed"
    traits = FrameworkTraits(
        replicated=True, reduces=True, reduces_after_last_backward=True, optimizer_takes_copies=True
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._reduced = False

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` is a DeepSpeed engine whose optimizer directly steps the model's own parameters."""
        return _is_engine(model) and _stage(model) is None

    def reduces_in_backward(self) -> bool:
        """Return True only while the beginning of an update is reported to the monitor.

        Only then has DeepSpeed reduced all gradients of the step and clipped none.
        """
        return self._reduced

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:
        """Return the torch optimizers that the objects in `given` are or wrap.

        If `given` is empty, return the optimizer of the DeepSpeed engine.
        """
        return super().optimizers(given or _optimizers(self._engine))

    def install(self, hooking: Hooking) -> None:
        """Report the beginning of each parameter update of the DeepSpeed engine to the monitor, until detach().

        At the beginning of an update, all gradients are reduced, and none is clipped.
        """

        def reduced() -> None:
            self._reduced = True
            hooking.reduced()
            self._reduced = False

        before = hooking.always("reporting the beginning of an update", reduced)

        def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before()
            return original(*args, **kwargs)

        hooking.keep(PatchedMethod(self._engine, _UPDATE, update))


class DeepSpeedZero(_Engine, PartitionedOptimizer):
    """Adapter for ZeRO 1, 2 and 3, and for all modes in which the optimizer steps copies of the parameters.

    The optimizer steps float32 copies of whole parameters, or flat parts of such copies.
    """

    name: ClassVar[str] = "deepspeed_zero"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        stage = _stage(model)
        assert stage is not None
        self._stage = stage
        self.parts = stage.parts()
        # A script may move the engine's accumulation boundary by hand, so one configured micro-batch leaves it open.
        is_single = self._engine.gradient_accumulation_steps() == 1
        self.traits = replace(
            PartitionedOptimizer.traits,
            replicated=True,
            reduces_each_micro_batch=None if stage.scatters and is_single else stage.scatters,
        )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` is a DeepSpeed engine with one of DeepSpeed's own optimizers."""
        return _is_engine(model) and _stage(model) is not None

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return how ZeRO divides a parameter among ranks.

        If ZeRO does not divide it, return the layout of a whole parameter.
        """
        whole = super().layout(parameter)
        groups = self._stage.process_groups
        return sharded_over(groups[id(parameter)], whole) if id(parameter) in groups else whole

    def local_layout(self, parameter: torch.Tensor, world_size: int) -> Layout:
        """Return the layout over the ranks of this rank's own gradient of `parameter`, before it is reduced.

        With data parallelism, the layout is "partial": each rank computes a gradient of every element from its own
        data.
        """
        return Layout("partial") if self.copies(world_size) > 1 else super().layout(parameter)

    def local_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return shape and dtype of this rank's own gradient of `parameter`.

        They are the shape of the whole parameter and its dtype.
        """
        return TensorSpec(tuple(getattr(parameter, "ds_shape", parameter.shape)), parameter.dtype)

    def reduced_spec(self, parameter: torch.Tensor) -> TensorSpec:
        """Return shape and dtype of this rank's part of the reduced gradient of `parameter`.

        The dtype is the one in which DeepSpeed accumulates gradients.
        """
        return TensorSpec(self.spec(parameter).shape, self._stage.accumulates_in or parameter.dtype)

    def reduced_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of this rank's part of `parameter`; None if there is no gradient or no part."""
        return self._stage.reduced(parameter)

    def earlier_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of this rank's own gradients of `parameter` over earlier micro-batches of the step.

        Return None if the ZeRO stage keeps no such sum.
        """
        return None if self._stage.scatters else self._stage.earlier(parameter)

    def optimizers(self, given: Sequence[Any]) -> tuple[torch.optim.Optimizer, ...]:  # noqa: ARG002 - all are the same
        """Return the torch optimizer that the DeepSpeed engine uses.

        `given` is ignored: all its objects wrap this optimizer.
        """
        return tuple(unwrapped(item) for item in _optimizers(self._engine))

    def install(self, hooking: Hooking) -> None:
        """Report each parameter update of the DeepSpeed engine to the monitor, until detach().

        The beginning and the end of an update are reported separately.
        """
        self.watch(self._engine, _UPDATE, hooking)


def _is_engine(model: nn.Module) -> bool:
    return isinstance(model, loaded("deepspeed.runtime.engine", "DeepSpeedEngine"))


def _stage(engine: Any) -> ZeroStage | None:
    optimizer = engine.optimizer
    return None if optimizer is None or isinstance(optimizer, torch.optim.Optimizer) else stage_of(optimizer)


def _optimizers(engine: Any) -> tuple[Any, ...]:
    return () if engine.optimizer is None else (engine.optimizer,)
