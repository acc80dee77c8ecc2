"""Find the meaning of the keys and event names of an object in a log.

The meaning may depend on the other keys of the object and on earlier objects of the log.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from rankscope_contract.model.events import EventType
from rankscope_ingest.importers.common.failures import ENDS
from rankscope_ingest.importers.common.log_names import Alias, canonical, in_unit, under_own_name
from rankscope_ingest.importers.common.values import quantity


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
    """Return `key` unchanged as the stored name, with the stored unit of its quantity."""
    alias = under_own_name(key)
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
