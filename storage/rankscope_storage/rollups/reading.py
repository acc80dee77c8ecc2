"""Where to read the rows of a dataset from, whatever their age, without opening files that cannot hold them."""

from __future__ import annotations

import datetime as dt

from rankscope_contract.rollups import ROLLUPS
from rankscope_storage.connection import Connection
from rankscope_storage.rollups.summing import combined
from rankscope_storage.rollups.timelines import in_raw_columns


def both_tiers(
    connection: Connection,
    dataset: str,
    *,
    run: str | None = None,
    times: tuple[dt.datetime, dt.datetime] | None = None,
) -> str:
    """Return what `Connection.relation` does, and rollup rows beyond the raw ones of `dataset` where there are any."""
    raw = connection.relation(dataset, run=run, times=times)
    beyond = ROLLUPS.get(dataset)
    if beyond is None or not connection.files(beyond, run=run):
        return raw
    rows = combined(dataset, connection.relation(beyond, run=run, times=times))
    return f"(SELECT * FROM {raw} UNION ALL BY NAME SELECT {in_raw_columns(dataset)} FROM ({rows}))"
