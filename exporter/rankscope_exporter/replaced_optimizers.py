"""Notices an optimizer that takes the place of one that `attach` was given, as when a script begins a new phase."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableSequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankscope_exporter.frameworks.base import Removable

Optimizer = torch.optim.Optimizer


class ReplacedOptimizers:
    """Sees the steps of all optimizers of the process, by torch's own hooks for that.

    `followed` are those whose steps are followed; one that replaces some of them takes their place there, and `follow`
    is called with it behind its first step. An optimizer around or inside of a followed one steps together with it and
    replaces nothing, and so does one of parameters that none of them has. But where the model itself has got other
    parameters, as by `load_state_dict(assign=True)`, one of these replaces those of parameters that are gone:
    `in_model` returns the identities of the parameters that the model has now.
    """

    def __init__(
        self,
        followed: MutableSequence[Optimizer],
        follow: Callable[[Optimizer], None],
        in_model: Callable[[], set[int]] = set,
    ) -> None:
        self._followed = followed
        self._follow = follow
        self._in_model = in_model
        self._known = [_Known(optimizer) for optimizer in followed]
        self._under_way: set[int] = set()  # followed optimizers, by identity, that are inside of their step
        self._steps = 0  # of followed ones
        self._before: dict[int, int] = {}  # by identity of others whose step is under way: `_steps` when it began

    def install(self, keep: Callable[[Removable], None], guarded: Callable[..., Callable[..., None]]) -> None:
        """Register both hooks."""
        keep(register_optimizer_step_pre_hook(guarded("an optimizer's step", self._begins)))
        keep(register_optimizer_step_post_hook(guarded("an optimizer's step", self._ended)))

    def followed_begins(self, optimizer: Any) -> None:
        """Note that a followed optimizer, which need not be one of torch's, begins its step."""
        self._under_way.add(id(optimizer))
        self._steps += 1
        for known in self._known:
            known.note()

    def followed_ended(self, optimizer: Any) -> None:
        """Note that it has made it."""
        self._under_way.discard(id(optimizer))

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        is_inside = any(id(known) in self._under_way for known in self._followed)
        if not is_inside and not self._is_followed(optimizer):
            self._before[id(optimizer)] = self._steps

    def _ended(self, optimizer: Optimizer, *_: Any) -> None:
        if self._before.pop(id(optimizer), -1) == self._steps and (gone := self._replaced_by(optimizer)):
            replaced = [known.optimizer for known in gone]
            staying = [item for item in self._followed if not any(item is other for other in replaced)]
            self._followed[:] = [*staying, optimizer]
            self._known = [known for known in self._known if known not in gone] + [_Known(optimizer)]
            self._follow(optimizer)

    def _is_followed(self, optimizer: Optimizer) -> bool:
        return any(optimizer is known for known in self._followed)

    def _replaced_by(self, optimizer: Optimizer) -> list[_Known]:
        own = _parameters(optimizer)
        replaced = [known for known in self._known if own & known.parameters]
        if replaced or not own & (in_model := self._in_model()):
            return replaced
        return [known for known in self._known if not in_model & known.parameters]


class _Known:
    """A followed optimizer, and its parameters, which are still known once the script has dropped the optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._reference = weakref.ref(optimizer)
        self._count = 0
        self._parameters: set[int] = set()
        self.note()

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the optimizer; None once the script has dropped it."""
        return self._reference()

    @property
    def parameters(self) -> set[int]:
        """Return the identities of its parameters: now, or at its last step where the script has dropped it."""
        optimizer = self._reference()
        return self._parameters if optimizer is None else _parameters(optimizer)

    def note(self) -> None:
        """Look at its parameters again where their number has changed."""
        optimizer = self._reference()
        if optimizer is not None and self._count != (count := _count(optimizer.param_groups)):
            self._count, self._parameters = count, _parameters(optimizer)


def _count(groups: Iterable[dict[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
