"""What the quantities must know of the framework around a model."""

from __future__ import annotations

from typing import ClassVar

from torch import nn


class Framework:
    """One wrapped model: where its gradients stand at which moment.

    The defaults describe a model that nothing wraps, trained by one process.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether `model` is wrapped by this framework."""
        raise NotImplementedError

    @property
    def module(self) -> nn.Module:
        """Return the user's own module, without the wrapper."""
        return self.model

    @property
    def replicated(self) -> bool:
        """Return whether every rank holds a full copy that training keeps equal."""
        return False

    @property
    def local_until_backward_ends(self) -> bool:
        """Return whether `.grad` still holds this rank's own gradient after the last hook of a backward pass.

        If not, a gradient must be read in its own hook, one tensor at a time.
        """
        return True

    @property
    def interleaves_micro_batches(self) -> bool:
        """Return whether a later micro-batch may go forward before an earlier one has gone backward."""
        return False

    def reduces_in_backward(self) -> bool:
        """Return whether the backward pass that is under way ends with `.grad` reduced over the ranks."""
        return False
