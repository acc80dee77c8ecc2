"""Detects changes of the model during training: parameters, layers and optimizers that are replaced or added."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.monitored_model import PARAMETERS, Borrowed, MonitoredModel, identities
from rankscope_exporter.adapters.parameter_names import Place, named_parameters
from rankscope_exporter.adapters.torch_private import entry, submodules_of
from rankscope_exporter.adapters.tracing import is_dynamo_compiling, uncompiled
from rankscope_exporter.measure.kernels.isolation import some_of
from rankscope_exporter.measure.quantities.base import REMEDY
from rankscope_exporter.records.record import StepObserver

_PATIENCE: Final = 4
"""Number of the sampled step at which a training without an optimizer is reported."""
_NO_OPTIMIZER: Final = (
    "no torch optimizer of the model's parameters has stepped: values of parameters before and after an update, and "
    "optimizer state, are absent; an update by the script itself is not detected"
)


class ModelChanges(StepObserver):
    """Compares the model, at the beginning of each sampled step, with its state at attach.

    A comparison costs a few dictionary lookups per module.
    """

    def __init__(self, monitored: MonitoredModel, tell: Callable[[str], None]) -> None:
        self._monitored = monitored
        self._tell = tell
        self._steps = 0  # sampled ones
        self._tree = _tree(monitored.framework.module)
        self._optimized = identities(*monitored.optimizers.present())
        self._at_attach = set(monitored.places())
        self._added: set[str] = set()  # names of parameters that were reported
        self._has_optimizer = bool(monitored.optimizers)  # one was observed

    def on_sampling_decided(self, sampled: bool) -> None:  # noqa: FBT001 - an event has positional arguments
        if not sampled:
            return
        self._steps += 1
        self._has_optimizer = self._has_optimizer or len(self._monitored.optimizers) > 0
        if self._steps == _PATIENCE and not self._has_optimizer:
            self._tell(_NO_OPTIMIZER)
        found = self._monitored.missing()
        if _has_changed(self._tree):
            self._tree = _tree(self._monitored.framework.module)
            found |= self._monitored.lost(self._left_behind())
        gone = sorted(found - self._monitored.retired)
        if gone:
            self._monitored.retired.update(gone)
            names = some_of(self._monitored.parameters[i].name for i in gone)
            self._tell(
                f"{len(gone)} parameters were replaced after attach() and are no longer measured ({names}): {REMEDY}"
            )
        self._report_added()

    def _report_added(self) -> None:
        """Report parameters that optimizers have got since attach(), without those that replace a parameter."""
        before, self._optimized = self._optimized, identities(*self._monitored.optimizers.present())
        if before == self._optimized:
            return
        replaced = [self._monitored.parameters[i] for i in self._monitored.retired]
        known = self._at_attach.difference(item.identity for item in replaced)
        names = self._added.union(item.name for item in replaced)
        new = set(self._optimized) - known
        items = named_parameters(self._monitored.framework.module) if new else ()
        added = [item.name for item in items if item.identity in new and item.name not in names]
        self._added.update(added)
        if added:
            self._tell(
                f"{len(added)} parameters were added to the optimizer after attach() and are not measured "
                f"({some_of(added)}): {REMEDY}"
            )

    def _left_behind(self) -> set[int]:
        """Return the positions of parameters in modules that are no longer part of the model."""
        held = self._monitored.modules
        held.clear()
        held.update(map(id, self._monitored.framework.module.modules()))
        parameters = enumerate(self._monitored.parameters)
        return {i for i, named in parameters if id(named.owner()) not in held}


_Branch = tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module]]
"""Weak references to a parent module and to a module, with the name under which the parent contains the module."""


def _has_changed(tree: Iterable[_Branch]) -> bool:
    """Return whether a parent module now contains another object, or none, under the name that a module had.

    A parent module that was freed is left out: the change is detected at the module from which it, or a module above
    it, was removed.
    """
    for parent, key, child in tree:
        holder, module = parent(), child()
        if holder is not None:
            table = submodules_of(holder)
            found = dict.get(table, key) if isinstance(table, dict) else entry(table, key)
            if module is None or found is not module:
                return True
    return False


def _tree(root: nn.Module) -> list[_Branch]:
    """Return each module of the model below `root`, with its parent module and its name in the parent module."""
    return [
        (weakref.ref(module), key, weakref.ref(child))
        for module in root.modules()
        for key, child in submodules_of(module).items()
        if child is not None
    ]


Optimizer = torch.optim.Optimizer


@dataclass(eq=False)
class NewOptimizers:
    """Detects further optimizers of the model's parameters, by torch's global hooks on the steps of all optimizers.

    `followed` is the list of observed optimizers. A new optimizer that shares parameters with the model, or with some
    observed optimizers, is appended to the list. The function `follow` is called with the new optimizer after its first
    step. The new optimizer replaces the observed optimizers with which it shares parameters, and those without any
    trained parameter of the model, as after `load_state_dict(assign=True)` or with adapters. They leave the list until
    they step again. The argument `replaces` of `follow` is true if there are such optimizers. The function `places`
    returns the present parameters of the model by id(). Steps during which `ignored` returns true are not observed.

    Some optimizers contain another one: the step of one calls the step of the other. If one of the two is observed, the
    other is ignored, because both step together.
    """

    followed: list[Optimizer] | Borrowed[Optimizer]
    follow: Callable[..., None]
    places: Callable[[], Mapping[int, Place]]
    ignored: Callable[[], bool]

    def __post_init__(self) -> None:
        self._known = {id(optimizer): _Known(optimizer) for optimizer in self.followed}
        self._left: dict[int, _Known] = {}  # optimizers that were replaced
        self._others: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # of other models: length
        self.stepping: set[int] = set()
        """The id() of each observed optimizer that is in its step. The caller removes it at the end of the step."""
        self._steps = 0  # of observed optimizers
        self._before: dict[int, int] = {}  # other optimizers in their step: `_steps` at its begin

    def install(self, hooking: HookContext) -> None:
        """Register the hooks on all optimizers of the process. For an observed optimizer they do nothing."""
        where = "a hook on optimizer steps"
        other_begins, other_ended = Hook(hooking, where, self._begins), Hook(hooking, where, self._ended)

        @uncompiled
        def begins(optimizer: Optimizer, *_: Any) -> None:
            if is_dynamo_compiling():  # first, see `Hook`
                return
            known = self._known.get(id(optimizer))
            if known is None or known.optimizer() is not optimizer:
                other_begins(optimizer)

        @uncompiled
        def ended(optimizer: Optimizer, *_: Any) -> None:
            if is_dynamo_compiling():
                return
            if self._before:
                other_ended(optimizer)

        hooking.keep(register_optimizer_step_pre_hook(begins))
        hooking.keep(register_optimizer_step_post_hook(ended))

    def followed_begins(self, optimizer: Any) -> None:
        """Store that an observed optimizer begins a step. The optimizer need not be a subclass of torch's optimizer."""
        self.stepping.add(id(optimizer))
        self._steps += 1
        left = self._left.pop(id(optimizer), None)
        if left is not None and left.optimizer() is not None:
            self._known[id(optimizer)] = left
            self.followed[:] = [*self.followed, optimizer]
        known = self._known.get(id(optimizer))
        if known is not None and len(known.latest) != sum(map(len, map(PARAMETERS, optimizer.param_groups))):
            known.latest = identities(optimizer)

    def _begins(self, optimizer: Optimizer) -> None:
        if not any(id(known) in self.stepping for known in self.followed) and not self.ignored():
            self._before[id(optimizer)] = self._steps

    def _ended(self, optimizer: Optimizer) -> None:
        if self._before.pop(id(optimizer), -1) != self._steps:
            return
        own = set(identities(optimizer))
        if self._others.get(optimizer) == len(own):
            return
        places = self.places()
        trained = {key for key, (_, _, item) in places.items() if item is not None and item.requires_grad}
        gone = {key: known for key, known in self._known.items() if own & known.parameters}
        if own & places.keys():
            gone |= {key: known for key, known in self._known.items() if not trained & known.parameters}
        elif not gone:
            self._others[optimizer] = len(own)
            return
        replaced = [known.optimizer() for known in gone.values()]
        kept = [item for item in self.followed if not any(item is other for other in replaced)]
        self.followed[:] = [*kept, optimizer]
        self._known = {key: known for key, known in self._known.items() if key not in gone}
        self._known[id(optimizer)] = _Known(optimizer)
        self._left = {key: known for key, known in (self._left | gone).items() if known.optimizer() is not None}
        self.follow(optimizer, replaces=bool(gone))


class _Known:
    """An observed optimizer and its parameters.

    The parameters remain known after the script has deleted the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.latest = identities(optimizer)
        """The id() of each parameter of the optimizer at its latest step with another number of parameters."""

    @property
    def parameters(self) -> set[int]:
        """The id() of each parameter of the optimizer, or of its last step if the script has deleted it."""
        optimizer = self.optimizer()
        return set(self.latest if optimizer is None else identities(optimizer))
