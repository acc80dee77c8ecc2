"""What the keys of a Megatron row mean: `elapsed time per iteration (ms)` is our `step_seconds`, times 0.001."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.schema import canonical_labels
from rankscope_ingest.importers.common.aliases import SOURCE_NAME, SOURCE_UNIT, canonical

LOSS: Final = "loss"

_OWN_NAMES: Final = {
    "number_of_skipped_iterations": ("skipped_iterations", "iterations"),
    "number_of_nan_iterations": ("nan_iterations", "iterations"),
    "global_batch_size": ("global_batch_size", "samples"),
    "actual_seqlen": ("sequence_length", "tokens"),
    "train_step_timing_in_s": ("step_seconds", "seconds"),
    "curriculum_seqlen": ("curriculum_sequence_length", "tokens"),
}
_MAIN_LOSSES: Final = ("lm_loss", "loss", "total_loss", "train_loss", "reduced_train_loss", "sft_loss")
_BEHIND_LOSS: Final = frozenset({
    "loss_scale", "grad_norm", "num_zeros", "params_norm", "number_of_skipped_iterations", "number_of_nan_iterations",
})  # fmt: skip
_SOME_LOSS: Final = re.compile(r"(?:.*[_/])?loss")
_SIDE_LOSS: Final = re.compile(r"mtp|balanc|aux|(?:^|_)z_loss|router|indexer|moe|(?:^|_)kd_|seq_")


@dataclass(frozen=True, slots=True)
class Meaning:
    """A scalar: `value x factor` is in `unit`."""

    name: str
    unit: str | None
    factor: float
    labels: str | None

    def average(self) -> Meaning:
        """Return the meaning of the second of two values `current/average`."""
        return Meaning(f"{self.name}_average", self.unit, self.factor, self.labels)


@functools.lru_cache(maxsize=256)
def meanings(keys: tuple[str, ...]) -> tuple[Meaning, ...]:
    """Return what each key of one row means. One loss at most is *the* loss, the others keep their names."""
    main = main_loss(keys)
    return tuple(meaning(key, is_main=key == main) for key in keys)


@functools.lru_cache(maxsize=256)
def main_loss(keys: tuple[str, ...]) -> str | None:
    """Return the key of the loss that is trained on, None where the row prints none."""
    folded = {fold(key): key for key in reversed(keys)}
    for name in _MAIN_LOSSES:
        if name in folded:
            return folded[name]
    return next((key for key in keys if _SOME_LOSS.fullmatch(fold(key)) and not _SIDE_LOSS.search(fold(key))), None)


@functools.lru_cache(maxsize=256)
def may_break_off(keys: tuple[str, ...]) -> bool:
    """Return whether a row has neither a loss nor anything that stands behind it."""
    return main_loss(keys) is None and _BEHIND_LOSS.isdisjoint(map(fold, keys))


def breaks_off(keys: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> bool:
    """Return whether a row is only the beginning of one like those of `known`, up to a bar before the loss.

    A row that leaves out its loss alone still has what stands behind it.
    """
    if not may_break_off(keys):
        return False
    longer = [one for one in known if len(one) > len(keys) + 1 and one[: len(keys)] == keys]
    return any(main_loss(one) not in {None, one[-1]} for one in longer)


@functools.lru_cache(maxsize=4096)
def meaning(key: str, *, is_main: bool = False) -> Meaning:
    """Return what one key means."""
    alias = canonical(key)
    name, unit = alias.name, alias.unit
    if is_main:
        name = LOSS
    elif name == LOSS:
        name = fold(key)
    else:
        name, own_unit = _OWN_NAMES.get(fold(name), (name.replace(" ", "_"), None))
        unit = unit or own_unit
    labels = {}
    if fold(key) != name.lower():
        labels[SOURCE_NAME] = key
    if alias.source_unit is not None:
        labels[SOURCE_UNIT] = alias.source_unit
    return Meaning(name, unit, alias.factor, canonical_labels(labels))


def fold(key: str) -> str:
    """Return a key in small letters, without its unit, words joined by underscores."""
    return re.sub(r"[\s_-]+", "_", key.split("(", 1)[0].strip().lower())
