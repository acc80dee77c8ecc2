"""The settings of parameter groups that exact rules need, such as the betas of Adam."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope_contract.rules.score import SCALAR_OF_SETTING

_ADAM: Final = frozenset({"torch.optim.adam", "torch.optim.adamw", "torch.optim.nadam", "torch.optim.radam"})
_ALWAYS_DECOUPLED: Final = "torch.optim.adamw"  # of older torch; that of torch 2.13 has the step of Adam, and a flag


class GroupSettings(NamedTuple):
    """Settings of one parameter group of an optimizer. A number that the group lacks, or has as a tensor, is None."""

    beta1: float | None
    beta2: float | None
    weight_decay: float | None
    eps: float | None
    is_adam: bool
    """True if the class of the optimizer has the step of torch's Adam, AdamW, NAdam or RAdam."""
    decays_gradient: bool
    maximizes: bool

    @classmethod
    def of(cls, optimizer: object, group: Mapping[str, Any]) -> GroupSettings:
        """Read the settings of `group`, without waiting for a device."""
        betas, decay = group.get("betas"), group.get("weight_decay")
        first, second = betas if isinstance(betas, tuple | list) and len(betas) == 2 else (None, None)
        step = getattr(type(optimizer), "step", None)  # torch wraps it in each class, and keeps the name of its module
        module = getattr(step, "__module__", "")
        is_decoupled = module == _ALWAYS_DECOUPLED or bool(group.get("decoupled_weight_decay"))
        return cls(
            beta1=_number(first),
            beta2=_number(second),
            weight_decay=_number(decay),
            eps=_number(group.get("eps")),
            is_adam=module in _ADAM,
            decays_gradient=not is_decoupled and decay is not None and _number(decay) != 0,
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
    has_float32_moments: npt.NDArray[np.bool_]
    """By the same position: whether the state of its optimizer has both moments of Adam in float32."""

    def changes(self, before: OptimizerSettings | None) -> Iterator[tuple[str, str, float]]:
        """Yield scalar, number of the group, and value of each setting that differs from `before`."""
        for number, group in enumerate(self.groups):
            known = before.groups[number] if before is not None and number < len(before.groups) else None
            for setting, name in SCALAR_OF_SETTING.items():
                value = getattr(group, setting)
                if value is not None and (known is None or value != getattr(known, setting)):
                    yield name, str(number), value
