"""Quantities that are read around the update of the optimizer.

Quantity `parameters`: parameters directly before and directly after the update, and the norm of the update.

Quantity `optimizer_state`: the state of every parameter after the update, such as Adam's moments.

Quantity `adam_updates`: histograms of Adam's update of each element, and of the ratio of Adam's two moments.

Quantity `direction`: share of the elements of a parameter for which gradient and momentum have the same sign.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import torch

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.base import ParameterState
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_names import Targets, local_tensor, real_parts
from rankscope_exporter.measure.kernels.measure_group import sums_of_signs
from rankscope_exporter.measure.kernels.tensor_access import NO_CODES, dtype_name, is_code
from rankscope_exporter.measure.quantities.base import UPDATE, Quantity, QuantityOptions, TargetNames
from rankscope_exporter.measure.table import Table
from rankscope_exporter.process.validation import at_least
from rankscope_exporter.records.plan import ParameterEntries
from rankscope_exporter.records.record import ExpectedRows, Numbers, Row

UPDATE_NORM: Final = "update_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersOptions(QuantityOptions):
    """Options of the quantity `parameters`."""

    updates: bool = False
    """If true, also measure the feature `update_norm`, the norm of the difference that the update makes.

    At sampled steps, this needs memory for one more copy of the parameters.
    """


class Parameters(Quantity):
    """Measures two rows per parameter, `param_before` and `param_after` the update, and optionally `update_norm`.

    `update_norm` is a feature: the norm of the difference that the update makes.

    `param_after` of a step is usually equal to `param_before` of the next step. A difference between these two rows
    shows a change between the two steps, such as a loaded checkpoint, weight averaging or an accidental write.
    """

    name: ClassVar[str] = "parameters"
    options_class: ClassVar[type[QuantityOptions]] = ParametersOptions
    options: ParametersOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._copies: list[torch.Tensor | None] = []  # of the parameters before the first update of the step
        self._moved: list[tuple[list[str], torch.Tensor]] = []
        self._names = [named.name for named in self.monitored.parameters]

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        return monitored.elsewhere

    def entries(self) -> ParameterEntries:
        return self.parameter_entries(Kind.PARAM_BEFORE, Kind.PARAM_AFTER)

    def on_optimizer_step_begin(self, table: Table) -> None:
        if self.monitored.update.stepped:  # an optimizer has already updated parameters in this step
            return
        tensors = self.monitored.framework.updated_tensors(self.monitored.tensors())
        table.measure(tensors, table.slots[Kind.PARAM_BEFORE])
        if self.options.updates and not self._copies:
            copies = self._copies = [None] * len(tensors)

            def keep(positions: Sequence[int]) -> None:
                for position in positions:
                    tensor = tensors[position]
                    copies[position] = None if tensor is None else _values(tensor).clone()

            table.isolate("copies", self._names, tensors, keep)

    def on_optimizer_step_end(self, table: Table) -> None:
        # With several optimizers, the values after the last one count.
        tensors = self.monitored.framework.updated_tensors(self.monitored.tensors())
        table.measure(tensors, table.slots[Kind.PARAM_AFTER])
        moved = self._moved = []

        def compare(positions: Sequence[int]) -> None:
            norms = {}
            for position in positions:
                before, after = self._copies[position], tensors[position]
                if before is not None and after is not None and before.shape == _values(after).shape:
                    norms[self._names[position]] = _distance(before, _values(after))
            if norms:
                moved.append((list(norms), torch.stack(list(norms.values()))))

        if self._copies:
            table.isolate(UPDATE_NORM, self._names, tensors, compare)

    def expected(self) -> ExpectedRows:
        kinds: set[str] = {Kind.PARAM_AFTER} if self.monitored.is_trained() else set()
        if kinds and UPDATE not in self.monitored.compiled:  # no hook runs before an update in compiled code
            kinds |= {Kind.PARAM_BEFORE, *([UPDATE_NORM] if self.options.updates else [])}
        return ExpectedRows(self.name, frozenset(kinds))

    def on_step_end(self, table: Table) -> None:
        for names, norms in self._moved:
            table.defer("features", norms, functools.partial(_features, UPDATE_NORM, names))
        self._copies, self._moved = [], []


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return real_parts(local_tensor(tensor.detach()))


def _distance(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    precise = torch.promote_types(before.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(after.to(precise) - before.to(precise))
    return norm.float()


def _features(kind: str, names: Sequence[str], numbers: Numbers) -> Iterable[Row]:
    """Yield the rows of the dataset `features` for a number of each parameter."""
    for name, value in zip(names, numbers.tolist(), strict=True):
        yield {"kind": kind, "module": name, "index": None, "micro_step": None, "value": value}


# Key in `optimizer.state[parameter]` and kind, for optimizers with `betas` and for those with `momentum`.
ADAM_STATE: Final[dict[str, str]] = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}
MOMENTUM_STATE: Final[dict[str, str]] = {"momentum_buffer": Kind.MOMENTUM}
KIND_OF_STATE: Final = ADAM_STATE | MOMENTUM_STATE
"""The kind of each key in `optimizer.state[parameter]`.

