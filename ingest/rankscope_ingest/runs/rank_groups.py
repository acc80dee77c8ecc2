"""Group ranks that are at the same place in the code, and sort the groups by probable cause.

The functions have no side effects. A rank in a collective waits for the ranks that are not in it. Therefore ranks in
no collective come first, then ranks with lower sequence numbers, then smaller groups. The first line of a text shows
the probable cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.collective_format import ranks_in, spans
from rankscope_contract.model.stacks import Standing

MOST_SPANS: Final = 16
"""Maximum number of spans of consecutive ranks, such as `0-7`, in a list of ranks that is displayed.

Without this limit, a text about every second one of 1,000 ranks would list 500 spans.
"""

_NO_SEQ: Final = -1


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that are at the same place in the code, in ascending order."""

    standings: tuple[Standing, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(standing.rank for standing in self.standings)

    def __str__(self) -> str:
        return f"{ranks_text(self.ranks)} {self.standings[0]}"


def grouped(standings: Iterable[Standing]) -> list[RankGroup]:
    """Return groups of the ranks that are at the same place in the code. Groups that block other ranks come first."""
    found: dict[tuple[object, ...], list[Standing]] = {}
    for standing in sorted(standings, key=lambda item: item.rank):
        found.setdefault(standing.key, []).append(standing)
    return sorted((RankGroup(tuple(members)) for members in found.values()), key=_order)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text such as `rank 3` or `ranks 0-2, 5`.

    After MOST_SPANS spans, the text ends with the number of further ranks.
    """
    found = spans(ranks).split(",")
    text = ", ".join(found[:MOST_SPANS])
    if len(found) > MOST_SPANS:
        text += f" and {len(set(ranks)) - len(ranks_in(','.join(found[:MOST_SPANS]))):,} more"
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def _order(group: RankGroup) -> tuple[object, ...]:
    pending = group.standings[0].pending
    seq = _NO_SEQ if pending is None else pending.seq
    return pending is not None, seq, len(group.standings), group.ranks
