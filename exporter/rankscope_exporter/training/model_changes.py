"""Detects changes of the model during training: parameters, layers and optimizers that are replaced or added."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankscope_exporter.adapters.monitored_model import Borrowed, MonitoredModel
from rankscope_exporter.adapters.parameter_hooks import Removable
from rankscope_exporter.model.parameter_names import entry

REMEDY: Final = "detach() and attach() again"


class ChangedModel:
    """Compares the model with what it was. Asked when a measured step begins: some lookups for each module."""

    def __init__(self, monitored: MonitoredModel) -> None:
        self._monitored = monitored
        self._tree = _tree(monitored.framework.module)
        self._optimized, self._strange = self._count(), self._strangers()

    def added(self) -> int:
        """Return how many parameters the optimizers have got, since this was asked last, that are not measured."""
        before, self._optimized = self._optimized, self._count()
        if before == self._optimized:
            return 0
        earlier, self._strange = self._strange, self._strangers()
        return self._strange - earlier

    def gone(self) -> list[int]:
        """Return the positions of parameters that the model uses no more, and retire them: each is told once."""
        retired, is_in_place = self._monitored.retired, self._monitored.framework.is_in_place
        found = {i for i, named in enumerate(self._monitored.parameters) if not is_in_place(named)}
        if any(branch.has_changed for branch in self._tree):
            self._tree = _tree(self._monitored.framework.module)
            found |= self._left_behind()
        gone = sorted(found - retired)
        retired.update(gone)
        return gone

    def _left_behind(self) -> set[int]:
        """Return the parameters of modules that are no part of the model any more."""
        held = {id(module) for module in self._monitored.framework.module.modules()}
        parameters = enumerate(self._monitored.parameters)
        return {i for i, named in parameters if id(named.owner()) not in held}

    def _count(self) -> int:
        groups = (group for optimizer in self._monitored.optimizers for group in optimizer.param_groups)
        return sum(len(group["params"]) for group in groups)

    def _strangers(self) -> int:
        """Return how many of them are not among those that were found at attach: layers are often thawed one by one."""
        known = {named.identity for named in self._monitored.parameters}
        groups = (group for optimizer in self._monitored.optimizers for group in optimizer.param_groups)
        return sum(id(parameter) not in known for group in groups for parameter in group["params"])


@dataclass(frozen=True, slots=True)
class _Branch:
    """A module and where it is held; neither is kept alive."""

    holder: weakref.ref[nn.Module]
    key: str
    module: weakref.ref[nn.Module]

    @property
    def has_changed(self) -> bool:
        """Whether the holder holds something else now. One that is gone was itself held by another."""
        holder, module = self.holder(), self.module()
        # The dictionary itself: `__getattr__` may be the user's.
        return holder is not None and (module is None or entry(holder._modules, self.key) is not module)  # noqa: SLF001 - see above


def _tree(root: nn.Module) -> list[_Branch]:
    """Return each module of the model with the module that holds it."""
    return [
        _Branch(weakref.ref(module), key, weakref.ref(child))
        for module in root.modules()
        for key, child in module._modules.items()  # noqa: SLF001 - the dictionary itself, to see it change
        if child is not None
    ]


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
        followed: list[Optimizer] | Borrowed[Optimizer],
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
