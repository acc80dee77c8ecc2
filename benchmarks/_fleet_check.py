"""What the store has of a simulated fleet, rank by rank, against what the fleet says that it published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_storage.connection import connect

_RECORDS = """
    SELECT rank, count(*) AS records, count(*) FILTER (rows <> {tensors} OR norms <> {tensors}) AS wrong
    FROM (SELECT rank, incarnation, seq, count(*) AS rows, count(norm) AS norms FROM tensor_stats GROUP BY ALL)
    GROUP BY rank
"""
_ROLLED_UP = "SELECT rank, CAST(sum(rows) AS BIGINT) AS rows FROM tensor_rollups GROUP BY rank"
_GAPS = "SELECT CAST(sum(value) AS BIGINT) AS told FROM events WHERE type = 'gap'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Records, that is steps of a rank, by what became of them."""

    processes: int
    published: int
    stored: int
    rolled_up: int  # of those, what retention has replaced
    wrong: int  # with more or fewer rows than there are tensors
    lost: int  # of ranks whose process lived from the first step to the last
    died_with: int  # of the others: published by processes that died, and never fetched
    told: int  # what the store says was lost


def check(store: Path, lives: Sequence[dict[str, Any]], tensors: int) -> Account:
    """Return the account of `lives`."""
    with connect(store) as connection:
        rows = connection.query(_RECORDS.format(tensors=tensors)).to_pylist()
        old = connection.query(_ROLLED_UP).to_pylist()
        told = connection.query(_GAPS).to_pylist()[0]["told"] or 0
    rolled_up = Counter({row["rank"]: row["rows"] // tensors for row in old})
    stored = Counter({row["rank"]: row["records"] for row in rows}) + rolled_up
    processes = Counter(life["rank"] for life in lives)
    published: Counter[int] = Counter()
    for life in lives:
        published[life["rank"]] += life["published"]
    missing = {rank: count - stored[rank] for rank, count in published.items()}
    return Account(
        processes=len(lives),
        published=published.total(),
        stored=stored.total(),
        rolled_up=rolled_up.total(),
        wrong=sum(row["wrong"] for row in rows) + sum(-count for count in missing.values() if count < 0),
        lost=sum(max(0, count) for rank, count in missing.items() if processes[rank] == 1),
        died_with=sum(max(0, count) for rank, count in missing.items() if processes[rank] > 1),
        told=told,
    )
