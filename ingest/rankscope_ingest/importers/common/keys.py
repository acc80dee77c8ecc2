"""The name under which a number of a logged object is stored, given what else stands in the object and in the log."""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_ingest.importers.common.aliases import Alias, canonical, under_own_name


class Role(enum.Enum):
    """What the value under a key means for its record."""

    VALUE = enum.auto()
    STEP = enum.auto()
    PLAN = enum.auto()
    STEP_OF_PLAN = enum.auto()  # "12/873"
    RANK = enum.auto()
    TIME = enum.auto()
    EVENT = enum.auto()
    SPLIT = enum.auto()  # which data a row is about: train, val, test
    CONFIG = enum.auto()


STEP_KEYS: Final = (
    "step",
    "global_step",
    "current_steps",
    "current_step",
    "train/global_step",
    "trainer/global_step",
    "iteration",
    "iter",
    "num_updates",
    "train_num_updates",
    "optimizer_step",
    "steps",
    "s",
    "train/step",
    "n_iter",
    "_step",
)
"""The first of these that holds a whole number is the step; the others stay quantities."""

STEP_RANK: Final = {key: place for place, key in enumerate(STEP_KEYS)}

_ROLES: Final = {
    **dict.fromkeys(STEP_KEYS, Role.STEP),
    **dict.fromkeys(("total_steps", "max_steps", "total_iterations", "max_iters", "num_training_steps"), Role.PLAN),
    "global_step/max_steps": Role.STEP_OF_PLAN,
    **dict.fromkeys(("rank", "global_rank", "process_index"), Role.RANK),
    **dict.fromkeys(
        ("timestamp", "_timestamp", "time", "ts", "datetime", "date", "asctime", "created_at", "wall_time", "log_time"),
        Role.TIME,
    ),
    **dict.fromkeys(("event", "event_type", "_event"), Role.EVENT),
    **dict.fromkeys(("split", "mode", "phase", "stage", "subset", "type"), Role.SPLIT),
    **dict.fromkeys(("config", "args", "hparams", "hyperparameters", "hyperparams", "training_args"), Role.CONFIG),
}


@functools.lru_cache(maxsize=4096)
def role_of(key: str) -> Role:
    """Return what `key` is for; case does not matter."""
    return _ROLES.get(key.lower(), Role.VALUE)


SET_LABEL: Final = "dataset"
"""Label of a number about one of several evaluation sets."""

_EVALUATION_SPLITS: Final = {"val", "valid", "validation", "eval", "evaluation", "dev"}
_SAME_IN_EVALUATION: Final = {"epoch", "learning_rate"}
_RUNTIME: Final = "_runtime"

Named = tuple[Alias, str | None]
"""An alias and the `labels` that tell what the source called it."""


class Names:
    """Gives the same quantity the same name all through a log, and never two quantities one name.

    A log that says `loss` means something else by `train_loss` (an average over an epoch or the whole run): from the
    first `loss` on, and within an object that has both, the other keeps its own name.
    """

    def __init__(self) -> None:
        self._exact: set[str] = set()

    @property
    def version(self) -> int:
        """Changes when a name may mean something else than before."""
        return len(self._exact)

    def name(self, key: str, taken: Collection[str], document: Mapping[str, object]) -> Named:
        """Return the name of `key`, of which neither `taken` nor another key of `document` may have any use."""
        if key == "throughput" and "total_tokens" in document:
            return tokens_throughput()  # LLaMA-Factory counts tokens, others samples
        alias, labels = plain(key)
        if alias.name == key:
            self._exact.add(key)
        elif alias.name in taken or alias.name in self._exact or alias.name in document:
            return own(key)
        return alias, labels


@functools.lru_cache(maxsize=4096)
def plain(key: str) -> Named:
    """Return our name for `key`."""
    alias = canonical(key)
    return alias, alias.labels(key)


def tokens_throughput() -> Named:
    """Return our name for a throughput in tokens."""
    alias = canonical("tokens_per_second")
    return alias, alias.labels("throughput")


@functools.lru_cache(maxsize=4096)
def own(key: str) -> Named:
    """Return `key` under its own name, its unit understood."""
    alias = under_own_name(key)
    return alias, alias.labels(key)


def evaluation_sets(keys: Collection[str]) -> tuple[str, ...]:
    """Return the sets an object of the Hugging Face Trainer is about: it writes `eval_<set>_runtime` for each."""
    return tuple(
        key[len("eval_") : -len(_RUNTIME)]
        for key in keys
        if key.endswith(_RUNTIME) and key.startswith("eval_") and len(key) > len("eval_") + len(_RUNTIME)
    )


def of_set(key: str, sets: tuple[str, ...]) -> Named | None:
    """Return `eval_<set>_loss` as `eval_loss` of that set; None for what belongs to none of `sets`."""
    for name in sets:
        if key.startswith(f"eval_{name}_"):
            alias = canonical(f"eval_{key[len(name) + len('eval__') :]}")
            return alias, alias.labels(key, {SET_LABEL: name})
    return None


def in_split(key: str, split: str) -> Named | None:
    """Return `loss` of a row about validation data as `eval_loss`; None where the split changes nothing."""
    alias = canonical(key)
    if alias.name in _SAME_IN_EVALUATION or alias.name.startswith(("eval_", "test_")):
        return None
    prefix = "eval" if split in _EVALUATION_SPLITS else "test" if split == "test" else None
    if prefix is None:
        return None
    known = canonical(f"{prefix}_{alias.name}")
    renamed = Alias(known.name, known.unit or alias.unit, alias.factor, alias.source_unit)
    return renamed, renamed.labels(key)


MAX_SHAPES: Final = 256
EPOCH: Final = "epoch"
_NUMBERS: Final = {int, float}
_LARGEST: Final = 1 << 53

_Key = tuple[tuple[str, ...], tuple[type, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Where step and epoch stand among the values, and what the numbers are called."""

    step: int
    epoch: int | None
    numbers: tuple[tuple[int, Named], ...]


class Shapes:
    """The shapes of one log, as long as its names stay what they are."""

    def __init__(self) -> None:
        self._known: dict[_Key, Shape] = {}
        self._names = 0

    def of(self, document: Mapping[str, Any], names: int) -> Shape | None:
        """Return the shape of `document`, if it is known; `names` changes where a name may mean something else."""
        if names != self._names:
            self._known.clear()
            self._names = names
        return self._known.get((tuple(document), tuple(map(type, document.values()))))

    def learn(self, document: Mapping[str, Any], step_key: str, named: Sequence[tuple[str, Named]]) -> None:
        """Remember the shape of `document`, of which all that was found is its step and `named`."""
        types = tuple(map(type, document.values()))
        places = {key: place for place, key in enumerate(document)}
        is_plain = set(types) <= _NUMBERS and len(named) + 1 == len(places) and all(key in places for key, _ in named)
        if is_plain and type(document.get(step_key)) is int and len(self._known) < MAX_SHAPES:
            numbers = tuple((places[key], name) for key, name in named)
            self._known[tuple(document), types] = Shape(places[step_key], places.get(EPOCH), numbers)


def is_plain_number(value: float) -> bool:
    """Return whether a number needs no care: whole ones may be beyond what a float holds."""
    return type(value) is float or -_LARGEST < value < _LARGEST
