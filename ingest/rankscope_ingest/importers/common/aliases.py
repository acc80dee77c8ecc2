"""One name and one unit for what every tool calls differently: `lr`, `learning rate`, `optim/lr` → `learning_rate`.

A name that nobody knows stays as it is; a unit in brackets behind it, such as `data time (ms)`, is still understood.
Names are compared without regard to case, and spaces, dashes and underscores are the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.schema import canonical_labels

SOURCE_NAME: Final = "source_name"
SOURCE_UNIT: Final = "source_unit"

_NAME_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit as logs write it, and what makes it ours."""

    name: str | None
    factor: float = 1.0


_SECONDS: Final = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "hours": 3600.0}
_BYTES: Final = {
    **dict(zip(("kib", "mib", "gib", "tib"), (2.0**10, 2.0**20, 2.0**30, 2.0**40), strict=True)),
    **dict(zip(("kb", "mb", "gb", "tb"), (1e3, 1e6, 1e9, 1e12), strict=True)),
}
UNITS: Final[Mapping[str, Unit]] = {
    **{name: Unit("seconds") for name in ("s", "sec", "secs", "second", "seconds")},
    **{name: Unit("seconds", factor) for name, factor in _SECONDS.items()},
    **{name: Unit("bytes", factor) for name, factor in _BYTES.items()},
    **{name: Unit("bytes") for name in ("b", "bytes")},
    **{name: Unit("seconds") for name in ("s/it", "s/iter", "s/step", "sec/step")},
    **{name: Unit("percent") for name in ("%", "percent", "pct")},
    **{name: Unit("samples/s") for name in ("samples/s", "samples/sec", "sequences/s", "seq/s")},
    **{name: Unit("tokens/s") for name in ("tokens/s", "tokens/sec", "tok/s", "tok/sec", "tokens/s/gpu")},
    **{name: Unit("steps/s") for name in ("iter/s", "it/s", "steps/s", "iters/s")},
    **{name: Unit("TFLOP/s") for name in ("tflop/s/gpu", "tflops/gpu", "tflop/s", "tflops")},
}
"""By the lower-case text of a source."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Our name for a quantity: `value x factor` is in `unit`."""

    name: str
    unit: str | None = None
    factor: float = 1.0
    source_unit: str | None = None
    """As the source writes it; None where it says none, or ours."""

    def converted(self, value: float) -> float:
        """Return `value` in our unit; thousandths by division, which is exact where it can be."""
        return value * self.factor if self.factor >= 1.0 else value / round(1.0 / self.factor)

    def labels(self, source_name: str, extra: Mapping[str, str] | None = None) -> str | None:
        """Return the `labels` of a scalar called `source_name` there: what it was called and counted in, if other."""
        found = dict(extra or {})
        if printable(source_name) != self.name:
            found[SOURCE_NAME] = printable(source_name)
        if self.source_unit is not None:
            found[SOURCE_UNIT] = self.source_unit
        return canonical_labels(found)


