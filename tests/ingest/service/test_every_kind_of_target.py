"""One service with each kind of target at the same time, in one store."""

from __future__ import annotations

import json

from tests.ingest.remote_write.messages import post, write_request
from tests.ingest.scrape.test_exporters import FakeExporter

from rankscope_ingest.base.protobuf import packed

NOW_MS = 1_770_000_000_000
STORED = "SELECT run, list(value ORDER BY step) AS losses FROM scalars GROUP BY run"
NODE_EXPORTER = """
    SELECT target AS who, max(value) AS last FROM samples WHERE metric IN ('named', 'listed', 'served', 'pushed')
    GROUP BY target ORDER BY target
"""


async def push(service, value):
    message = write_request(({"__name__": "pushed", "instance": "pusher"}, [(NOW_MS, value)]))
    return (await post(service, packed(message)))[0]


async def test_all_kinds_of_targets_are_read_at_the_same_time(fake_rank, start_service, eventually, tmp_path):
    """A registered rank, a static rank, exporters in the configuration, in a file and at a URL, and remote write."""
    file, quick = tmp_path / "targets.json", {"every_seconds": 0.1, "timeout_seconds": 5}
    async with (
        fake_rank(run="registers") as heard,
        fake_rank(run="static", launch_id="static") as static,
        FakeExporter(b"named 1\n") as named,
        FakeExporter(b"listed 2\n") as listed,
        FakeExporter(b"served 3\n") as served,
        FakeExporter() as directory,
    ):
        heard.publish_steps(5)
        static.publish_steps(7)
        file.write_text(json.dumps([{"targets": [listed.address]}]))
        directory.page = json.dumps([{"targets": [served.address]}]).encode()
        changes = {
            "targets": [{"url": static.registration.url, "run": "static"}],
            "exporters": [{"url": named.url, "name": "named", **quick}],
            "exporter_lists": [
                {"file": str(file), "refresh_seconds": 0.1, **quick},
                {"url": directory.url, "refresh_seconds": 0.1, **quick},
            ],
        }
        async with start_service(**changes) as service:
            await heard.register(service.url)
            pushed = await push(service, 4.0)
            await eventually(lambda: len(service.rows("SELECT 1 FROM scalars")) == 12)
            ranks = service.rows(STORED)
            foreign = await eventually(lambda: len(rows := service.rows(NODE_EXPORTER)) == 4 and rows)
            targets = await service.targets()

    assert 204 == pushed
    assert {"registers": [0, 1, 2, 3, 4], "static": [0, 1, 2, 3, 4, 5, 6]} == {
        row["run"]: row["losses"] for row in ranks
    }
    assert {"named": 1.0, listed.address: 2.0, served.address: 3.0, "pusher": 4.0} == {
        row["who"]: row["last"] for row in foreign
    }
    assert {("registers", "up"), ("static", "up")} == {(target["run"], target["health"]) for target in targets}
