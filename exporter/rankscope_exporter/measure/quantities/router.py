"""Quantity `router`: how routers of a mixture of experts distribute tokens, computed from logits and weights."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from torch import nn

from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.parameter_names import NamedModule
from rankscope_exporter.adapters.pytree import Found, ObjectSpec, received, returned
from rankscope_exporter.adapters.torch_private import entry, parameters_of
from rankscope_exporter.measure.formulas import product, routing_sums, similarity
from rankscope_exporter.measure.kernels.tensor_access import dtype_name
from rankscope_exporter.measure.quantities.base import QuantityOptions, TargetNames
from rankscope_exporter.measure.quantities.module_quantity import (
    ModuleQuantity,
    Unreadable,
    check_readable,
    local_matrix,
    weight_of,
)
from rankscope_exporter.process.validation import Checked, at_least, is_whole
from rankscope_exporter.records.record import Numbers, Row

ENTROPY: Final = "router_entropy"
LOAD: Final = "router_load"
SIMILARITY: Final = "router_similarity"

_TOP_K: Final = ("top_k", "topk", "num_experts_per_tok")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(QuantityOptions):
    """Options of the quantity `router`: the modules that are routers, and the location of their logits.

    Without targets, nothing is measured.
    """

    targets: TargetNames = ()
    """Modules that return a logit for each expert.

    This is usually the linear layer with the name `gate` or `router`.
    """
    logits: Literal["returned", "computed"] = "returned"
    """Source of the logits: "returned" by the module, or "computed" from its first argument and its weight.

    "computed" is for modules that return probabilities, such as Megatron's router.
    """
    output: Annotated[str, Checked(ObjectSpec.parse)] | None = None
    """The part of the module's output that contains the logits: "tensor", "tuple[2]:1", "dict:logits".

    Null means the first tensor in the output.
    """
    top_k: Annotated[int, at_least(1)] | None = None
    """Number of experts per token.

    Null reads `top_k`, `topk` or `num_experts_per_tok` of the module or its parent module.
    """


class Router(ModuleQuantity):
    """Features of each router.

    `router_entropy` and `router_load` are computed for each micro-batch, from the logits z over E experts in float32.

    `router_entropy` is the mean over all tokens of -Σ p ln p in nats, with p = softmax(z): ln E if all experts are
    equally likely. `router_load` of expert `index` is the share of tokens with the expert among their top k: k / E if
    all loads are equal. `router_similarity` is the mean cosine between the weights of two experts, over all pairs,
    computed in the first micro-batch of a step. A NaN among the logits makes the entropy NaN, and its token does not
    count in the load.
    """

    name: ClassVar[str] = "router"
    options_class: ClassVar[type[QuantityOptions]] = RouterOptions
    options: RouterOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._spec = None if self.options.output is None else ObjectSpec.parse(self.options.output)

    def _follow(self, named: NamedModule) -> None:
        module = named.module
        candidates = self.monitored.framework.module.modules()
        parents = (item for item in candidates if any(child is module for child in item.children()))
        read = functools.partial(self._read, named, next(map(weakref.ref, parents), None))
        if self.options.logits == "computed":
            compute = lambda router, *given: read(router, _computed(router, received(*given)))  # noqa: E731
            self.at_first_call(named, compute, before=True)
        else:
            self.at_first_call(named, lambda router, output: read(router, self._logits(output)), before=False)

    def _read(self, named: NamedModule, parent: _Parent, module: nn.Module, logits: torch.Tensor) -> None:
        top_k = self.options.top_k or _top_k(module) or _top_k(None if parent is None else parent())
        if top_k is None:
            self.missing("has no router_load, because the number of experts per token is unknown: set top_k", named)
        sums, micro_step = routing_sums(logits, top_k), self._hooking.micro_step
        self._gate.table.defer("features", sums, functools.partial(_rows, named.name, micro_step))
        if self.is_first_in_step:
            self._compare(named, _weight(module, logits.shape[-1]), logits.shape[-1])

    def _logits(self, output: Any) -> torch.Tensor:
        found = returned(output)
        slots = found.slots[:1] if self._spec is None else self._spec.select(found)
        if not slots:
            raise Unreadable(f"returns no {self.options.output or 'tensor'!r}")
        return _checked(slots[0].tensor, "returns an output that")

    def _compare(self, named: NamedModule, weight: torch.Tensor | None, experts: int) -> None:
        if weight is None or experts == 1:
            self.missing("has no router_similarity: this rank holds no whole weight of two experts or more", named)
            return
        row = {"kind": SIMILARITY, "module": named.name, "index": None, "micro_step": None}
        self._gate.table.defer("features", similarity(weight, experts), lambda value: [{**row, "value": value.item()}])


def _checked(logits: torch.Tensor, what: str) -> torch.Tensor:
    """Return `logits`; raise `Unreadable` if they cannot be logits. `what` begins the reason."""
    check_readable(logits, what)
    if not (logits.is_floating_point() and logits.dim() and logits.shape[-1]):
        raise Unreadable(f"{what} is {dtype_name(logits.dtype)}{list(logits.shape)} and cannot be logits")
    return logits


def _computed(module: nn.Module, found: Found) -> torch.Tensor:
    """Return the logits, computed from the first argument and the weight of a router.

    If they cannot be computed, raise `Unreadable`. The weight may be [experts, width] or [width, experts].
    """
    if not found.slots:
        raise Unreadable("has no tensor among its arguments")
    given, weight = _checked(found.slots[0].tensor, "has an argument that"), local_matrix(weight_of(module))
    if given.shape[-1] not in weight.shape:
        raise Unreadable(f"has a weight of shape {list(weight.shape)}, which does not fit its argument")
    bias = entry(parameters_of(module), "bias")
    return product(given, weight if weight.shape[1] == given.shape[-1] else weight.t(), bias)


_Parent = weakref.ref[nn.Module] | None
"""Weak reference to the module that contains a router; None if there is none."""


def _top_k(module: nn.Module | None) -> int | None:
    known = {} if module is None else vars(module)
    found = (known.get(name) for name in _TOP_K)
    return next((value for value in found if value is not None and is_whole(value) and value > 0), None)


def _weight(module: nn.Module, experts: int) -> torch.Tensor | None:
    """Return the weight of a router, or that of a layer in the router; None if no weight is whole on this rank."""
    for owner in (module, *module.children()):
        with contextlib.suppress(Unreadable):
            whole = local_matrix(weight_of(owner))
            if experts in whole.shape:
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
