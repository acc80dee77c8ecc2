"""The monitored model: its adapter, its parameters and its optimizers.

The model may consist of several chunks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch
from torch import nn

from rankscope_exporter.adapters.base import Framework, ParameterState
from rankscope_exporter.adapters.parameter_names import (
    NamedParameter,
    Place,
    Targets,
    found_in_place,
    is_temporarily_replaced,
)
from rankscope_exporter.adapters.placement import loaded
from rankscope_exporter.adapters.torch_private import parameters_of
from rankscope_exporter.records.plan import Descriptions

T = TypeVar("T")

_GROUPS: Final = operator.attrgetter("param_groups")
PARAMETERS: Final = operator.itemgetter("params")
"""Function that returns the parameters of a parameter group."""
_GRADIENT: Final = operator.attrgetter("grad")


def identities(*optimizers: torch.optim.Optimizer) -> list[int]:
    """Return the id() of each parameter of the optimizers."""
    groups = itertools.chain.from_iterable(map(_GROUPS, optimizers))
    return [*map(id, itertools.chain.from_iterable(map(PARAMETERS, groups)))]


class Borrowed(Sequence[T]):
    """A list that has only weak references to its items. Items that were freed are left out.

    It is used for modules and optimizers, never for tensors, because torch.utils.swap_tensors rejects a tensor with a
    weak reference.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._references = [weakref.ref(item) for item in items]

    def present(self) -> list[T]:
        """Return the items that exist."""
        items = [*map(operator.call, self._references)]
        if all(map(operator.is_not, items, itertools.repeat(None))):
            return items  # type: ignore[return-value]  # see above
        return [item for item in items if item is not None]

    def __iter__(self) -> Iterator[T]:
        return iter(self.present())

    def __len__(self) -> int:
        return len(self.present())

    def __getitem__(self, position: Any) -> Any:
        return self.present()[position]

    def __setitem__(self, position: Any, value: Any) -> None:
        items = self.present()
        items[position] = value
        self._references = [weakref.ref(item) for item in items]


