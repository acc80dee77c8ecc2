"""Compare the rows in the store with the steps that the ranks of a simulated fleet published, bucket by bucket.

A bucket is a bucket of rollups. Retention replaces its steps by one row, so single steps cannot be distinguished
afterwards. If one step of a bucket is lost and another one is stored twice, the number of rows is correct. The sum of
the norms of the first tensor detects this case: each rank has a different norm at each step, and all are known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _fleet_bodies import first_norms, set_of
from _noise import plan_of

from rankscope_storage.base.datasets import BUCKET_STEPS
from rankscope_storage.connection import Connection, connect

_SUM_ERROR = 1e-9
"""Relative, of sums of at most BUCKET_STEPS numbers in float64; norms of one tensor differ by some 4 %."""

# A record is complete only if each tensor has one row, so the hashes of the names are summed, not the rows.
_RAW = f"""
    SELECT rank, step - step % {BUCKET_STEPS} AS bucket, count(*) AS records, sum(mark) AS mark,
      count(*) FILTER (rows <> $tensors OR norms <> $tensors OR names <> $names) AS wrong
    FROM (
      SELECT rank, incarnation, seq, step, count(*) AS rows, count(norm) AS norms,
        sum(hash(tensor, kind) % 1000003) AS names, sum(norm::DOUBLE) FILTER (tensor = $first AND kind = $kind) AS mark
      FROM tensor_stats GROUP BY ALL
    )
    GROUP BY ALL
"""  # noqa: S608  # a number of our own
_ROLLED_UP = """
    SELECT rank, step AS bucket, min(rows)::BIGINT AS records, sum(mark) AS mark,
      (min(rows) <> max(rows) OR count(*) <> $tensors OR bool_or(norms <> rows))::BIGINT AS wrong
    FROM (
      SELECT rank, step, kind, tensor, sum(rows) AS rows, sum(norm_count) AS norms,
        sum(norm_avg * norm_count) FILTER (tensor = $first AND kind = $kind) AS mark
      FROM tensor_rollups GROUP BY ALL
    )
    GROUP BY ALL
"""
_NAMES = (
    "SELECT sum(hash(tensor, kind) % 1000003)::BIGINT AS names FROM (SELECT unnest($1) AS tensor, unnest($2) AS kind)"
)
_GAPS = "SELECT CAST(sum(value) AS BIGINT) AS reported FROM events WHERE type = 'gap'"

Stretch = tuple[int, int]
"""A rank, and the first step of a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Numbers of records (steps of a rank) by their final state."""

    processes: int
    published: int
    stored: int
    rolled_up: int  # number of stored records that retention replaced
    wrong: int  # records torn or doubled; stretches whose norms are not those of their steps
    lost: int  # of ranks with one process from first to last step, or confirmed as durable to another rank
    died_with: int  # of the others: published by processes that died, and never fetched
    reported: int  # lost records according to the gap events in the store


def check(store: Path, lives: Sequence[dict[str, Any]], *, tensors: int, sets: int) -> Account:
    """Return the account of `lives`, of ranks that publish one of `sets` sets of values at each step."""
    with connect(store) as connection:
        raw, rolled_up = _stretches(connection, tensors)
        told = connection.query(_GAPS).to_pylist()[0]["reported"] or 0
    stored: Counter[Stretch] = Counter()
    marks: defaultdict[Stretch, float] = defaultdict(float)
    for row in raw + rolled_up:
        stored[row["rank"], row["bucket"]] += row["records"]
        marks[row["rank"], row["bucket"]] += row["mark"] or 0.0
    published, durable = (_by_stretch(lives, up_to) for up_to in ("published", "committed"))
    processes = Counter(life["rank"] for life in lives)
    steady = {rank for rank, count in processes.items() if count == 1}
    torn = sum(row["wrong"] for row in raw + rolled_up)
    doubled = sum((stored - published).values())
    missing = published - stored
    lost = sum(count for (rank, _), count in missing.items() if rank in steady)
    return Account(
        processes=len(lives),
        published=published.total(),
        stored=stored.total(),
        rolled_up=sum(row["records"] for row in rolled_up),
        wrong=torn + doubled + _others(lives, stored, marks, sets),
        lost=lost + sum(count for (rank, _), count in (durable - stored).items() if rank not in steady),
        died_with=sum(count for (rank, _), count in missing.items() if rank not in steady),
        reported=told,
    )


def _stretches(connection: Connection, tensors: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the stored rows and the stored rollups of each rank and bucket."""
    entries = plan_of(tensors).plan.entries
    names, kinds = [entry.tensor for entry in entries], [entry.kind for entry in entries]
    first = {"tensors": tensors, "first": names[0], "kind": kinds[0]}
    whole = connection.query(_NAMES, {"1": names, "2": kinds}).to_pylist()[0]["names"]
    raw = connection.query(_RAW, first | {"names": whole})
    return raw.to_pylist(), connection.query(_ROLLED_UP, first).to_pylist()


def _by_stretch(lives: Sequence[dict[str, Any]], up_to: str) -> Counter[Stretch]:
    """Return how many records all processes of a rank have published, or knew as committed, by bucket."""
    steps = ((life["rank"], life["born"] + seq) for life in lives for seq in range(life[up_to]))
    return Counter((rank, step - step % BUCKET_STEPS) for rank, step in steps)


def _others(
    lives: Sequence[dict[str, Any]], stored: Counter[Stretch], marks: Mapping[Stretch, float], sets: int
) -> int:
    """Return how many stretches of which nothing is missing have norms that are not those of their steps."""
    norms = first_norms(sets)
    expected: defaultdict[Stretch, float] = defaultdict(float)
    published = _by_stretch(lives, "published")
    for life in lives:
        for step in range(life["born"], life["born"] + life["published"]):
            expected[life["rank"], step - step % BUCKET_STEPS] += norms[set_of(life["rank"], step, sets)]
    whole = (stretch for stretch, count in published.items() if stored[stretch] == count)
    return sum(abs(marks[stretch] - expected[stretch]) > _SUM_ERROR * expected[stretch] for stretch in whole)
