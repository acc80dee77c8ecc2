"""Computes the FLOPs of a token, a sample or a forward pass on this rank by formula.

The formula uses the sizes of the model and the shapes of the arguments of its forward pass. The module runs no code of
the user.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter.adapters import Framework
from rankscope_exporter.observers.throughput.model_shape import (
    decoder_flops_per_token,
    decoder_of,
    has_two_sequences,
    parameter_and_attention_flops,
    parameter_flops,
    sizes_of,
)
from rankscope_exporter.observers.throughput.parameter_counts import (
    Parallel,
    convolution_in,
    parameters_met,
    why_not_six_n,
)

_IDS: Final = "input_ids"
_MOST_LEVELS: Final = 4
"""Maximum depth of the search for tensors in nested arguments of the model.

It is limited, because a structure may contain itself.
"""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Shape of the argument that determines the FLOPs of a forward pass.

    This argument is the token ids if there are any, or else the first tensor.
    """

    shape: tuple[int, ...] = ()
    """Shape of the token ids or, if there are none, of the first tensor. It is empty without tensors."""
    is_integer: bool = False
    dtype: torch.dtype | None = None
    """Data type in which autocast computes matrix products; None without autocast."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype | None = None) -> Inputs:
        """Return the shape of the token ids or, if there are none, of the first tensor in `args` and `kwargs`.

        These are the arguments of a forward pass of the model. No reference to a tensor is stored.
        """
        arguments = (kwargs, *args)
        tensor = next((found for value in arguments for found in _named(value)), None)
        if tensor is None:
            tensor = next((found for value in (*args, kwargs) for found in _tensors(value)), None)
        if tensor is None:
            return cls(dtype=dtype)
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool
        return cls(tuple(tensor.shape), not is_number, dtype)

    @property
    def samples(self) -> int | None:
        """Return the batch size of the forward pass; None if the arguments of the forward pass contain no tensor."""
        return self.shape[0] if self.shape else None

    @property
    def tokens(self) -> int | None:
        """Return the number of token ids; None if the forward pass has no token ids as an argument."""
        return math.prod(self.shape) if self.is_integer and len(self.shape) in (1, 2) else None

    @property
    def are_embeddings(self) -> bool:
        """Return whether the argument that determines the FLOPs has the form of embedded tokens.

        This form is a tensor of non-integers with the dimensions batch, sequence and width.
        """
        return not self.is_integer and len(self.shape) == 3

    @property
    def sequence(self) -> int:
        """Return the number of tokens in one sequence of the batch."""
        return self.shape[1] if len(self.shape) > 1 else 1


def _named(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors under the key `input_ids` of `value`, if `value` is a dictionary with this key."""
    if isinstance(value, dict | UserDict) and _IDS in value:
        yield from _tensors(value[_IDS])


def _tensors(value: Any, levels: int = _MOST_LEVELS) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not value.is_nested:  # it has no shape
            yield value
    elif levels and isinstance(value, list | tuple | dict | UserDict):
        for item in value if isinstance(value, list | tuple) else value.values():
            yield from _tensors(item, levels - 1)


FORMULA: Final = "formula"
SIX_N: Final = "6n"


class NoFormulaError(ValueError):
    """Error: no formula computes the FLOPs of the model. The text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """FLOPs per token, per sample and per forward pass on the device of this rank.

    Forward and backward pass count together. A value is None if it is unknown.
    """

    method: str
    per_token: float | None = None
    per_sample: float | None = None
    per_forward: float | None = None


def cost_of(framework: Framework, parallel: Parallel, inputs: Inputs | None, method: str) -> Cost:
    """Return the FLOPs of the model, by the formula for its configuration or else by 6 N (six FLOPs per parameter).

    `inputs` is None if no training forward of the whole model was observed. If `method` is "formula" or "6n", only the
    formula with this name is allowed. Raises NoFormulaError, with the reason, if no allowed formula fits the model.
    """
    convolution = convolution_in(framework.module)
    if convolution is not None:
        raise NoFormulaError(f"{convolution} is a convolution")
    if has_two_sequences(framework.module):
        raise NoFormulaError("the encoder and the decoder of the model receive different tokens")
    has_tokens = inputs is not None and bool(inputs.tokens)
    if inputs is not None and not has_tokens and not inputs.are_embeddings:
        raise NoFormulaError("the forward pass of the model takes no tokens")
    cost = _by_formula(framework, parallel, inputs) if method != SIX_N and inputs is not None and has_tokens else None
    if cost is not None:
        return cost
    if method == FORMULA:
        reason = (
            "the configuration of the model describes no decoder"
            if has_tokens
            else "the length of a sequence is unknown"
        )
        raise NoFormulaError(reason)
    misfit = why_not_six_n(framework.module)
    if misfit is not None:
        raise NoFormulaError(misfit)
    met = parameters_met(framework, parallel)
    per_token = parameter_flops(met.trained, met.frozen)
    if inputs is None or not has_tokens:  # FLOPs are known only for steps that log their number of tokens
        return Cost(method=SIX_N, per_token=per_token)
    return _of_forward(SIX_N, per_token, inputs, chunks=len(framework.chunks))


def _by_formula(framework: Framework, parallel: Parallel, inputs: Inputs) -> Cost | None:
    decoder, sizes = decoder_of(framework.module), sizes_of(framework.module)
    if decoder is not None:
        met = parameters_met(framework, parallel)
        frozen = met.frozen / ((met.trained + met.frozen) or 1)
        per_token = decoder_flops_per_token(decoder, inputs.sequence, frozen) / parallel.ranks
    elif {"layers", "hidden"} <= sizes.keys() and why_not_six_n(framework.module) is None:
        met = parameters_met(framework, parallel)
        layers, hidden = sizes["layers"], sizes["hidden"]
        attended = parameter_and_attention_flops(0, 0, layers=layers, hidden=hidden, sequence=inputs.sequence)
        per_token = parameter_flops(met.trained, met.frozen) + attended / parallel.ranks
    else:
        return None
    return _of_forward(FORMULA, per_token, inputs, chunks=len(framework.chunks))


def _of_forward(method: str, per_token: float, inputs: Inputs, *, chunks: int) -> Cost:
    """Return the FLOPs per token, per sample and per forward pass, for a batch of the shape `inputs`.

    A rank with several model chunks runs one forward pass per chunk, so the FLOPs of the batch are divided by `chunks`.
    """
    flops = per_token * (inputs.tokens or 0)
    per_sample = flops / inputs.samples if inputs.samples else None
    return Cost(method=method, per_token=per_token, per_sample=per_sample, per_forward=flops / chunks)
