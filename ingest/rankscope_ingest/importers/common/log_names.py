"""Find the meaning of names in logs: the part of a record, the type of an event, the stored name and unit of a number.

Names of quantities are mapped: `lr`, `optim/lr` and others become `learning_rate`.

An unknown name is stored unchanged. A unit in parentheses after a name, as in `data time (ms)`, is recognized with
known and unknown names. Names of losses, and the comparison of names, are those of the contract.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rankscope_contract.model.events import EventType
from rankscope_contract.model.redaction import redacted_name
from rankscope_contract.model.scalar_names import LOSSES, SOURCE_NAME, SOURCE_UNIT, entry_of, folded
from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.failures import ENDS
from rankscope_ingest.importers.common.values import quantity


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


def _split_unit(name: str) -> tuple[str, str | None]:
    found = _UNIT_AT_END.match(name)
    return (name, None) if found is None else (found["name"], found["unit"].strip())


class Role(enum.Enum):
    """The part of a record to which the value of a log key belongs, such as step, rank or time.

    VALUE means that the value is an ordinary one, such as a number that is stored as a scalar.
    """

    VALUE = enum.auto()
    STEP = enum.auto()
    PLAN = enum.auto()  # the planned number of steps
    STEP_OF_PLAN = enum.auto()  # "12/873"
    RANK = enum.auto()
    WRITER = enum.auto()  # the process or host that wrote the line
    TIME = enum.auto()
    EVENT = enum.auto()
    SPLIT = enum.auto()  # the data that the record is about: train, val, test
    CONFIG = enum.auto()
    SOURCE = enum.auto()  # the place of a message in the program: no part of the record


STEP_KEYS: Final = (
    "global_step", "step", "current_steps", "current_step", "train/global_step", "trainer/global_step",
    "global_iteration", "global_iter", "iteration",
    "iter", "num_updates", "train_num_updates", "optimizer_step", "steps", "s", "train/step", "n_iter", "_step",
    "training/global_step", "valid_num_updates", "samples_count", "it", "nupdates",
)  # fmt: skip
"""Keys that may contain the step, in descending priority.

