"""What a token, a sample or a forward costs on this rank, found once: counted, by formula, or by the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from rankscope_exporter.frameworks import Framework
from rankscope_exporter.throughput.captured import Inputs
from rankscope_exporter.throughput.counting import NotCountedError, count
from rankscope_exporter.throughput.formulas import (
    decoder_flops_per_token,
    parameter_and_attention_flops,
    parameter_flops,
)
from rankscope_exporter.throughput.model_shape import decoder_of, sizes_of
from rankscope_exporter.throughput.parameters import Parallel, parameters_met

COUNTED: Final = "counted"
FORMULA: Final = "formula"
SIX_N: Final = "6n"

_NOT_COUNTED: Final = {
    "megatron": "Megatron-Core's modules change random generators and communicate",
    "fsdp1": "FSDP1 keeps its parameters in flat shards",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """FLOPs on this rank's device, forward and backward; None for what they are not known of."""

    method: str
    per_token: float | None = None
    per_sample: float | None = None
    per_forward: float | None = None


@dataclass(frozen=True, slots=True)
class Costs:
    """What was found, and what a reader should know of it when it is not what was wanted."""

    cost: Cost | None
    remark: str | None = None

    @classmethod
    def of(
        cls,
        framework: Framework,
        parallel: Parallel,
        inputs: Inputs | str,
        *,
        method: str,
        spent: Callable[[float], None],
    ) -> Costs:
        """Return the cost by the best method that can be had; `inputs` is a text that says why none were seen.

        `spent` is told the CPU seconds of counting.
        """
        if method not in (FORMULA, SIX_N):
            try:
                return cls(_counted(framework, parallel, inputs, spent))
            except NotCountedError as error:
                why = f"the model could not be counted ({error})"
        else:
            why = ""
        seen = None if isinstance(inputs, str) else inputs
        cost = None if method == SIX_N else _by_formula(framework, parallel, seen)
        cost = cost or _by_parameters(framework, parallel, seen)
        return cls(cost, f"TFLOP/s and MFU are by {_WORDS[cost.method]}: {why}" if why else None)


_WORDS: Final = {FORMULA: "the formula for its configuration", SIX_N: "6 FLOPs for each parameter and token"}


def _counted(framework: Framework, parallel: Parallel, inputs: Inputs | str, spent: Callable[[float], None]) -> Cost:
    if framework.name in _NOT_COUNTED:
        raise NotCountedError(_NOT_COUNTED[framework.name])
    if len(framework.chunks) > 1:
        raise NotCountedError("this rank has several chunks of it")
    if isinstance(inputs, str):
        raise NotCountedError(inputs)
    # The copy has its parameters whole, and of a pipeline this rank's stage.
    flops = count(framework.module, inputs, spent=spent) / parallel.tensor
    return _of_forward(COUNTED, flops, inputs)


def _of_forward(method: str, flops: float, inputs: Inputs, *, chunks: int = 1) -> Cost:
    """Return the cost of what `inputs` were part of; each of the chunks that share `flops` has a forward of its own."""
    return Cost(
        method=method,
        per_token=flops / inputs.tokens if inputs.tokens else None,
        per_sample=flops / inputs.samples if inputs.samples else None,
        per_forward=flops / chunks,
    )


def _by_formula(framework: Framework, parallel: Parallel, inputs: Inputs | None) -> Cost | None:
    if inputs is None or not inputs.tokens:
        return None
    decoder, sizes = decoder_of(framework.module), sizes_of(framework.module)
    if decoder is not None:
        per_token = decoder_flops_per_token(decoder, inputs.sequence) / parallel.ranks
    elif {"layers", "hidden"} <= sizes.keys():
        met = parameters_met(framework, parallel)
        layers, hidden = sizes["layers"], sizes["hidden"]
        attended = parameter_and_attention_flops(0, 0, layers=layers, hidden=hidden, sequence=inputs.sequence)
        per_token = parameter_flops(met.trained, met.frozen) + attended / parallel.ranks
    else:
        return None
    return _of_forward(FORMULA, per_token * inputs.tokens, inputs, chunks=len(framework.chunks))


def _by_parameters(framework: Framework, parallel: Parallel, inputs: Inputs | None) -> Cost:
    met = parameters_met(framework, parallel)
    per_token = parameter_flops(met.trained, met.frozen)
    if inputs is None or not inputs.rows:
        return Cost(method=SIX_N, per_token=per_token)
    made = _of_forward(SIX_N, per_token * inputs.rows, inputs, chunks=len(framework.chunks))
    return replace(made, per_token=per_token)
