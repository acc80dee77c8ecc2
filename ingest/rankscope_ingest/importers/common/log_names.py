"""Map names of quantities in logs to stored names and units: `lr`, `optim/lr` and others become `learning_rate`.

An unknown name is stored unchanged. A unit in parentheses after a name, as in `data time (ms)`, is recognized with
known and unknown names. Names of losses, and the comparison of names, are those of the contract.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from rankscope_contract.model.redaction import redacted_name
from rankscope_contract.model.scalar_names import LOSSES, SOURCE_NAME, SOURCE_UNIT, entry_of, folded
from rankscope_contract.model.schema import canonical_labels


@dataclass(frozen=True, slots=True)
class Unit:
    """Conversion of a unit in a log to the stored unit `name`: the stored value is the logged value times `factor`."""

    name: str | None
    factor: float = 1.0


_SECONDS: Final = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "hours": 3600.0}
_BYTES: Final = {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40} | {
    "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
}  # fmt: skip
UNITS: Final[Mapping[str, Unit]] = {
    **{name: Unit("seconds", factor) for name, factor in _SECONDS.items()},
    **{name: Unit("bytes", factor) for name, factor in _BYTES.items()},
    **{
        name: Unit(unit)
        for unit, names in {
            "seconds": "s sec secs second seconds s/it s/iter s/step sec/step",
            "bytes": "b bytes",
            "percent": "% percent pct",
            "samples/s": "samples/s samples/sec sequences/s seq/s records/s records/second",
            "tokens/s": "tokens/s tokens/sec tok/s tok/sec tokens/s/gpu",
            "steps/s": "iter/s it/s steps/s iters/s",
            "TFLOP/s": "tflop/s/gpu tflops/gpu tflop/s tflops",
        }.items()
        for name in names.split()
    },
}
"""The conversion to the stored unit for each unit in a log. The key is the unit as text in lower case."""


@dataclass(frozen=True, slots=True)
class Alias:
    """The stored name of a quantity in a log, and the conversion of its values to the stored unit.

    The stored value, in `unit`, is the logged value times `factor`.
    """

    name: str
    unit: str | None = None
    factor: float = 1.0
    source_unit: str | None = None
    """The unit of the quantity in the log.

    None if the log contains no unit for the quantity, or if the unit in the log is the stored unit.
    """

    def converted(self, value: float) -> float:
        # A factor below 1 is applied as a division by its reciprocal: the result is then rounded only once.
        return value * self.factor if self.factor >= 1.0 else value / round(1.0 / self.factor)

    def labels(self, source_name: str, extra: Mapping[str, str] | None = None) -> str | None:
        """Return the labels of a scalar as JSON.

        The labels contain `source_name`, the name of the quantity in the log, and the unit in the log, each only if it
        differs from the stored name or unit. `extra` has further labels. The result is None if there are no labels.
        """
        found = dict(extra or {})
        if redacted_name(source_name) != self.name:
            found[SOURCE_NAME] = redacted_name(source_name)
        if self.source_unit is not None:
            found[SOURCE_UNIT] = self.source_unit
        return canonical_labels(found)


_NAMES: Final = """
learning_rate              -         lr optim/lr train/lr current_lr current_learning_rate l.r.
grad_norm                  -         gnorm norm gradient_norm global_grad_norm optim/grad_norm optim/total_grad_norm
grad_norm                  -         global_norm total_grad_norm
loss_scale                 -         grad_scale
epoch                      -         epochs train/epoch
perplexity                 -         ppl train_ppl
eval_perplexity            -         eval_ppl val_ppl valid_ppl val_perplexity lm~loss~ppl
eval_accuracy              -         eval_acc val_acc val_accuracy valid_acc
accuracy                   -         acc train_acc train_accuracy
step_seconds               seconds   step_time step_time_s step_time_sec time/total time/step dt iter_time
step_seconds               seconds   iteration_time time_per_step time_per_iter elapsed~time~per~iteration
step_seconds               seconds   seconds_per_step sec_per_step s/it step_duration
step_seconds               seconds   per_step_time train_step_timing~in~s
step_seconds               ms        step_time_ms dt_ms iter_time_ms iteration_time_ms elapsed_time_per_iteration_ms
elapsed_seconds            seconds   elapsed elapsed_time train_time time/elapsed
elapsed_seconds            ms        elapsed_ms
remaining_seconds          seconds   remaining_time remaining eta
samples_per_second         samples/s samples/s samples/sec samples_per_sec throughput train_samples_per_second
samples_per_second         samples/s train_throughput currsamplespersec samplespersec interval_samples_per_second
tokens_per_second          tokens/s  tokens/s tokens/sec tokens_per_sec tok/s tok/sec tokens_per_second_total
tokens_per_second_per_gpu  tokens/s  tokens_per_gpu_per_second tgs tokens_per_gpu tps tokens_per_sec_per_gpu
tokens_per_second_per_gpu  tokens/s  tokens/s/device tokens/s/gpu interval_tokens_per_second_per_device
steps_per_second           steps/s   train_speed steps/s it/s iter/s iterations_per_second
tflops_per_gpu             TFLOP/s   throughput~per~gpu tflops tflop/s tflops/gpu tflop/s/device
tflops_per_gpu             TFLOP/s   model_tflops_per_gpu train_throughput_per_npu
tokens_total               tokens    consumed_tokens num_tokens total_tokens num_input_tokens_seen tokens_seen
samples_total              samples   consumed_samples samples_seen
device_memory_bytes        bytes     memory
device_memory_bytes        GB        memory_gb gpu_memory_gb gpu_mem_gb
device_memory_bytes        MB        memory_mb gpu_mem_mb gpu_memory_mb
device_memory_bytes        GiB       memory_gib
device_memory_peak_bytes   MiB       max_mem
gpu_util                   percent   gpu_utilization gpu_utilisation
mfu                        percent
percentage                 percent
train_runtime              seconds
eval_runtime               seconds
eval_samples_per_second    samples/s
train_steps_per_second     steps/s
eval_steps_per_second      steps/s
step_avg                   seconds
"""
"""The known quantities, one per line: stored name, unit in the log, and names in logs.

