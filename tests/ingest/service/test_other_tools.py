"""A service on a store that delta-rs rewrites while the service writes and before it starts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

OPERATIONS = (
    lambda table: table.optimize.compact(),
    lambda table: table.delete("name = 'unwanted'"),
    lambda table: table.optimize.z_order(["rank", "step"]),
    lambda table: table.create_checkpoint(),
)


def operate(store) -> None:
    for operation in OPERATIONS:
        with contextlib.suppress(CommitFailedError):  # a commit of the service was first
            operation(DeltaTable(str(store)))


@pytest.mark.thorough
async def test_service_starts_and_stores_each_record_once_between_rewrites(start_service, fake_rank, eventually):
    async with fake_rank() as rank:
        for life in range(2):
            async with start_service() as service:
                await rank.register(service.url)
                for part in range(3):
                    expected = 5 * (3 * life + part + 1) - 1
                    for _ in range(5):
                        rank.publish(scalars=[{"name": name, "value": 1.0} for name in ("loss", "unwanted")])
                    await asyncio.to_thread(operate, service.store)
                    await eventually(lambda expected=expected: rank.committed == expected)
                status, text = await service.get("/healthz")
                state = await service.run_state()

                assert (200, "running") == (status, state["state"]), text
            await asyncio.to_thread(operate, service.store)
    copies = service.rows("SELECT seq, count(*) AS n FROM scalars WHERE name = 'loss' GROUP BY seq ORDER BY seq")

    assert [{"seq": seq, "n": 1} for seq in range(30)] == copies
    assert [{"n": 0}] == service.rows("SELECT count(*) AS n FROM scalars WHERE name = 'unwanted'")
