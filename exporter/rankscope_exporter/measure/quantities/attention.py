"""Quantity `attention`: entropy and maximum of the attention weights of each head.

They are computed from the query, key and mask that a module receives. torch's own `nn.MultiheadAttention` projects its
inputs inside of the module. For it, the quantity computes the projection of query and key a second time.

Options of the quantity `attention`, and access to query, key and mask among the arguments of a module's call.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, TypeGuard

import torch
from torch import nn

from rankscope_exporter.adapters.parameter_names import NamedModule
from rankscope_exporter.adapters.torch_private import saved_causality, saves_no_mask
from rankscope_exporter.measure import formulas
from rankscope_exporter.measure.quantities.base import QuantityOptions, TargetNames
from rankscope_exporter.measure.quantities.module_quantity import (
    ModuleQuantity,
    Unreadable,
    check_readable,
    local_matrix,
)
from rankscope_exporter.measure.table import Table
from rankscope_exporter.process.validation import Allowed, at_least, is_number, is_whole, number
from rankscope_exporter.records.record import Numbers, Row

_ARGUMENTS: Final = Allowed(
    "the position or the name of an argument",
    lambda value: value >= 0 if is_whole(value) else isinstance(value, str) and value != "",
)
Argument = Annotated[int | str, _ARGUMENTS]
"""The position of an argument of `forward`, from 0, or the name of the argument.

In both cases, the argument is found whether it is passed by position or by keyword.
"""

AUTO: Final = "auto"
NONE: Final = "none"

_MASKS: Final = ("attn_mask", "attention_mask", "mask")
_CAUSAL: Final = ("is_causal", "causal", "attn_mask_type")
_CAUSAL_VALUES: Final = Allowed("true, false or 'auto'", lambda value: isinstance(value, bool) or value == AUTO)
_SCALES: Final = ("scale", "softmax_scale")
_LETTERS: Final = "bhsd"
_TRUE_HIDES: Final = ("megatron.", "mindspeed.", "transformer_engine.")
"""Packages in which True in a mask means that a key is hidden.

In torch's scaled_dot_product_attention, True means that a key is visible.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions(QuantityOptions):
    """Options of the quantity `attention`: the modules to measure, and the meaning of the arguments of these modules.

    If there are no targets, nothing is measured.
    """

    targets: TargetNames = ()
    """Modules whose `forward` receives query and key with separate heads.

    The modules do not contain the projections of query and key.
    """
    order: str = "s,b,h,d"
    """Order of the dimensions of query and key, by four letters: s sequence, b batch, h heads, d width of a head."""
    query: Argument = 0
    key: Argument = 1
    mask: Argument = AUTO
    """The argument with the mask.

    "auto" reads the parameter attn_mask, attention_mask or mask; "none" reads no mask.
    """
    mask_true: Literal["auto", "attends", "hides"] = "auto"
    """Meaning of True in a mask: "attends", as in torch's scaled_dot_product_attention, or "hides", as in Megatron.

    "auto" is "hides" for modules of Megatron, MindSpeed and Transformer Engine, and "attends" for all other modules.
    """
    causal: Annotated[bool | str, _CAUSAL_VALUES] = AUTO
    """Hide keys after the position of a query in addition to the mask: true, false or "auto".

    "auto" reads the arguments is_causal, causal and attn_mask_type, then the attributes of the module with these names.
    Without them and without a mask, it reads the autograd graph of the call, which has the mask inside of the module.
    """
    scale: Annotated[float, number("a finite number")] | None = None
    """Factor of the products of query and key.

    Null reads the argument scale or softmax_scale; without them it is 1 / √d.
    """
    rows: Annotated[int, at_least(1)] | None = None
    """Largest number of queries that are read per sequence.

    The queries that are read are at equal distances in the sequence. Null reads all queries.
    """

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        order = self.order.replace(" ", "") if isinstance(self.order, str) else ""
        if sorted(order.split(",")) != sorted(_LETTERS):
            raise ValueError(f"order must be 's,b,h,d' or these letters in another order, not {self.order!r}")
        object.__setattr__(self, "order", order)


