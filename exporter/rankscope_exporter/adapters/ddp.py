"""Models without a wrapper, and DistributedDataParallel, which all-reduces gradients in buckets during backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter.adapters.base import Framework, alive


class Plain(Framework):
    """Any module. What reaches the optimizer is what backward left, unless the loop changed it in between."""

    name: ClassVar[str] = "plain"
    priority: ClassVar[int] = -1

    @classmethod
    def matches(cls, model: nn.Module) -> bool:  # noqa: ARG003 - the fallback takes every model
        """Return True: this is the fallback."""
        return True


class DistributedData(Framework):
    """DDP copies each gradient into a bucket, reduces the bucket, and copies back when backward has ended.

    So between the last hook and its own end-of-backward callback, `.grad` is still local. With
    `gradient_as_bucket_view` the gradient *is* the bucket: there it must be read in its hook, before the reduction.
    """

    name: ClassVar[str] = "ddp"
    priority: ClassVar[int] = 10

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        assert isinstance(model, DistributedDataParallel)
        self._wrapper = weakref.ref(model)

    @property
    def _ddp(self) -> DistributedDataParallel:
        return alive(self._wrapper)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` is the DDP wrapper itself."""
        return isinstance(model, DistributedDataParallel)

    @property
    def module(self) -> nn.Module:
        """Return the wrapped module."""
        module: nn.Module = self._ddp.module
        return module

    @property
    def replicated(self) -> bool:
        """Return True: all ranks start from rank 0's parameters and apply equal updates."""
        return True

    def is_same_on(self, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
        """Return True of what DDP reduces itself: not where a hook of the user's does, nor of what it ignores."""
        # A parameter that is frozen now would not be reduced when it is thawed.
        return parameter.requires_grad and set(ranks) <= set(self.replicas(parameter))

    def replicas(self, parameter: torch.Tensor) -> Sequence[int]:
        """Return the ranks of DDP, also of what is frozen: it was sent to all of them, and nothing changes it."""
        if self._ddp._comm_hooks or self._is_ignored(parameter):  # noqa: SLF001 - no public name tells of hooks
            return ()
        return dist.get_process_group_ranks(self._ddp.process_group)

    def _is_ignored(self, parameter: torch.Tensor) -> bool:
        ignored = self._ddp.parameters_to_ignore
        named = self.module.named_parameters() if ignored else ()
        return any(item is parameter for name, item in named if name in ignored)

    @property
    def local_until_backward_ends(self) -> bool:
        """Return whether gradients are separate from the buckets, and reduced by a callback that comes after ours."""
        return not (self._ddp.gradient_as_bucket_view or self._ddp.static_graph)

    @property
    def reduces(self) -> bool:
        """Return True."""
        return True

    @property
    def reduces_each_micro_batch(self) -> bool | None:
        """Return None: without `no_sync()` it does."""
        return None

    def reduces_in_backward(self) -> bool:
        """Return False inside `no_sync()`, where gradients only accumulate."""
        return bool(self._ddp.require_backward_grad_sync)
