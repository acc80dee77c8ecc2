"""Adapters for models without a wrapper and for DistributedDataParallel, which all-reduces gradients in buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter.adapters.base import Framework, FrameworkTraits
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.adapters.torch_private import active_ddp, comm_hooks, compiled_call
from rankscope_exporter.process.copies import NotCopied


class Plain(Framework):
    """Adapter for a model without a wrapper.

    The optimizer gets the gradients of the backward pass, unless the training loop changes them before it calls the
    optimizer.
    """

    name: ClassVar[str] = "plain"
    priority: ClassVar[int] = -1

    @classmethod
    def matches(cls, model: nn.Module) -> bool:  # noqa: ARG003 - the fallback takes every model
        return True


class DistributedData(Framework):
    """Adapter for DDP, which copies each gradient into a bucket and reduces the bucket.

    At the end of the backward pass, DDP copies the reduced gradients back.

    Between the last gradient hook and DDP's own callback at the end of the backward pass, `.grad` therefore still has
    the rank's own gradient. With `gradient_as_bucket_view` the gradient *is* the bucket and must be read in its hook,
    which runs before the reduction.
    """

    name: ClassVar[str] = "ddp"
    priority: ClassVar[int] = 10

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        assert isinstance(model, DistributedDataParallel)
        self.traits = FrameworkTraits(
            replicated=True,  # all ranks start from rank 0's parameters and apply equal updates
            reduces=True,
            reduces_each_micro_batch=None,  # it does without `no_sync()`
            waits_for_reductions=True,
            # With a static graph, DDP's callback runs before the hook of the monitor.
            local_until_backward_ends=not (model.gradient_as_bucket_view or model.static_graph),
        )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, DistributedDataParallel)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.root.module
        return module

    def on_forward(self, hook: Callable[..., None]) -> Removable:
        if not self._may_be_made_again:
            return super().on_forward(hook)

        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._follow(module):
                hook(self.root, args, kwargs)

        return self.module.register_forward_pre_hook(NotCopied(begins), with_kwargs=True)

    def on_forward_end(self, hook: Callable[..., None]) -> Removable:
        if not self._may_be_made_again:
            return super().on_forward_end(hook)

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            if self._follow(module):
                hook(self.root, args, output)

        return self.module.register_forward_hook(NotCopied(ends), always_call=True)

    @property
    def _may_be_made_again(self) -> bool:
        """True if hooks on the user's module, which is not compiled, can detect another DDP around the same module."""
        return self.announced is None and self.model is self.root and compiled_call(self.module) is None

    def _follow(self, module: nn.Module) -> bool:
        """Return whether `module` runs in a forward pass of DDP, which may have been made again around `module`."""
        wrapper = active_ddp()
        if wrapper is None or wrapper.module is not module:
            return False
        self.model = self.root = wrapper
        return True

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        # Return False for a frozen parameter, for a parameter that DDP ignores, and if a communication hook of the
        # user reduces gradients.
        # DDP would not reduce a parameter that is frozen now and trained later.
        return parameter.requires_grad and set(ranks) <= set(self.replicas(parameter))

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        # The ranks on which `parameter` is equal: all ranks of DDP's process group. This includes frozen parameters:
        # DDP has broadcast them, and nothing changes them. The result is empty for a parameter that DDP ignores. It
        # is empty for all parameters if the user registered a communication hook.
        if comm_hooks(self.root) or self._is_ignored(parameter):
            return ()
        return dist.get_process_group_ranks(self.root.process_group)

    def _is_ignored(self, parameter: torch.Tensor) -> bool:
        ignored = self.root.parameters_to_ignore
        named = self.module.named_parameters() if ignored else ()
        return any(item is parameter for name, item in named if name in ignored)

    def reduces_in_backward(self) -> bool:
        # False inside `no_sync()`, where DDP accumulates gradients without reducing them.
        return bool(self.root.require_backward_grad_sync)
