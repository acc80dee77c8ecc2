"""The name under which a number of a logged object is stored, given what else stands in the object and in the log."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Final

from rankscope_ingest.importers.aliases import Alias, canonical, under_own_name

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
