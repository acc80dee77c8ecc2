"""Routes of a real service: the response to an unknown path."""

from __future__ import annotations

import json

from rankscope_contract.protocol import channel


async def test_response_to_an_unknown_path_lists_all_paths(start_service):
    async with start_service() as service:
        status, text = await service.get("/unknown")

    error = json.loads(text)["error"]
    assert 404 == status
    assert error.startswith("/unknown does not exist; the paths are ")
    paths = (
        channel.PAGE_PATH,
        channel.SERVICE_PAGE_PATH,
        "/assets/{tail}",
        "/compare",
        "/data/live",
        "/data/{tail}",
        "/runs/{tail}",
        channel.STATUS_PATH,
        channel.REGISTER_PATH,
        channel.POKE_PATH,
        channel.RUN_STACKS_PATH,
        channel.SERVICE_DISCOVERY_PATH,
        channel.TARGETS_PATH,
        channel.RUNS_PATH,
        channel.EXPORTERS_PATH,
        channel.REMOTE_READ_PATH,
        channel.REMOTE_WRITE_PATH,
        channel.HEALTH_PATH,
        channel.METRICS_PATH,
    )
    assert sorted(paths) == error.removeprefix("/unknown does not exist; the paths are ").split(", ")