For a key that is not in this dictionary, the kind is the key.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStateOptions(QuantityOptions):
    """Options of the quantity `optimizer_state`: the state to measure in addition to moments and momentum."""

    names: TargetNames = ()
    """Keys, or globs, of additional tensors in `optimizer.state[parameter]`: "max_exp_avg_sq", "square_avg", "*"."""


class StateQuantity(Quantity):
    """Base class of quantities that read the state of optimizers."""

    needed: ClassVar[str]
    """The state without which a parameter has no rows, for messages. A subclass may define `expected` instead."""
    _expected: Iterable[str] = ()  # kinds of the present step

    @staticmethod
    def elsewhere(monitored: MonitoredModel) -> frozenset[int]:
        return frozenset() if monitored.has_divided_state else monitored.elsewhere

    def expected(self) -> ExpectedRows:
        return ExpectedRows(self.name, frozenset(self._expected), f"the state has no {self.needed}")


class OptimizerState(StateQuantity):
    """Measures one row per parameter for each kind of optimizer state.

    The kinds follow from the options of the optimizers, because the state itself appears only in the first step. Kinds
    of an optimizer that the training creates after attach are added at the first sampled step of this optimizer.
    Tensors of the state that the option `names` selects are added at the first sampled step at which they exist.
    """

    name: ClassVar[str] = "optimizer_state"
    options_class: ClassVar[type[QuantityOptions]] = OptimizerStateOptions
    options: OptimizerStateOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._kinds = kinds_of(monitored.optimizers)  # by key
        self._named = Targets(self.options.names)
        self._found: dict[str, list[int]] = {}  # additional key -> its parameters
        self._in_use: list[ParameterState] = []  # at the last measured update
        self._remarks: dict[tuple[Any, ...], str] = {}  # by optimizer and keys of the state

    def entries(self) -> ParameterEntries:
        return self.parameter_entries(*self._kinds.values())

    def on_optimizer_step_end(self, table: Table) -> None:
        tensors = self.monitored.tensors()
        known, optimizers = self.monitored.states(tensors), self.monitored.optimizers.present()
        self._in_use = in_use(tensors, known, len(optimizers))
        for key, kind in kinds_of(optimizers).items():
            if key not in self._found:
                self._kinds.setdefault(key, kind)
        for key, kind in self._kinds.items():
            if kind in table.slots:
                slots = table.slots[kind]
            else:
                slots = table.add(key, functools.partial(self.parameter_entries, kind), self.monitored.owners)
            table.measure(state_tensors(known, key), slots)
        if self._named.patterns:
            self._measure_named(known, table)

    def _measure_named(self, known: Sequence[ParameterState | None], table: Table) -> None:
        states: list[Mapping[str, Any]] = [{} if own is None else own.state for own in known]
        others = (key for state in states for key in self._selected(state))
        for key in dict.fromkeys(key for key in others if key not in self._found and key not in self._kinds):
            self._found[key] = [index for index, state in enumerate(states) if state_tensor(state, key) is not None]
        for key, owners in self._found.items():
            named = functools.partial(self._named_entries, key, states)
            found = table.add(key, named, [self.monitored.owners[index] for index in owners])
            table.measure(state_tensors([known[owner] for owner in owners], key), found)

    def expected(self) -> ExpectedRows:
        kinds: set[str] = set()
        remarks: dict[tuple[Any, ...], str] = {}
        for own in self._in_use:
            kinds.update(kinds_of([own.optimizer]).values())
            key = id(own.optimizer), *own.state
            remarks[key] = self._remarks.get(key) or _described(own)
        if self._in_use and self._named.patterns:
            kinds.update(KIND_OF_STATE.get(name, name) for name in self._named.patterns if name.isidentifier())
        self._in_use, self._remarks = [], remarks  # the first one holds optimizers
        return ExpectedRows(self.name, frozenset(kinds), "; ".join(dict.fromkeys(remarks.values())))

    def _named_entries(self, key: str, states: list[Mapping[str, Any]]) -> list[PlanEntry]:
        return [self._entry(key, index, states[index][key]) for index in self._found[key]]

    def _selected(self, state: Mapping[str, Any]) -> Iterator[str]:
        for key in filter(self._named.selects, state):
            value = state_tensor(state, key)
            # Adam keeps `step`, a number, as a tensor. It is read only if it is named explicitly.
            if value is not None and (value.numel() > 1 or key in self._named.patterns):
                yield key

    def _entry(self, key: str, index: int, value: torch.Tensor) -> PlanEntry:
        entry = self.parameter_entry(KIND_OF_STATE.get(key, key), index)
        shape = tuple(local_tensor(value).shape)
        if shape != entry.shape:  # one number for the parameter, equal for all its parts
            whole = "replica" if self.monitored.framework.traits.replicated else "full"
            placement = entry.placement if entry.shard_group is None else whole
            entry = replace(entry, placement=placement, shard_group=None, shape=shape)
        return replace(entry, dtype=dtype_name(value.dtype))