class Arguments:
    """Finds query, key, mask and scale factor among the arguments of a call of one module."""

    def __init__(self, named: NamedModule, options: AttentionOptions) -> None:
        self.named = named
        home = f"{type(named.module).__module__}."
        hides = home.startswith(_TRUE_HIDES) if options.mask_true == AUTO else options.mask_true == "hides"
        self.true_attends = not hides
        """True if True in a mask of this module means that a key is visible."""
        self._options = options
        self._names = _parameter_names(named.module)

    def mask(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the mask of a call; None if the call has no mask."""
        wanted = self._options.mask
        if wanted == NONE:
            return None
        if wanted != AUTO:
            return self.get(wanted, args, kwargs)
        found = (self.get(name, args, kwargs) for name in _MASKS)
        return next((value for value in found if value is not None), None)

    def causal(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | None:
        """Return whether a call of `module` hides later keys from each query; None if nothing states it."""
        wanted = self._options.causal
        if isinstance(wanted, bool):
            return wanted
        flags = [self.get(name, args, kwargs) for name in _CAUSAL]
        # The dictionary itself: a property could compute anything.
        flags += [vars(module).get(name) for name in _CAUSAL]
        is_told = self._options.mask == NONE or self.mask(args, kwargs) is not None
        flags += [False] if is_told else []
        return next((answer for answer in map(_causal_or_none, flags) if answer is not None), None)

    def scale(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
        """Return the factor by which a call multiplies the products of query and key; None for the default factor."""
        given = (self._options.scale, *(self.get(name, args, kwargs) for name in _SCALES))
        return next((float(value) for value in given if is_number(value) and math.isfinite(value)), None)

    def get(self, argument: Argument, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return an argument of a call; None if it was not passed."""
        names = self._names
        if isinstance(argument, int):
            if argument < len(args):
                return args[argument]
            return kwargs.get(names[argument]) if argument < len(names) else None
        if argument in kwargs:
            return kwargs[argument]
        position = names.index(argument) if argument in names else len(args)
        return args[position] if position < len(args) else None


def _parameter_names(module: Any) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError, AttributeError, RuntimeError):  # the forward of a scripted module
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(item.name for item in parameters if item.kind in by_position)


def _causal_or_none(value: Any) -> bool | None:
    """Return whether `value`, a bool or the name of a mask type, means a causal mask; None for any other value."""
    if isinstance(value, bool):
        return value
    name = value if isinstance(value, str) else getattr(value, "name", None)
    return "causal" in name.lower() if isinstance(name, str) and not isinstance(value, torch.Tensor) else None


_SIGNATURE: Final = inspect.signature(nn.MultiheadAttention.forward)
_BATCHED: Final = 3
_MOST_NODES: Final = 64
_PRODUCTS: Final = ("Bmm", "Mm")
_KEEP_SCORES: Final = ("View", "UnsafeView", "Permute", "Transpose", "Expand", "ToCopy", "Div", "Mul", "Softmax")
"""Names of operations between the product of query and key and the softmax that hide no key."""


