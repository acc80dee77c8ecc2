"""Notices what a script does to its model while it is trained: parameters and layers replaced, parameters added."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final

from torch import nn

from rankscope_exporter.naming import entry
from rankscope_exporter.quantities.base import Subject

REMEDY: Final = "detach() and attach() again"


class ChangedModel:
    """Compares the model with what it was. Asked when a measured step begins: some lookups for each module."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tree = _tree(subject.framework.module)
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
        retired, is_in_place = self._subject.retired, self._subject.framework.is_in_place
        found = {i for i, named in enumerate(self._subject.parameters) if not is_in_place(named)}
        if any(branch.has_changed for branch in self._tree):
            self._tree = _tree(self._subject.framework.module)
            found |= self._left_behind()
        gone = sorted(found - retired)
        retired.update(gone)
        return gone

    def _left_behind(self) -> set[int]:
        """Return the parameters of modules that are no part of the model any more."""
        held = {id(module) for module in self._subject.framework.module.modules()}
        parameters = enumerate(self._subject.parameters)
        return {i for i, named in parameters if id(named.owner()) not in held}

    def _count(self) -> int:
        groups = (group for optimizer in self._subject.optimizers for group in optimizer.param_groups)
        return sum(len(group["params"]) for group in groups)

    def _strangers(self) -> int:
        """Return how many of them are not among those that were found at attach: layers are often thawed one by one."""
        known = {named.identity for named in self._subject.parameters}
        groups = (group for optimizer in self._subject.optimizers for group in optimizer.param_groups)
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
