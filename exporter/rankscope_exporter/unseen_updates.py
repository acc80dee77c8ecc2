"""Finds optimizer steps in which no hook ran: Dynamo compiles the hooks of an optimizer away (see `tracing`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class _Trace(NamedTuple):
    """Numbers that an update changes. A fused kernel leaves the versions of parameters, but counts its steps."""

    versions: int  # of all parameters, added up
    steps: int  # versions of the step counters that are tensors, and the values of those that are numbers
    states: int  # parameters with a state, which the first update makes


class UnseenUpdates:
    """Compares the traces of updates with those at the last look. Costs nothing until an update is compiled.

    Training thread only; some 0.1 µs a parameter and look.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._traces: dict[int, _Trace] | None = None  # by identity of the optimizer; None: none is expected

    @property
    def are_expected(self) -> bool:
        """Return whether the step of some optimizer was compiled."""
        return self._traces is not None

    @property
    def may_leave_no_trace(self) -> bool:
        """Return whether a step is compiled that would not be found: fused SGD counts no steps."""
        return self._traces is not None and any(_leaves_no_trace(optimizer) for optimizer in self._optimizers)

    def expect(self) -> None:
        """Look for updates from now on. Call it while the first one is compiled, before it runs."""
        if self._traces is None:
            self._traces = {id(optimizer): _trace(optimizer) for optimizer in self._optimizers}

    def look(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have stepped since the last look, in the order of `attach`."""
        if self._traces is None:
            return []
        before, self._traces = self._traces, {id(optimizer): _trace(optimizer) for optimizer in self._optimizers}
        known = (item for item in self._optimizers if id(item) in before)  # one that was added since has no past
        return [item for item in known if before[id(item)] != self._traces[id(item)]]


def _trace(optimizer: torch.optim.Optimizer) -> _Trace:
    parameters = (item for group in optimizer.param_groups for item in group["params"])
    steps = (state.get("step") for state in optimizer.state.values() if isinstance(state, dict))
    return _Trace(sum(map(_version, parameters)), sum(map(_count, steps)), len(optimizer.state))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - torch has no other name for it


def _count(step: Any) -> int:
    if isinstance(step, torch.Tensor):
        return _version(step)
    return step if isinstance(step, int) else 0


def _leaves_no_trace(optimizer: torch.optim.Optimizer) -> bool:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return fused and not any("step" in state for state in optimizer.state.values() if isinstance(state, dict))
