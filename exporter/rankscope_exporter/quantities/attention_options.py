"""What `attention` can be told, and how it finds query, key and mask among the arguments of a call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from rankscope_exporter.quantities.base import QuantityOptions

Argument = int | str
"""A position among the arguments of `forward`, from 0, or the name of a parameter; either finds the other."""

AUTO: Final = "auto"
NONE: Final = "none"

_MASKS: Final = ("attn_mask", "attention_mask", "mask")
_CAUSAL: Final = ("is_causal", "causal", "attn_mask_type")
_SCALES: Final = ("scale", "softmax_scale")
_LETTERS: Final = "bhsd"
_TRUE_HIDES: Final = ("megatron.", "mindspeed.", "transformer_engine.")
"""Packages in which True in a mask hides a key; for torch's scaled_dot_product_attention it lets it be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions(QuantityOptions):
    """Which modules, and how to read their arguments. Without targets nothing is measured."""

    targets: tuple[str, ...] = ()
    """Modules whose forward is given query and key, heads apart: the core of an attention, without its projections."""
    order: str = "s,b,h,d"
    """How the dimensions of query and key lie: s sequence, b batch, h heads, d width, in any order."""
    query: Argument = 0
    key: Argument = 1
    mask: Argument = AUTO
    """Where the mask is; "auto" takes the parameter attn_mask, attention_mask or mask, "none" there is none."""
    mask_true: str = AUTO
    """What True in a mask means: "attends", as in torch's scaled_dot_product_attention, or "hides", as in Megatron.
    "auto" is "hides" for modules of Megatron, MindSpeed and Transformer Engine, "attends" for all others."""
    causal: bool | str = AUTO
    """Whether later keys are hidden as well; "auto" asks the arguments is_causal, causal and attn_mask_type, then the
    attributes of the module of these names."""
    scale: float | None = None
    """What q·k is multiplied with; null takes the argument scale or softmax_scale, else 1 / √d."""
    rows: int | None = None
    """Look at no more than so many queries of each sequence, at equal distances; null looks at all."""

    def __post_init__(self) -> None:
        QuantityOptions.__post_init__(self)
        order = self.order.replace(" ", "") if isinstance(self.order, str) else ""
        if sorted(order.split(",")) != sorted(_LETTERS):
            raise ValueError(f"order is 's,b,h,d' or these letters in another order, not {self.order!r}")
        object.__setattr__(self, "order", order)
        for name in ("query", "key", "mask"):
            value = getattr(self, name)
            if isinstance(value, str) and value:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is the position or the name of an argument, not {value!r}")
        if self.mask_true not in (AUTO, "attends", "hides"):
            raise ValueError(f"mask_true is 'auto', 'attends' or 'hides', not {self.mask_true!r}")
        if not isinstance(self.causal, bool) and self.causal != AUTO:
            raise ValueError(f"causal is true, false or 'auto', not {self.causal!r}")
        if self.scale is not None and not _is_number(self.scale):
            raise ValueError(f"scale is a number, not {self.scale!r}")
        self._check_whole("rows", 1)

    @property
    def permutation(self) -> tuple[int, ...]:
        """Return where batch, heads, sequence and width lie."""
        return tuple(self.order.split(",").index(letter) for letter in _LETTERS)


class Arguments:
    """What is where in the calls of one module."""

    def __init__(self, module: nn.Module, options: AttentionOptions) -> None:
        self._home = type(module).__module__
        self._options = options
        self._names = _parameter_names(module)

    def query_and_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return both, None for what was not given."""
        return self._get(self._options.query, args, kwargs), self._get(self._options.key, args, kwargs)

    def mask(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the mask of the call; None without one."""
        wanted = self._options.mask
        if wanted == NONE:
            return None
        if wanted != AUTO:
            return self._get(wanted, args, kwargs)
        found = (self._get(name, args, kwargs) for name in _MASKS)
        return next((value for value in found if value is not None), None)

    @property
    def true_attends(self) -> bool:
        """Return whether True in a mask lets a key be seen."""
        meaning = self._options.mask_true
        if meaning == AUTO:
            return not f"{self._home}.".startswith(_TRUE_HIDES)
        return meaning == "attends"

    def causal(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether later keys are hidden in a call of `module`."""
        wanted = self._options.causal
        if isinstance(wanted, bool):
            return wanted
        display_name = [self._get(name, args, kwargs) for name in _CAUSAL]
        # The dictionary itself: a property could compute anything.
        display_name += [vars(module).get(name) for name in _CAUSAL]
        return next((answer for answer in map(_says_causal, display_name) if answer is not None), False)

    def scale(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
        """Return what q·k is multiplied with; None is the usual."""
        given = (self._options.scale, *(self._get(name, args, kwargs) for name in _SCALES))
        return next((float(value) for value in given if _is_number(value)), None)

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
    except (TypeError, ValueError, AttributeError, RuntimeError):  # scripted modules are functions in name only
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(item.name for item in parameters if item.kind in by_position)


def _says_causal(value: Any) -> bool | None:
    """Return what a flag or the name of a kind of mask says; None for anything else, tensors too."""
    if isinstance(value, bool):
        return value
    name = value if isinstance(value, str) else getattr(value, "name", None)
    return "causal" in name.lower() if isinstance(name, str) and not isinstance(value, torch.Tensor) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
