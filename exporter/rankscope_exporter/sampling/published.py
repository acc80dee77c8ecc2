"""Takes out of the statistics of a step what is not published. On the publisher thread, with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rankscope_contract.kinds import COUNT_OPS, VALUE_OPS
from rankscope_exporter.sampling.ops import ALL_OPS, EVERY_OP, Ops
from rankscope_exporter.statistics import Finished


@dataclass(frozen=True, slots=True)
class Published:
    """By statistic and entry, whether it leaves the rank."""

    values: npt.NDArray[np.bool_]  # [len(VALUE_OPS), T]
    counts: npt.NDArray[np.bool_]  # [len(COUNT_OPS), T]

    def only(self, finished: Finished) -> Finished:
        """Return `finished` as rules see it: without values that are left out, and with all counts."""
        present = finished.present & self.counts[-1]
        values = np.where(self.values, finished.values, np.float32(np.nan))
        return replace(finished, values=values, present=present)


class Choices:
    """Makes the masks of a plan, once for each choice of statistics and each length of it."""

    def __init__(self) -> None:
        self._of: Sequence[Ops] = ()
        self._known = -1
        self._made: Published | None = None

    def of(self, ops: Sequence[Ops], known: int) -> Published | None:
        """Return the masks of the first `known` entries, None where everything is published."""
        if ops is not self._of or known != self._known:
            self._of, self._known = ops, known
            self._made = _masks(ops[:known])
        return self._made


def _masks(ops: Sequence[Ops]) -> Published | None:
    distinct = list(dict.fromkeys(ops))
    if distinct in ([], [EVERY_OP]):
        return None
    place = {choice: position for position, choice in enumerate(distinct)}
    rows = [[op in choice for op in ALL_OPS] for choice in distinct]
    mask = np.array(rows, np.bool_).T[:, [place[choice] for choice in ops]]
    assert COUNT_OPS[-1] == "numel"
    return Published(mask[: len(VALUE_OPS)], mask[len(VALUE_OPS) :])
