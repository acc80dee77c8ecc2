"""Names of scalars: the losses that a training script logs become `loss` and `eval_loss`, such as `val/loss`.

Names are compared without regard to case; a space, a dash and an underscore count as the same character.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final, TypeVar

from rankscope_contract.model.redaction import redacted_name

T = TypeVar("T")

SOURCE_NAME: Final = "source_name"
SOURCE_UNIT: Final = "source_unit"

LOSSES: Final[Mapping[str, tuple[str, ...]]] = {
    "loss": (
        *("train_loss", "train/loss", "training_loss", "lm loss", "trl", "loss/train", "loss train"),
        "train/total_loss",
    ),
    "eval_loss": (
        *("val_loss", "valid_loss", "validation_loss", "dev_loss", "tel", "lm loss value", "evaluation_loss"),
        *("loss/val", "loss/valid", "loss/validation", "loss/eval"),
    ),
}
"""Stored names of losses, and their other names in logs. A training script may log a loss under each of them."""

_TRAIN: Final = re.compile(r"^train(?:ing)?/(?:.*/)?(?P<rest>[^/]+)$")
_EVALUATION: Final = re.compile(r"^(?:eval|evaluation|val|valid|validation|dev)/(?P<rest>[^/]+)$")


@functools.lru_cache(maxsize=4096)
def logged_name(name: str) -> tuple[str, Mapping[str, str]]:
    """Return the stored name and labels of a number logged as `name`; only losses change: see `SOURCE_NAME`."""
    name = redacted_name(name)
    stored = entry_of(_LOSS_NAMES, folded(name))
    return (name, {}) if stored in (None, name) else (stored, {SOURCE_NAME: name})


def folded(name: str) -> str:
    """Return the form of `name` in which names are compared."""
    return re.sub(r"\.?[\s_-]+", "_", name.strip().lower())


def entry_of(table: Mapping[str, T], name: str) -> T | None:
    """Return the entry of a folded `name` in `table`; for `train/…/x`, that of `x`; for `val/x`, that of `eval_x`."""
    if name in table:
        return table[name]
    if found := _TRAIN.match(name):
        return table.get(found["rest"])
    found = _EVALUATION.match(name)
    return table.get(f"eval_{found['rest']}") if found else None


_LOSS_NAMES: Final = {folded(name): stored for stored, names in LOSSES.items() for name in (stored, *names)}