class UpdateScope:
    """State of the present step that quantities read: gradients that arrived, and parameters by their optimizer.

    Positions are those in the list of all parameters of the model, unless stated otherwise.

    Each of several optimizers has parameters of its own. Their gradients are complete when their own optimizer steps,
    and a later backward pass of the same step may change them for another purpose, as in adversarial training.
    """

    def __init__(self, parameters: Sequence[NamedParameter] = ()) -> None:
        self._positions = {named.identity: position for position, named in enumerate(parameters)}
        self.positions: set[int] | None = None
        """Positions of the parameters to read now; None for all parameters."""
        self.stepped: set[int] = set()
        """Positions of the parameters of optimizers that have stepped in this step. Known at sampled steps only."""
        self.has_others = False
        """True if the optimizer that has stepped last has tensors that are no measured parameters."""
        self.latest = 0
        """The id() of the optimizer that has stepped last, or that steps now."""
        self.is_running = False
        """True if an optimizer step without a closure is running: gradients that it computes are its own."""
        self.is_inside_backward = False
        """True during an optimizer step inside a backward pass, when gradients of other parameters are incomplete."""
        self.arrived: list[int] = []
        """Positions of the parameters with a gradient in a backward pass of this step, in order of arrival."""
        self.frozen: set[int] = set()
        """Positions of the parameters that have a gradient of an earlier step and require none since."""
        self.left_over: set[int] = set()
        """Those of them that do not belong to the optimizer that has stepped last, or that steps now."""
        self.found: dict[int, list[nn.Parameter | None]] | None = None
        """The parameters that were found during the present event, by id() of their list; None between two events."""
        self._known: dict[int, tuple[list[int], set[int]]] = {}  # see `positions_of`, by id() of the optimizer

    def positions_of(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the positions of the parameters of `optimizer`; empty if it updates copies of the parameters."""
        own = identities(optimizer)
        earlier, found = self._known.get(id(optimizer), ([], set()))
        if own != earlier:
            found = {self._positions[item] for item in own if item in self._positions}
            self._known[id(optimizer)] = own, found
        return found

    def begin(
        self, optimizer: torch.optim.Optimizer, optimizers: Sequence[torch.optim.Optimizer], *, is_first: bool
    ) -> set[int]:
        """Set `positions` for a step of `optimizer`, one of `optimizers`. Return the positions of its own parameters.

        `is_first` is true for the first optimizer in the present step: its step also includes the parameters that
        belong to no optimizer.
        """
        own = self.positions_of(optimizer)
        self.has_others = len(own) < len(self._known[id(optimizer)][0])
        self.left_over = self.frozen - own
        if own and len(optimizers) > 1:
            positions = set(own)
            if is_first:
                others = [self.positions_of(item) for item in optimizers if item is not optimizer]
                positions |= set(self._positions.values()).difference(*others)
            self.positions = positions
        return own


@dataclass(frozen=True)
class MonitoredModel:
    """The monitored model as its framework wraps it, its parameters, and their optimizers."""

    framework: Framework
    parameters: tuple[NamedParameter, ...]
    optimizers: Borrowed[torch.optim.Optimizer]
    """The optimizers of the training.

    If the training replaces an optimizer, the new one takes its place in this list.
    """
    world_size: int = 1
    retired: set[int] = field(default_factory=set)
    """Positions, in the list of all parameters of the model, of parameters that the model has replaced.

    They are not measured, because the last gradient of such a parameter would be published at each later step.
    """
    modules: set[int] = field(default_factory=set)
    """The id() of each module of the model since other code has replaced or removed a module; empty before."""
    compiled: set[str] = field(default_factory=set)
    """Names of the parts of a step, such as `backward`, that were detected to run inside compiled code."""
    update: UpdateScope = field(default_factory=UpdateScope)
    """The parameters that belong to the optimizer step which begins now."""
    positions: tuple[int, ...] | None = None
    """Position of each element of `parameters` in the list of all parameters of the model.

    None if `parameters` contains all parameters of the model.
    """
    elsewhere: frozenset[int] = frozenset()
    """Positions, in the list of all parameters of the model, of parameters that are equal on another rank.

    The other rank publishes the statistics of their values, and this rank does not.
    """
    descriptions: dict[tuple[bool, bool], Descriptions] = field(default_factory=dict)
    """Descriptions of `parameters` that several quantities use, by the arguments `local` and `reduced` with which a
    quantity requests them. Emptied when the plan has the entries of the quantities."""

    def parameter(self, index: int) -> nn.Parameter | None:
        """Return the parameter at position `index`; None if the model replaced it, or its module was freed."""
        named = self.parameters[index]
        found = named.parameter if self._is_plain else self.framework.parameter(named)
        return self._from_optimizers(named) if found is None else found

    @functools.cached_property
    def _is_plain(self) -> bool:
        """True if the framework stores parameters in their modules only."""
        return type(self.framework).parameter is Framework.parameter

    def found(self) -> list[nn.Parameter | None]:
        """Return the current parameter for each element of the attribute `parameters`; None if the model replaced it.

        The caller must neither change nor keep the list.
        """
        if self._is_plain:
            found = found_in_place(self.parameters)
        else:
            found = [self.framework.parameter(named) for named in self.parameters]
        if not all(map(operator.is_not, found, itertools.repeat(None))):
            pairs = zip(self.parameters, found, strict=True)
            found = [self._from_optimizers(named) if item is None else item for named, item in pairs]
        return found

    def tensors(self, *, of_update: bool = False) -> list[nn.Parameter | None]:
        """Return the current parameter for each element of the attribute `parameters`.

        An element is None if the model has replaced the parameter, or if the parameter was freed. If `of_update` is
        true, it is also None if the parameter does not belong to the optimizer step that begins now. The caller must
        not keep the list, because it keeps the parameters alive.
        """
        known, read = self.update.found, self.update.positions if of_update else None
        found = None if known is None else known.get(id(self.parameters))
        if found is None:
            found = self.found()
            if known is not None:
                known[id(self.parameters)] = found
        if not self.retired and read is None:
            return found
        pairs = zip(self.owners, found, strict=True)
        return [
            None if owner in self.retired or (read is not None and owner not in read) else item for owner, item in pairs
        ]

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the present gradient of each parameter of the optimizer step that begins now (see `tensors`)."""
        is_plain = type(self.framework).gradient is Framework.gradient
        gradient: Callable[[Any], Any] = _GRADIENT if is_plain else self.framework.gradient
        parameters, left = self.tensors(of_update=True), self.update.left_over
        if not left and all(map(operator.is_not, parameters, itertools.repeat(None))):
            return [*map(gradient, parameters)]
        pairs = zip(self.owners, parameters, strict=True)
        return [None if item is None or owner in left else gradient(item) for owner, item in pairs]

    def states(self, parameters: Sequence[nn.Parameter | None]) -> list[ParameterState | None]:
        """Return the optimizer states, None without one; of several optimizers, the state of the latest to step."""
        optimizers = self.optimizers.present()
        if len(optimizers) > 1:
            optimizers.sort(key=lambda optimizer: id(optimizer) != self.update.latest)
        return self.framework.optimizer_states(parameters, optimizers)

    def is_trained(self) -> bool:
        """Return whether some parameter requires a gradient, and its optimizer has stepped in this step."""
        stepped = self.update.stepped  # empty if optimizers update copies
        for owner, parameter in zip(self.owners, self.tensors(), strict=True):
            if parameter is not None and parameter.requires_grad and (not stepped or owner in stepped):
                return True
        return False

    def missing(self) -> set[int]:
        """Return the positions, in the attribute `parameters`, of parameters that the model no longer uses.

        Parameters that are retired are left out. A parameter with another name, or in another module, is not missing,
        and is found there from now on.
        """
        named = list(enumerate(self.parameters))
        if type(self.framework).is_in_place is Framework.is_in_place:  # a parameter that is found is in its place
            found = found_in_place(self.parameters)
            if all(map(operator.is_not, found, itertools.repeat(None))):
                return set()
            named = [item for item, parameter in zip(named, found, strict=True) if parameter is None]
        gone = {i for i, item in named if i not in self.retired and not self.framework.is_in_place(item)}
        claimed = {(id(item.owner()), item.key) for item in self.parameters} if gone else set()
        return self.lost({i for i in gone if not self.parameters[i].follow(claimed)})

    def lost(self, positions: AbstractSet[int]) -> set[int]:
        """Return those of the positions whose parameter is in no other module; all others are found there from now on.

        The positions are those of parameters whose modules no longer have them, or are not part of the model any more.
        """
        places = self.places() if positions else {}
        return {i for i in positions if not self.parameters[i].move(places)}

    def places(self) -> dict[int, Place]:
        """Return the place of each present parameter of the model, by id(); none after the model was freed."""
        with contextlib.suppress(ReferenceError):
            modules = self.framework.module.modules()
            return {id(item): (module, key, item) for module in modules for key, item in parameters_of(module).items()}
        return {}

    def _from_optimizers(self, named: NamedParameter) -> nn.Parameter | None:
        """Search the optimizers for a parameter that `torch.func.functional_call` replaces in the model at present."""
        # `named` describes the parameter. Return the parameter. Return None if the parameter is not replaced at
        # present, or if no optimizer has it.
        if not is_temporarily_replaced(named.current()):
            return None
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return next((item for group in groups for item in group["params"] if id(item) == named.identity), None)

    @property
    def device(self) -> torch.device:
        """Return the device with the most parameters. Return the CPU if all parameters are on the meta device."""
        counts = Counter(item.device for item in self.found() if item is not None and not item.is_meta)
        return max(counts, key=counts.__getitem__) if counts else torch.device("cpu")

    @functools.cached_property
    def owners(self) -> Sequence[int]:
        """The position of each element of `parameters` in the list of all parameters of the model."""
        return range(len(self.parameters)) if self.positions is None else self.positions

    @functools.cached_property
    def copies(self) -> int:
        return self.framework.copies(self.world_size)

    @property
    def has_divided_state(self) -> bool:
        """Return whether an optimizer divides its state among replicas, as `ZeroRedundancyOptimizer` does."""
        divided = loaded("torch.distributed.optim", "ZeroRedundancyOptimizer")
        return any(isinstance(item, divided) for item in self.optimizers)

    def only(self, targets: Targets, without: frozenset[int] = frozenset()) -> MonitoredModel:
        """Return a MonitoredModel of the same model with only those parameters that `targets` selects by name or alias.

        Parameters at the positions `without` in the attribute `parameters` are left out.
        """
        if targets.selects_all and not without:
            return self
        kept = [i for i, item in enumerate(self.parameters) if i not in without and targets.chooses(item)]
        return replace(self, parameters=tuple(self.parameters[i] for i in kept), positions=tuple(kept), descriptions={})


def numbers_of(chunks: Sequence[nn.Module]) -> dict[int, int]:
    """Return the number of the model chunk that contains a parameter or module, by id() of the parameter or module.

    If several chunks contain it, the number of the first is returned. The result is empty if there is a single chunk.
    """
    found: dict[int, int] = {}
    for number, chunk in enumerate(chunks) if len(chunks) > 1 else ():
        for part in (*chunk.modules(), *chunk.parameters()):
            found.setdefault(id(part), number)
    return found


def as_one(chunks: Sequence[nn.Module]) -> nn.Module:
    """Return one module of all chunks, whose numbers begin the names in it; a single chunk is returned unchanged."""
    if len(chunks) == 1:
        return chunks[0]
    module = nn.ModuleList(chunks)
    module.training = chunks[0].training  # train() and eval() of a chunk do not change the list
    return module