The first key with a whole number gives the step; the values of the others are stored as scalars.
"""

EPOCH: Final = "epoch"

BAR: Final = "bar_step"
"""Key of the position of a progress bar, such as `10/1752`."""
BATCH: Final = "batch_in_epoch"
"""Key of a position without a name, such as `[50/400]`."""

COUNTER_NAME: Final = (
    r"(?:(?:train(?:ing|er)?|optim|time(?=/(?:iter|total)))/)?"
    r"(?:(?:global|train(?:ing|er)?|current|completed|optim(?:izer)?|opt|local|env|total|num|grad(?:ient)?|update|micro|inner"
    r"|outer|mini|bar)[_ -])*(?:(?:time)?steps?|iter(?:ation)?s?|n?updates?)"
)
"""A regular expression for the name of a counter of steps: `step`, `global_step`, `total_iterations` and others."""

_STEP_RANK: Final = {key: place for place, key in enumerate(STEP_KEYS)}
_LAST_RANKS: Final = ("micro", "mini", "inner", BAR, BATCH, EPOCH)
_COUNTER: Final = re.compile(COUNTER_NAME, re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def step_rank(key: str) -> int:
    """Return the priority of `key`, the name of a counter, as the step. A lower number is a higher priority."""
    folded = re.sub(r"[\s-]", "_", key.lower())
    last = (place for place, word in enumerate(_LAST_RANKS, 1) if folded.startswith(word))
    return _STEP_RANK.get(folded, len(STEP_KEYS) + next(last, 0))


_ROLES: Final = {
    key: role
    for role, keys in {
        Role.STEP: " ".join(STEP_KEYS),
        Role.PLAN: "total_steps max_steps total_iterations max_iters num_training_steps",
        Role.STEP_OF_PLAN: "global_step/max_steps",
        Role.RANK: "rank global_rank process_index",
        Role.WRITER: "pid process_id writer writer_id worker_id hostname host",
        Role.TIME: "timestamp _timestamp time ts datetime date asctime created_at wall_time log_time "
        "time_ms @timestamp __realtime_timestamp",
        Role.EVENT: "event event_type _event",
        Role.SPLIT: "split mode phase stage subset type",
        Role.SOURCE: "lineno line_number levelno thread relativecreated msecs ingestiontime",
        Role.CONFIG: "config args hparams hyperparameters hyperparams training_args",
    }.items()
    for key in keys.split()
}


@functools.lru_cache(maxsize=4096)
def role_of(key: str) -> Role:
    """Return the part of a record (step, rank, time and others) to which the value of the log key `key` belongs.

    Upper and lower case count as equal.
    """
    known = _ROLES.get(key.lower())
    if known is None and (key == BATCH or _COUNTER.fullmatch(key)):
        return Role.STEP
    return known or Role.VALUE


def is_counter(name: str) -> bool:
    """Return whether `name` is the name of a counter of steps or of epochs."""
    return role_of(name) is Role.STEP or name.lower() == EPOCH


_WHOLE_RUN: Final = r"^(?:on_)?(?:(?:train(?:ing|er)?|run|fit|job)[ _.-]?)?"
_EVENT_TYPES: Final = tuple(
    (re.compile(pattern), event_type)
    for pattern, event_type in (
        (ENDS.pattern, EventType.EXIT),
        (r"error|exception|crash|fail|abort|oom", EventType.ERROR),
        (r"checkpoint|ckpt|save", EventType.CHECKPOINT),
        (r"eval|valid", EventType.EVALUATION),
        (rf"{_WHOLE_RUN}(?:start|begin|init)(?:ed|s)?$", EventType.LAUNCH),
        (rf"{_WHOLE_RUN}(?:end|ended|finish|finished|complete|completed|done)$", EventType.EXIT),
        (r"(?:start|begin|end|finish|complete)(?:ed)?$", EventType.PHASE),
    )
)


def event_type(name: str) -> str:
    """Return the type of a logged event with this name: EXIT after a success, and NOTE if the name is unknown."""
    folded = name.strip().lower()[:100]
    return next((found for pattern, found in _EVENT_TYPES if pattern.search(folded)), EventType.NOTE)


SET_LABEL: Final = "dataset"
"""Name of the label that contains the evaluation set of a scalar, for runs with several evaluation sets."""

EVALUATION_SPLITS: Final = {"val", "valid", "validation", "eval", "evaluation", "dev", "cv", "test"}
"""Values of a split, such as `"split": "val"`, of a record that is about an evaluation."""
_SAME_IN_EVALUATION: Final = {EPOCH, "learning_rate", "elapsed_seconds"}
_EVALUATED: Final = ("eval_", "test_", "eval ", "test ", "avg_")
_RUNTIME: Final = "_runtime"

Named = tuple[Alias, str | None]
"""The stored name and unit of a quantity (an alias), and the labels (JSON) of the scalars that have this name.

The labels contain the name and the unit in the log.
"""


_MEMORY: Final = "memory"
_MEMORY_UNITS: Final = {
    "log_history": "GiB", "global_step/max_steps": "GiB", "train_speed(iter/s)": "GiB", "train_speed(s/it)": "GiB",
    "data_time": "MiB",
}  # fmt: skip
"""The unit of the number `memory` in a logged object that also contains the key of this mapping.

