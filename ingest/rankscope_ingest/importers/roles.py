"""What a key of a logged object is for: step, time, rank, plan, event, or a quantity like most."""

from __future__ import annotations

import enum
import functools
from typing import Final


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