The unit is `-` if there is none. In the names, `~` represents a space.
"""


def _table() -> dict[str, Alias]:
    table = {folded(name): Alias(stored) for stored, names in LOSSES.items() for name in (stored, *names)}
    for name, unit, *others in map(str.split, _NAMES.strip().splitlines()):
        # A unit of which the text differs from the stored one is kept as the unit of the source.
        known = UNITS.get(unit.lower(), Unit(None if unit == "-" else unit))
        alias = Alias(name, known.name, known.factor, None if unit in {"-", known.name} else unit)
        for other in [*others, *([name] if alias.source_unit is None else ())]:
            table[folded(other.replace("~", " "))] = alias
    return table


_TABLE: Final = _table()
_UNIT_AT_END: Final = re.compile(r"^(?P<name>[^()]*[^()\s])\s*\((?P<unit>[^()]{1,16})\)\s*$")


@functools.lru_cache(maxsize=4096)
def canonical(name: str) -> Alias:
    """Return the stored name and unit of the quantity that a log calls `name`.

    An unknown name is returned unchanged.
    """
    bare, unit = _split_unit(name)
    key = folded(bare)
    known = entry_of(_TABLE, key)
    if unit is None:
        return known or Alias(redacted_name(name))
    if key == "time":  # with a unit it is the step time, without one it may be a timestamp
        known = _TABLE["step_time"]
    if known is not None and known.unit == "steps/s" and UNITS.get(unit.lower()) == UNITS["s"]:
        known = _TABLE["step_time"]  # a speed in seconds per step
    return in_unit(known or Alias(redacted_name(bare)), unit)


@functools.lru_cache(maxsize=4096)
def is_known(name: str) -> bool:
    """Return whether `name` is a known name of a quantity, for which a stored name is defined."""
    return entry_of(_TABLE, folded(_split_unit(name)[0])) is not None


def names_of(stored: str) -> list[str]:
    """Return all names of the quantity that is stored as `stored`, without those of the form `val/…` and `train/…`."""
    return sorted(name for name, alias in _TABLE.items() if alias.name == stored)


def in_unit(alias: Alias, unit: str) -> Alias:
    """Return an `alias` that converts values in `unit`. An unknown unit is only stored as the unit in the log."""
    found = UNITS.get(unit.lower())
    if found is None or alias.unit not in {None, found.name}:
        return replace(alias, source_unit=unit)
    return Alias(alias.name, found.name, found.factor, None if unit == found.name else unit)


def under_own_name(name: str) -> Alias:
    """Return `name` as the stored name with the unit of its usual quantity, for logs that use it for another."""
    return replace(canonical(name), name=redacted_name(name))


def _split_unit(name: str) -> tuple[str, str | None]:
    found = _UNIT_AT_END.match(name)
    return (name, None) if found is None else (found["name"], found["unit"].strip())