ms-swift writes objects with the keys for GiB; MMEngine writes objects with the key `data_time`.
"""


class Names:
    """Assigns stored names to the quantities of one log.

    Two quantities never get the same stored name, and the stored name of a quantity does not change. If a log has the
    key `loss`, its key `train_loss` is another quantity, such as an average over an epoch. In objects that have both
    keys, and everywhere after the first `loss`, `train_loss` is therefore not renamed to `loss`.
    """

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._memory_unit: str | None = None

    @property
    def version(self) -> int:
        """A number that increases whenever the stored name of a key may have changed."""
        return len(self._exact) + (self._memory_unit is not None)

    def name(self, key: str, taken: Collection[str], document: Mapping[str, object]) -> Named:
        """Return the stored name of `key`, a key of the object `document`.

        `taken` has the stored names of earlier keys of the object. `key` is not renamed if its usual stored name is in
        `taken` or is another key of the object.
        """
        if key == "throughput" and "total_tokens" in document:
            alias = canonical("tokens_per_second")  # LLaMA-Factory counts tokens, other programs samples
            return alias, alias.labels(key)
        alias, labels = self._memory(document) if key.lower() == _MEMORY else _stored_name(key)
        if alias.source_unit and key.lower().startswith(f"{_MEMORY}("):
            self._memory_unit = alias.source_unit
        if alias.name == key:
            self._exact.add(key)
        elif alias.name in taken or alias.name in self._exact or alias.name in document:
            return own_name(key)
        return alias, labels

    def _memory(self, document: Mapping[str, object]) -> Named:
        """Return the stored name of the key `memory` of `document`.

        A number without a unit has the unit of `memory(…)` in the same log, or the unit of the program that writes such
        objects. If neither is known, the number keeps its name and has no unit.
        """
        known = (unit for mark, unit in _MEMORY_UNITS.items() if mark in document)
        unit = self._memory_unit or next(known, None)
        value = document.get(_MEMORY)
        if isinstance(value, str) and (found := quantity(value)) and found[1]:
            unit = found[1]
        alias = Alias(_MEMORY) if unit is None else in_unit(canonical(_MEMORY), unit)
        return alias, alias.labels(_MEMORY)


@functools.lru_cache(maxsize=4096)
def _stored_name(key: str) -> Named:
    alias = canonical(key)
    return alias, alias.labels(key)


@functools.lru_cache(maxsize=4096)
def own_name(key: str) -> Named:
    """Return `key` unchanged as the stored name, with the unit of its usual quantity."""
    alias = replace(canonical(key), name=redacted_name(key))
    return alias, alias.labels(key)


def evaluation_sets(keys: Collection[str]) -> tuple[str, ...]:
    """Return the names of the evaluation sets in an object of the Hugging Face Trainer.

    The Trainer writes a key `eval_<set>_runtime` for each evaluation set.
    """
    return tuple(
        key[len("eval_") : -len(_RUNTIME)]
        for key in keys
        if key.endswith(_RUNTIME) and key.startswith("eval_") and len(key) > len("eval_") + len(_RUNTIME)
    )


def name_in_set(key: str, sets: tuple[str, ...]) -> Named | None:
    """Return the stored name of a key about one evaluation set; the name of the set becomes a label.

    For example, `eval_<set>_loss` becomes `eval_loss`. Return None if `key` contains none of the set names in `sets`.
    """
    for name in sets:
        if key.startswith(f"eval_{name}_"):
            alias = canonical(f"eval_{key[len(name) + len('eval__') :]}")
            return alias, alias.labels(key, {SET_LABEL: name})
    return None


def name_in_split(key: str, split: str) -> Named | None:
    """Return the stored name of `key` in a record about the data split `split`.

    For validation data, for example, `loss` becomes `eval_loss`. Return None if the split does not change the name.
    """
    alias = canonical(key)
    prefix = "test" if split == "test" else "eval" if split in EVALUATION_SPLITS else None
    if (
        prefix is None
        or alias.name in _SAME_IN_EVALUATION
        or role_of(key) is Role.STEP
        or alias.name.startswith(_EVALUATED)
    ):
        return None
    known = canonical(f"{prefix}_{alias.name}")
    renamed = replace(alias, name=known.name, unit=known.unit or alias.unit)
    return renamed, renamed.labels(key)