def _table() -> dict[str, Alias]:
    known: dict[str, tuple[str | None, str]] = {
        # The names of each line, one blank apart; `~` stands for a blank inside a name.
        "loss": (None, "loss train_loss train/loss training_loss lm~loss trl loss/train loss~train train/total_loss"),
        "learning_rate": (None, "learning_rate lr optim/lr train/lr current_lr"),
        "grad_norm": (
            None,
            "grad_norm gnorm norm gradient_norm global_grad_norm optim/grad_norm optim/total_grad_norm",
        ),
        "loss_scale": (None, "loss_scale grad_scale"),
        "epoch": (None, "epoch epochs train/epoch"),
        "eval_loss": (None, "eval_loss val_loss valid_loss validation_loss dev_loss tel lm~loss~value"),
        "perplexity": (None, "perplexity ppl train_ppl"),
        "eval_perplexity": (None, "eval_perplexity eval_ppl val_ppl valid_ppl val_perplexity lm~loss~ppl"),
        "eval_accuracy": (None, "eval_accuracy eval_acc val_acc val_accuracy valid_acc"),
        "accuracy": (None, "accuracy acc train_acc train_accuracy"),
        "step_seconds": (
            "seconds",
            """step_seconds step_time step_time_s step_time_sec time/total time/step dt iter_time iteration_time
            time_per_step time_per_iter elapsed~time~per~iteration seconds_per_step sec_per_step s/it step_duration""",
        ),
        "elapsed_seconds": ("seconds", "elapsed_seconds elapsed elapsed_time train_time time/elapsed"),
        "remaining_seconds": ("seconds", "remaining_seconds remaining_time remaining eta"),
        "samples_per_second": (
            "samples/s",
            """samples_per_second samples/s samples/sec samples_per_sec throughput train_samples_per_second
            train_throughput currsamplespersec samplespersec""",
        ),
        "tokens_per_second": (
            "tokens/s",
            "tokens_per_second tokens/s tokens/sec tokens_per_sec tok/s tok/sec tokens_per_second_total",
        ),
        "tokens_per_second_per_gpu": (
            "tokens/s",
            "tokens_per_second_per_gpu tokens_per_gpu_per_second tgs tokens_per_gpu tps",
        ),
        "steps_per_second": ("steps/s", "steps_per_second train_speed steps/s it/s iter/s iterations_per_second"),
        "tflops_per_gpu": ("TFLOP/s", "tflops_per_gpu throughput~per~gpu tflops tflop/s tflops/gpu"),
        "tokens_total": (
            "tokens",
            "tokens_total consumed_tokens num_tokens total_tokens num_input_tokens_seen tokens_seen",
        ),
        "samples_total": ("samples", "samples_total consumed_samples samples_seen"),
        "device_memory_bytes": ("bytes", "device_memory_bytes memory"),
        "gpu_util": ("percent", "gpu_util gpu_utilization gpu_utilisation"),
        "mfu": ("percent", "mfu"),
        "percentage": ("percent", "percentage"),
        "train_runtime": ("seconds", "train_runtime"),
        "eval_runtime": ("seconds", "eval_runtime"),
        "eval_samples_per_second": ("samples/s", "eval_samples_per_second"),
        "train_steps_per_second": ("steps/s", "train_steps_per_second"),
        "eval_steps_per_second": ("steps/s", "eval_steps_per_second"),
        "step_avg": ("seconds", "step_avg"),
    }
    table = {
        _folded(name.replace("~", " ")): Alias(ours, unit)
        for ours, (unit, names) in known.items()
        for name in names.split()
    }
    # Names that carry their unit without brackets.
    carried = {
        "step_time_ms": ("step_seconds", "ms"),
        "dt_ms": ("step_seconds", "ms"),
        "iter_time_ms": ("step_seconds", "ms"),
        "iteration_time_ms": ("step_seconds", "ms"),
        "elapsed_ms": ("elapsed_seconds", "ms"),
        "memory_gb": ("device_memory_bytes", "GB"),
        "memory_mb": ("device_memory_bytes", "MB"),
        "memory_gib": ("device_memory_bytes", "GiB"),
        "gpu_memory_gb": ("device_memory_bytes", "GB"),
        "gpu_mem_gb": ("device_memory_bytes", "GB"),
        "gpu_mem_mb": ("device_memory_bytes", "MB"),
        "gpu_memory_mb": ("device_memory_bytes", "MB"),
    }
    for name, (ours, unit) in carried.items():
        known_unit = UNITS[unit.lower()]
        table[name] = Alias(ours, known_unit.name, known_unit.factor, unit)
    return table


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


_TABLE: Final = _table()
_UNIT_BEHIND: Final = re.compile(r"^(?P<name>[^()]*[^()\s])\s*\((?P<unit>[^()]{1,16})\)\s*$")
_TRAIN: Final = re.compile(r"^train(?:ing)?/(?:.*/)?(?P<rest>[^/]+)$")
_EVALUATION: Final = re.compile(r"^(?:eval|val|valid|validation|dev)/(?P<rest>[^/]+)$")


@functools.lru_cache(maxsize=4096)
def canonical(name: str) -> Alias:
    """Return our name and unit for what a log calls `name`; one that is not known stays as it is."""
    bare, unit = _split_unit(name)
    folded = _folded(bare)
    known = _TABLE.get(folded) or _by_path(folded)
    if unit is None:
        return known or Alias(printable(name))
    if folded == "time":  # with a unit behind it, it is the step's; without, it may be a moment
        known = _TABLE["step_time"]
    if known is not None and known.unit == "steps/s" and UNITS.get(unit.lower()) == UNITS["s"]:
        known = _TABLE["step_time"]  # a speed in seconds per step
    return in_unit(known or Alias(printable(bare)), unit)


def is_known(name: str) -> bool:
    """Return whether `name` is one that we have a name for."""
    folded = _folded(_split_unit(name)[0])
    return folded in _TABLE or _by_path(folded) is not None


def in_unit(alias: Alias, unit: str) -> Alias:
    """Return `alias` for values that a log gives in `unit`; a unit that is not known is only kept."""
    found = UNITS.get(unit.lower())
    if found is None or alias.unit not in {None, found.name}:
        return Alias(alias.name, alias.unit, alias.factor, unit)
    return Alias(alias.name, found.name, found.factor, None if unit == found.name else unit)


def under_own_name(name: str) -> Alias:
    """Return what `canonical` knows of units, but leave the name: where ours would mean something else."""
    alias = canonical(name)
    return Alias(printable(name), alias.unit, alias.factor, alias.source_unit)


def printable(name: str) -> str:
    """Return `name` as text that every store takes: no lone surrogates, and of a sane length."""
    return name[:_NAME_CHARACTERS].encode("utf-8", "replace").decode()


def _split_unit(name: str) -> tuple[str, str | None]:
    found = _UNIT_BEHIND.match(name)
    return (name, None) if found is None else (found["name"], found["unit"].strip())


def _by_path(folded: str) -> Alias | None:
    """Understand `train/…/x` as x, and `val/x` as eval_x, where x is known."""
    if found := _TRAIN.match(folded):
        return _TABLE.get(found["rest"])
    if found := _EVALUATION.match(folded):
        return _TABLE.get(f"eval_{found['rest']}")
    return None