def is_multihead(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether the module is torch's own multi-head attention, or a subclass with the same method `forward`."""
    return type(module).forward is nn.MultiheadAttention.forward


def projected(
    module: nn.MultiheadAttention, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return query and key as [batch, heads, sequence, width], and the mask of the scores of `nn.MultiheadAttention`.

    If query, key or mask cannot be read from the arguments of the module's call, raise `Unreadable`.
    """
    given = _SIGNATURE.bind(module, *args, **kwargs).arguments
    if module.bias_k is not None or module.add_zero_attn:
        raise Unreadable("adds its own keys (bias_k, add_zero_attn)")
    for name in ("query", "key"):
        check_readable(given[name], name)
    if module.in_proj_weight is not None:
        parts: Sequence[torch.Tensor] = local_matrix(module.in_proj_weight).chunk(3)[:2]
    else:
        parts = [local_matrix(module.q_proj_weight), local_matrix(module.k_proj_weight)]
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    query = _heads(module, given["query"], parts[0], biases[0])
    key = _heads(module, given["key"], parts[1], biases[1])
    batch, count, queries, _ = query.shape
    mask = given.get("attn_mask")
    padding = given.get("key_padding_mask")
    masks = [mask, None if padding is None else padding.reshape(batch, 1, 1, -1)]
    full = [formulas.broadcast(form, batch, count, queries, key.shape[2]) for form in masks if form is not None]
    known = [one for one in full if one is not None]
    if len(known) < len(full):
        raise Unreadable("has a mask that does not fit the scores of its calls")
    return query, key, _both(known)


def _heads(module: nn.MultiheadAttention, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    x = x.detach()
    if x.dim() < _BATCHED:
        x = x[None]
    elif not module.batch_first:
        x = x.transpose(0, 1)
    out = formulas.product(x, weight, bias)
    return torch.unflatten(out, -1, (module.num_heads, module.head_dim)).transpose(1, 2)


def _both(masks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one mask with the combined effect of all masks of torch's multi-head attention.

    In a bool mask, True means that a key is hidden.
    """
    if len(masks) < 2:
        return masks[0] if masks else None
    hides = [mask if mask.dtype is torch.bool else mask <= formulas.HIDING for mask in masks]
    added = [mask for mask in masks if mask.dtype is not torch.bool]
    hidden = hides[0] | hides[1]
    return functools.reduce(torch.add, added).masked_fill(hidden, 2 * formulas.HIDING) if added else hidden


ENTROPY: Final = "attention_entropy"
SOFTMAX_MAX: Final = "softmax_max"

_DIMENSIONS: Final = 4


class Attention(ModuleQuantity):
    """Two features of each attention head and micro-batch, over all elements of the batch and all queries.

    `index` is the number of the head. The attention weights are p_i = softmax_j(scale · q_i·k_j + mask_ij), over the
    keys j that are not hidden, in float32, or in float64 for a float64 query. `attention_entropy` is the mean over the
    queries i of -Σ_j p_ij ln p_ij, in nats; it is 0 if each query sees one key. `softmax_max` is the mean over the
    queries i of max_j p_ij. The plain maximum would always be 1 under a causal mask, because the first query sees one
    key. A query without a visible key does not count, and a head without such queries has no rows. A NaN among the
    visible numbers makes both features NaN.

    A call without a mask and without a causal flag may mask inside of the module. If the autograd graph of its output
    shows a causal mask or none, this is used; otherwise, the module is reported and has no rows.
    """

    name: ClassVar[str] = "attention"
    options_class: ClassVar[type[QuantityOptions]] = AttentionOptions
    options: AttentionOptions

    def _follow(self, named: NamedModule) -> None:
        self.at_first_call(named, functools.partial(self._read, Arguments(named, self.options)), before=True)
        self._register(named, f"{self.name} of modules", functools.partial(self._ended, named))

    def _read(self, arguments: Arguments, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        own = is_multihead(module)  # its masks already contain the causal mask
        if is_multihead(module):
            query, key, mask = projected(module, args, kwargs)
        else:
            query, key, mask = _found(arguments, self.options, args, kwargs)
        scale = None if own else arguments.scale(args, kwargs)
        causal = False if own else arguments.causal(module, args, kwargs)
        ways = (False, True) if causal is None else (causal,)
        sums = [
            formulas.attention_sums(query, key, formulas.Mask(mask, causal=one), scale=scale, rows=self.options.rows)
            for one in ways
        ]
        way = [] if causal is None else [0]
        if causal is None:
            self._unseen[arguments.named.name] = way
        rows = functools.partial(_rows, arguments.named.name, self._hooking.micro_step, way)
        self._gate.table.defer("features", torch.stack(sums), rows)

    def _ended(self, named: NamedModule, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        way = self._unseen.pop(named.name, None)
        if way is None:
            return
        if (causal := _causal_inside(output)) is None:
            reason = "gets no mask, and may have one inside that cannot be seen: set causal, or mask to none"
            self.missing(reason, named)
        else:
            way.append(int(causal))

    def on_step_begin(self, table: Table) -> None:
        super().on_step_begin(table)
        self._unseen: dict[str, list[int]] = {}  # way of the calls of which the mask is not known yet, by module


def _causal_inside(output: Any) -> bool | None:
    """Return whether the call that returned `output` hides later keys, from its graph; None if it has another mask.

    A saved tensor with a hook is not read, because the hook may compute a part of the model again.
    """
    found = output[0] if isinstance(output, tuple) and output else output
    node, is_scores = getattr(found, "grad_fn", None), False
    for _ in range(_MOST_NODES):
        if node is None:
            return None
        name = node.name()
        if isinstance(is_causal := saved_causality(node), bool):
            return is_causal or (False if saves_no_mask(node) else None)
        if is_scores and not name.startswith(_KEEP_SCORES):
            return False if name.startswith(_PRODUCTS) else None
        is_scores |= "Softmax" in name
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _found(
    arguments: Arguments, options: AttentionOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return query and key as [batch, heads, sequence, width], and the mask of the scores.

    If query, key or mask cannot be read from the arguments of the module's call, raise `Unreadable`.
    """
    given = [arguments.get(argument, args, kwargs) for argument in (options.query, options.key)]
    for label, tensor in zip(("query", "key"), given, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise Unreadable(f"{label} is not a tensor argument")
        check_readable(tensor, label)
        if tensor.dim() != _DIMENSIONS or not tensor.is_floating_point():
            shape = f"{list(tensor.shape)}, not four dimensions of numbers"
            raise Unreadable(f"{label} is {shape}: target the core of the attention")
    permutation = tuple(options.order.split(",").index(letter) for letter in _LETTERS)
    query, key = (tensor.detach().permute(permutation) for tensor in given)
    batch, heads, queries, width = query.shape
    if key.shape[3] != width or key.shape[0] not in (1, batch):
        shapes = f"query {list(query.shape)} and key {list(key.shape)}"
        raise Unreadable(f"{shapes} (batch, heads, sequence, width) do not fit: see order")
    if not key.shape[1] or heads % key.shape[1]:
        raise Unreadable(f"{heads} heads of the query are not a multiple of {key.shape[1]} heads of the key: see order")
    if not key.shape[2]:
        raise Unreadable("key has no elements")
    mask = arguments.mask(args, kwargs)
    if not isinstance(mask, torch.Tensor):
        return query, key, None
    check_readable(mask, "mask")
    hides = formulas.hides_of(mask.detach(), true_attends=arguments.true_attends)
    full = formulas.broadcast(hides, batch, heads, queries, key.shape[2])
    if full is None:
        raise Unreadable(f"mask of shape {list(mask.shape)} does not fit the scores of its calls")
    return query, key, full


def _rows(module: str, micro_step: int, way: Sequence[int], sums: Numbers) -> Iterable[Row]:
    """Yield the rows of a call. `way` has the position in `sums` of its mask, and is empty if the mask is unknown."""
    for head, (entropy, largest, count) in enumerate(sums[way[0]].T.tolist() if way else ()):
        if count:
            for kind, total in ((ENTROPY, entropy), (SOFTMAX_MAX, largest)):
                yield {"kind": kind, "module": module, "index": head, "micro_step": micro_step, "value": total / count}
