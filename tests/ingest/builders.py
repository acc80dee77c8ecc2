"""Registrations, targets, ranks and attempts for tests without a service."""

from collections.abc import Iterable
from typing import Any

from rankscope_contract.wire.channel import Registration
from rankscope_ingest.runs.models import Attempt, Liveness, Rank, Target


def registration(**changes: Any) -> Registration:
    fields = {"run": "r", "rank": 0, "world_size": 1, "host": "h", "pid": 1, "launch_id": "l"} | changes
    fields = {"local_rank": fields["rank"], "incarnation": f"i{fields['rank']}", "url": "http://127.0.0.1:1"} | fields
    return Registration(**fields)


def target(who: Registration | None = None, **changes: Any) -> Target:
    """Return a target of `who`, or of a rank without differences from the default one."""
    fields = {"attempt": 0, "lease": "x", "liveness": Liveness(last_sign=0.0)} | changes
    return Target(registration=who or registration(), **fields)


def rank_of(number: int, **changes: Any) -> Rank:
    fields = {
        "incarnation": f"i{number}",
        "host": "h",
        "liveness": Liveness(last_sign=0.0),
        "known_since": 0.0,
    } | changes
    return Rank(number=number, **fields)


def attempt(ranks: Iterable[Rank] = (), **changes: Any) -> Attempt:
    known = {rank.number: rank for rank in ranks}
    fields = {"run": "r", "number": 0, "launch_id": "l", "world_size": max(1, len(known)), "started_at": 0} | changes
    return Attempt(ranks=known, **fields)
