"""The settings of parameter groups that exact rules need, such as the betas of Adam."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_ADAM: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


class GroupSettings(NamedTuple):
    """Settings of one parameter group of an optimizer. A number that the group lacks, or has as a tensor, is None."""

    beta1: float | None
    beta2: float | None
    weight_decay: float | None
    eps: float | None
    is_adam: bool
    decays_gradient: bool
    maximizes: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> GroupSettings:
        """Read the settings of `group`, without waiting for a device."""
        betas = group.get("betas")
        first, second = betas if isinstance(betas, tuple | list) and len(betas) == 2 else (None, None)
        decay = group.get("weight_decay")
        is_decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        return cls(
            beta1=_number(first),
            beta2=_number(second),
            weight_decay=_number(decay),
            eps=_number(group.get("eps")),
            is_adam=any(type(optimizer).step is known.step for known in _ADAM),
            decays_gradient=decay != 0 and not is_decoupled if _number(decay) is not None else decay is not None,
            maximizes=bool(group.get("maximize")),
        )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, float | int) else None


@dataclass(frozen=True, eq=False, slots=True)
class OptimizerSettings:
    """The settings of all groups. Without a change, the records of all steps have the same object."""

    groups: tuple[GroupSettings, ...]
    group_of: npt.NDArray[np.int64]
    """By position of a parameter in the list of all parameters of the model: its group, -1 without one."""