def state_tensor(state: Mapping[str, Any], key: str) -> torch.Tensor | None:
    """Return the tensor that `state` has for `key`; None without one, and if its elements are codes, not values."""
    value = state.get(key)
    return value if isinstance(value, torch.Tensor) and (value.dtype in NO_CODES or not is_code(value)) else None


def state_tensors(states: Sequence[ParameterState | None], key: str) -> list[torch.Tensor | None]:
    """Return the result of `state_tensor` for each of `states`; usually, a check of their dtypes is sufficient."""
    found: list[torch.Tensor | None] = []
    for own in states:
        value = None if own is None else own.state.get(key)
        if type(value) is not torch.Tensor or value.dtype not in NO_CODES:
            value = None if own is None else state_tensor(own.state, key)
        found.append(value)
    return found


def in_use(
    parameters: Sequence[torch.nn.Parameter | None], states: Sequence[ParameterState | None], optimizers: int
) -> list[ParameterState]:
    """Return, for each optimizer, the state of its first parameter that requires a gradient.

    `optimizers` is the number of optimizers, at which the search ends.
    """
    found: dict[int, ParameterState] = {}
    for parameter, own in zip(parameters, states, strict=True):
        if own is not None and parameter is not None and parameter.requires_grad:
            found.setdefault(id(own.optimizer), own)
            if len(found) >= optimizers:
                break
    return list(found.values())


def _described(own: ParameterState) -> str:
    tensors = {key: value for key, value in own.state.items() if isinstance(value, torch.Tensor)}
    found = [f"{key} ({dtype_name(value.dtype)})" for key, value in tensors.items()]
    return f"the state of {type(own.optimizer).__name__} has {', '.join(found) or 'no tensors'}"


