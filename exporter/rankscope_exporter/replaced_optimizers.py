"""Notices an optimizer that takes the place of one that `attach` was given, as when a script begins a new phase."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankscope_exporter.frameworks.base import Removable

Optimizer = torch.optim.Optimizer


class ReplacedOptimizers:
    """Sees the steps of all optimizers of the process, by torch's own hooks for that.

    `followed` are those whose steps are followed; one that replaces some of them takes their place there, and `follow`
    is called with it behind its first step. An optimizer around or inside of a followed one steps together with it and
    replaces nothing, and so does one of parameters that none of them has.
    """

    def __init__(self, followed: MutableSequence[Optimizer], follow: Callable[[Optimizer], None]) -> None:
        self._followed = followed
        self._follow = follow
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

    def followed_ended(self, optimizer: Any) -> None:
        """Note that it has made it."""
        self._under_way.discard(id(optimizer))

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._under_way and not self._is_followed(optimizer):
            self._before[id(optimizer)] = self._steps

    def _ended(self, optimizer: Optimizer, *_: Any) -> None:
        if self._before.pop(id(optimizer), -1) == self._steps and (gone := self._replaced_by(optimizer)):
            self._followed[:] = [known for known in self._followed if known not in gone] + [optimizer]
            self._follow(optimizer)

    def _is_followed(self, optimizer: Optimizer) -> bool:
        return any(optimizer is known for known in self._followed)

    def _replaced_by(self, optimizer: Optimizer) -> list[Optimizer]:
        own = _parameters(optimizer)
        return [known for known in self._followed if own & _parameters(known)]


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
