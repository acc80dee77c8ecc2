"""How the routers of a mixture of experts decide: from the logits they return, and from their weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.module_names import NamedModule
from rankscope_exporter.model.parameter_names import entry
from rankscope_exporter.model.pytree import Found, ObjectSpec, received, returned
from rankscope_exporter.quantities.base import Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.module_calls import ModuleCalls, Running, local_matrix_or_reason, weight_of
from rankscope_exporter.records.host_transfer import Numbers, Row
from rankscope_exporter.statistics.formulas.routing import product, routing_sums, similarity
from rankscope_exporter.statistics.tensor_access import why_not_measurable

ENTROPY: Final = "router_entropy"
LOAD: Final = "router_load"
SIMILARITY: Final = "router_similarity"

_TOP_K: Final = ("top_k", "topk", "num_experts_per_tok")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(QuantityOptions):
    """Which modules are routers, and how to read what they return. Without targets nothing is measured."""

    targets: tuple[str, ...] = ()
    """Modules that return a logit for each expert: usually the linear layer called `gate` or `router`."""
    logits: str = "returned"
    """"returned" by the module, or "computed" from its first argument and its weight, where it returns probabilities as
    Megatron's router does."""
    output: str | None = None
    """Which of what is returned are the logits: "tensor", "tuple[2]:1", "dict:logits"; null is the first tensor."""
    top_k: int | None = None
    """How many experts a token goes to; null takes `top_k`, `topk` or `num_experts_per_tok` of the module or of the one
    that holds it."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        if self.logits not in ("returned", "computed"):
            raise ValueError(f"logits is 'returned' or 'computed', not {self.logits!r}")
        if self.output is not None:
            ObjectSpec.parse(self.output)
        self._check_whole("top_k", 1)


class Router(Quantity):
    """Features of each router; the first two of each micro-batch, from its logits z over E experts in float32:

    `router_entropy` is the mean over all tokens of -Σ p ln p in nats, p = softmax(z): ln E when it does not choose;
    `router_load` of expert `index` is the share of tokens with the expert among their top k, k / E when all are equal;
    `router_similarity` is the mean cosine between the weights of two experts, over all pairs, at the first call of a
    step. A NaN among the logits makes the entropy NaN, and such tokens do not count in the load.
    """  # noqa: D400 - the list goes on

    name: ClassVar[str] = "router"
    measures_tensors: ClassVar[bool] = False
    options_class: ClassVar[type[QuantityOptions]] = RouterOptions
    of_modules: ClassVar[bool] = True
    options: RouterOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._spec = None if self.options.output is None else ObjectSpec.parse(self.options.output)
        self._compared: set[str] = set()
        self._calls: ModuleCalls
        self._gate: SamplingGate

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Register on every module of the targets."""
        self._gate = gate
        self._calls = ModuleCalls(self.name, hooking, gate)
        root = self.monitored.framework.module
        for named in self._calls.find(root, self.targets):
            holder = _holder(root, named)
            if self.options.logits == "computed":
                self._calls.before(named, functools.partial(self._called, holder))
            else:
                self._calls.after(named, functools.partial(self._returned, holder))

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Nothing of this step has been called yet."""
        self._compared.clear()
        self._calls.on_step_begin()

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        """Say what was missing."""
        self._calls.on_step_end()

    def _called(self, holder: _Holder, call: Running, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._read(holder, call, _computed(call.module, received(args, kwargs)))

    def _returned(self, holder: _Holder, call: Running, output: Any) -> None:
        self._read(holder, call, self._logits(output))

    def _read(self, holder: _Holder, call: Running, logits: torch.Tensor | str) -> None:
        named = call.named
        if isinstance(logits, str):
            self._calls.missing(logits, named)
            return
        top_k = self.options.top_k or _top_k(call.module) or _top_k(None if holder is None else holder())
        if top_k is None:
            self._calls.missing(
                "has no router_load, since how many experts a token goes to is not known: set top_k", named
            )
        sums = routing_sums(logits, top_k)
        self._gate.table.defer("features", sums, functools.partial(_rows, named.name, call.micro_step))
        if named.name not in self._compared:
            self._compared.add(named.name)
            self._compare(call, logits.shape[-1])

    def _logits(self, output: Any) -> torch.Tensor | str:
        found = returned(output)
        slots = found.slots[:1] if self._spec is None else self._spec.select(found)
        if not slots:
            return f"returns no {self.options.output or 'tensor'!r}"
        reason = _why_not(slots[0].tensor)
        return slots[0].tensor if reason is None else f"returns what is {reason}"

    def _compare(self, call: Running, experts: int) -> None:
        named, weight = call.named, _weight(call.module, experts)
        if weight is None or experts == 1:
            self._calls.missing("has no router_similarity: it holds no whole weight of two experts or more", named)
            return
        alike = functools.partial(_similarity_rows, named.name)
        self._gate.table.defer("features", similarity(weight, experts), alike)


def _why_not(logits: torch.Tensor) -> str | None:
    if hasattr(logits, "placements"):
        return "a distributed tensor, whose parts do not meet on one rank"
    reason = why_not_measurable(logits)
    if reason is None and not (logits.is_floating_point() and logits.dim() and logits.shape[-1]):
        reason = f"{str(logits.dtype).removeprefix('torch.')}{list(logits.shape)}, which are no logits"
    return reason


def _computed(module: nn.Module, found: Found) -> torch.Tensor | str:
    """Return the product of what a router is given and its weight, whichever way that lies; or why not, in words."""
    given = found.slots[0].tensor if found.slots else None
    reason = "nothing" if given is None else _why_not(given)
    if given is None or reason is not None:
        return f"is given what is {reason}"
    weight = local_matrix_or_reason(weight_of(module))
    if isinstance(weight, str):
        return weight
    if given.shape[-1] not in weight.shape:
        return f"has a weight of shape {list(weight.shape)}, which does not fit what it is given"
    bias = entry(module._parameters, "bias")  # noqa: SLF001 - a property could compute anything
    return product(given, weight if weight.shape[1] == given.shape[-1] else weight.t(), bias)


_Holder = weakref.ref[nn.Module] | None
"""The module that holds a router."""


def _holder(root: nn.Module, named: NamedModule) -> _Holder:
    module = named.module
    parents = (parent for parent in root.modules() if any(child is module for child in parent.children()))
    return next(map(weakref.ref, parents), None)


def _top_k(module: nn.Module | None) -> int | None:
    known = {} if module is None else vars(module)
    found = (known.get(name) for name in _TOP_K)
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _weight(module: nn.Module, experts: int) -> torch.Tensor | None:
    """Return the weight of a router, its own or that of a layer in it; None when it is not whole here."""
    for owner in (module, *module.children()):
        whole = local_matrix_or_reason(weight_of(owner))
        if isinstance(whole, torch.Tensor) and experts in whole.shape:
            return whole
    return None


def _rows(module: str, micro_step: int, sums: Numbers) -> Iterable[Row]:
    tokens, entropy, known, *chosen = sums.tolist()
    common = {"module": module, "micro_step": micro_step}
    if tokens:
        yield {**common, "kind": ENTROPY, "index": None, "value": entropy / tokens}
    if known:
        for expert, count in enumerate(chosen):
            yield {**common, "kind": LOAD, "index": expert, "value": count / known}


def _similarity_rows(module: str, value: Numbers) -> Iterable[Row]:
    yield {"kind": SIMILARITY, "module": module, "index": None, "micro_step": None, "value": value.item()}
