"""Options of the quantity `attention`, and access to query, key and mask among the arguments of a module's call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import torch
from torch import nn

from rankscope_exporter.base.validation import Allowed, at_least, is_number, is_whole, number
from rankscope_exporter.quantities.base import QuantityOptions, TargetNames

Argument = Annotated[
    int | str,
    Allowed(
        "the position or the name of an argument",
        lambda value: (is_whole(value) and value >= 0) or (isinstance(value, str) and value != ""),
    ),
]
"""The position of an argument of `forward`, from 0, or the name of the argument.

In both cases, the argument is found whether it is passed by position or by keyword.
"""

AUTO: Final = "auto"
NONE: Final = "none"

_MASKS: Final = ("attn_mask", "attention_mask", "mask")
_CAUSAL: Final = ("is_causal", "causal", "attn_mask_type")
_CAUSAL_VALUES: Final = Allowed("true, false or 'auto'", lambda value: isinstance(value, bool) or value == AUTO)
_FINITE: Final = number("a finite number")
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
    scale: Annotated[float, _FINITE] | None = None
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

    @property
    def permutation(self) -> tuple[int, ...]:
        """Return the positions, from 0, of batch, heads, sequence and width among the dimensions of query and key."""
        return tuple(self.order.split(",").index(letter) for letter in _LETTERS)


class Arguments:
    """Finds query, key, mask and scale factor among the arguments of a call of one module."""

    def __init__(self, module: nn.Module, options: AttentionOptions) -> None:
        self._home = type(module).__module__
        self._options = options
        self._names = _parameter_names(module)

    def query_and_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return query and key of a call; None for an argument that was not passed."""
        return self._get(self._options.query, args, kwargs), self._get(self._options.key, args, kwargs)

    def mask(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the mask of a call; None if the call has no mask."""
        wanted = self._options.mask
        if wanted == NONE:
            return None
        if wanted != AUTO:
            return self._get(wanted, args, kwargs)
        found = (self._get(name, args, kwargs) for name in _MASKS)
        return next((value for value in found if value is not None), None)

    @property
    def true_attends(self) -> bool:
        """Return True if True in a mask of this module means that a key is visible."""
        meaning = self._options.mask_true
        if meaning == AUTO:
            return not f"{self._home}.".startswith(_TRUE_HIDES)
        return meaning == "attends"

    def causal(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | None:
        """Return whether a call of `module` hides later keys from each query; None if nothing states it."""
        wanted = self._options.causal
        if isinstance(wanted, bool):
            return wanted
        flags = [self._get(name, args, kwargs) for name in _CAUSAL]
        # The dictionary itself: a property could compute anything.
        flags += [vars(module).get(name) for name in _CAUSAL]
        is_told = self._options.mask == NONE or self.mask(args, kwargs) is not None
        flags += [False] if is_told else []
        return next((answer for answer in map(_causal_or_none, flags) if answer is not None), None)

    def scale(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
        """Return the factor by which a call multiplies the products of query and key; None for the default factor."""
        given = (self._options.scale, *(self._get(name, args, kwargs) for name in _SCALES))
        return next((float(value) for value in given if _is_finite(value)), None)

    def _get(self, argument: Argument, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        names = self._names
        if isinstance(argument, int):
            if argument < len(args):
                return args[argument]
            return kwargs.get(names[argument]) if argument < len(names) else None
        if argument in kwargs:
            return kwargs[argument]
        position = names.index(argument) if argument in names else len(args)
        return args[position] if position < len(args) else None


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
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


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)