def kinds_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, str]:
    """Return, by key, the kinds of the state that optimizers with these options usually have."""
    has_moments = has_momentum = False
    for optimizer in optimizers:
        has_moments |= "betas" in optimizer.defaults
        for group in optimizer.param_groups:
            has_momentum |= bool(group.get("momentum"))
    return (ADAM_STATE if has_moments else {}) | (MOMENTUM_STATE if has_momentum else {})


_KINDS: Final = ("adam_update", "adam_ratio")

_CHUNK: Final = 1 << 22  # elements at a time: histc counts in float32, which is exact up to 2^24, and memory is bounded
_OTHER_FORMULAS: Final = (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
_EDGES: Final = ("below", "above", "nonfinite")  # the numbers before those of the bins


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamUpdatesOptions(QuantityOptions):
    """Options of the quantity `adam_updates`: the bins of both histograms."""

    bins: Annotated[int, at_least(1)] = 30
    low: float = -1.0
    high: float = 1.0
    """Values outside of the range from `low` to `high` are counted separately, not in the bins."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        if not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")

    @property
    def scheme(self) -> str:
        """Return the range and number of the bins as text, for the column `scheme` of the dataset `histograms`."""
        return f"linear:{self.low:g}:{self.high:g}:{self.bins}"


class AdamUpdates(StateQuantity):
    """Two histograms per parameter, from the optimizer state after step t, over all elements in float32.

    With m̂ = exp_avg / (1 - β1^t) and v̂ = exp_avg_sq / (1 - β2^t) (max_exp_avg_sq with amsgrad), `adam_update` is m̂ /
    (√v̂ + ε), which the optimizer multiplies by the learning rate in this step. `adam_ratio` is m̂ / √v̂ (Kingma and Ba
    2015, algorithm 1). A complex number counts as two elements, as in Adam.
    """

    name: ClassVar[str] = "adam_updates"
    measures_tensors: ClassVar[bool] = False
    options_class: ClassVar[type[QuantityOptions]] = AdamUpdatesOptions
    options: AdamUpdatesOptions
    needed: ClassVar[str] = "moments of Adam"

    def on_optimizer_step_end(self, table: Table) -> None:
        tensors, optimizers = self.monitored.tensors(), self.monitored.optimizers
        states = self.monitored.states(tensors)
        self._expected = _KINDS if any(map(_has_options_of_adam, in_use(tensors, states, len(optimizers)))) else ()
        pairs = zip(self.monitored.parameters, states, strict=True)
        found = {named.name: own for named, own in pairs if own is not None and _is_adam(own)}
        names, kept = list(found), list(found.values())

        def count(positions: Sequence[int]) -> None:
            counted = [_histograms(kept[i].state, kept[i].group, self.options) for i in positions]
            rows = functools.partial(self._rows, [names[i] for i in positions])
            table.defer("histograms", torch.stack(counted), rows)

        table.isolate("histograms", names, [own.state["exp_avg"] for own in kept], count)

    def _rows(self, names: list[str], numbers: Numbers) -> Iterable[Row]:
        for name, of_kinds in zip(names, numbers.tolist(), strict=True):
            for kind, found in zip(_KINDS, of_kinds, strict=True):
                bins = {**dict(zip(_EDGES, found, strict=False)), "counts": found[len(_EDGES) :]}
                yield {"kind": kind, "tensor": name, "scheme": self.options.scheme, **bins}


def _has_options_of_adam(own: ParameterState) -> bool:
    return {"betas", "eps"} <= own.group.keys() and not isinstance(own.optimizer, _OTHER_FORMULAS)


def _is_adam(own: ParameterState) -> bool:
    moments = (state_tensor(own.state, key) for key in ADAM_STATE)
    return _has_options_of_adam(own) and "step" in own.state and all(moment is not None for moment in moments)


def _histograms(state: Mapping[str, Any], group: Mapping[str, Any], bins: AdamUpdatesOptions) -> torch.Tensor:
    """Return two histograms, of the update and of the ratio, as int64 [2, 3 + bins] on the device of the state.

    The first three columns are the numbers of values that are below `low`, above `high`, and not finite.
    """
    first = real_parts(local_tensor(state["exp_avg"])).reshape(-1)
    second = real_parts(local_tensor(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])).reshape(-1)
    (beta1, beta2), epsilon, step = group["betas"], group["eps"], state["step"]
    total = torch.zeros(len(_KINDS), len(_EDGES) + bins.bins, dtype=torch.int64, device=first.device)
    for m, v in zip(torch.split(first, _CHUNK), torch.split(second, _CHUNK), strict=True):
        corrected = m.float() / (1 - beta1**step)
        root = (v.float() / (1 - beta2**step)).sqrt_()
        total[0] += _counts(corrected / (root + epsilon), bins)
        total[1] += _counts(corrected / root, bins)
    return total


def _counts(values: torch.Tensor, bins: AdamUpdatesOptions) -> torch.Tensor:
    finite = values.isfinite()
    edges = (finite & (values < bins.low), finite & (values > bins.high), ~finite)
    # The documentation of histc does not define the bin of a value that is not finite.
    inside = torch.histc(values.masked_fill(~finite, bins.high + 1), bins.bins, bins.low, bins.high)
    return torch.cat([torch.stack([edge.sum() for edge in edges]), inside.to(torch.int64)])


DIRECTION: Final = "direction_agreement"
_MOMENTA: Final = ("exp_avg", "momentum_buffer")


class GradientAlignment(StateQuantity):
    """A feature of each parameter, between 0 and 1, with the agreement of the signs of gradient and momentum.

    It is (Σ sign(g)·sign(m) / n + 1) / 2 over its n elements.

    g is the gradient that the optimizer receives, and m the momentum before the optimizer step. If g or m is 0 or NaN,
    the element counts as half an agreement, because torch.sign of both is 0. A complex number counts as two elements.
    The feature is absent without a momentum, as before the first optimizer step.
    """

    name: ClassVar[str] = "direction"
    measures_tensors: ClassVar[bool] = False
    needed: ClassVar[str] = "momentum"

    def on_optimizer_step_begin(self, table: Table) -> None:
        if self.monitored.update.is_inside_backward:  # the other gradients are incomplete
            return
        names: list[str] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        framework, parameters = self.monitored.framework, self.monitored.tensors(of_update=True)
        stepped = self.monitored.update.stepped
        states = self.monitored.states(parameters)
        found = in_use(parameters, states, len(self.monitored.optimizers))
        self._expected = [DIRECTION] if kinds_of([own.optimizer for own in found]) else ()
        listed = zip(self.monitored.parameters, self.monitored.owners, parameters, states, strict=True)
        for named, owner, parameter, own in listed:
            gradient = None if parameter is None or owner in stepped else framework.gradient(parameter)
            momentum = None if own is None else _momentum(own.state)
            if gradient is not None and momentum is not None and not gradient.is_sparse:
                names.append(named.name)
                pairs.append((gradient, momentum))

        def compare(positions: Sequence[int]) -> None:
            parts = [[real_parts(local_tensor(item)) for item in pairs[i]] for i in positions]
            sums = sums_of_signs([(gradient, momentum) for gradient, momentum in parts], compiled=table.is_compiled)
            counts = [gradient.numel() for gradient, _ in parts]
            table.defer("features", sums, functools.partial(_agreements, [names[i] for i in positions], counts))

        table.isolate(DIRECTION, names, [momentum for _, momentum in pairs], compare)


def _momentum(state: Mapping[str, Any]) -> torch.Tensor | None:
    found = (state_tensor(state, key) for key in _MOMENTA)
    return next((momentum for momentum in found if momentum is not None), None)


def _agreements(names: Sequence[str], counts: Sequence[int], sums: Numbers) -> Iterable[Row]:
    agreements = (sums.astype(np.float64) / np.maximum(counts, 1) + 1) / 2
    return _features(DIRECTION, names, agreements.astype(np.float32))
