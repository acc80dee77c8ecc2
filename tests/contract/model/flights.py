"""Flight records with few fields to write."""

from rankscope_contract.model.stacks import Collective, FlightRecord, GroupProgress

MIB = 1 << 20


def entry(seq: int, *, pending: bool = False, op: str = "all_reduce", group: str = "dp", **more: object) -> Collective:
    given: dict[str, object] = {
        "sizes": ((MIB,),), "dtypes": ("Float",), "bytes": 4 * MIB, "group_id": f"id of {group}",
        "age_seconds": 62.0 if pending else 90.0, "backend": "gloo", **more,
    }  # fmt: skip
    return Collective(op=op, group=group, seq=seq, is_pending=pending, **given)  # type: ignore[arg-type]


def record(*entries: Collective, ranks: str = "0-3", **latest: int) -> FlightRecord:
    """Return a flight record of the group `dp`, or of the groups in `latest`, which has the latest call of each."""
    newest = latest or {"dp": max((one.seq for one in entries), default=-1)}
    groups = tuple(
        GroupProgress(id=f"id of {name}", ranks=ranks, latest_seq=seq) for name, seq in newest.items() if seq >= 0
    )
    return FlightRecord(reason="x", collectives=entries, recorded=len(entries), groups=groups)
