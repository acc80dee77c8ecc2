"""Routes of a real service: the response to an unknown path."""

from __future__ import annotations

import json

from rankscope_contract.protocol import channel


async def test_response_to_an_unknown_path_lists_all_paths(start_service):
    async with start_service() as service:
        status, text = await service.get("/unknown")

    names = "PAGE SERVICE_PAGE STATUS REGISTER POKE RUN_STACKS SERVICE_DISCOVERY TARGETS RUNS EXPORTERS REMOTE_READ"
    paths = [getattr(channel, f"{name}_PATH") for name in (*names.split(), "REMOTE_WRITE", "HEALTH", "METRICS")]
    paths += ["/assets/{tail}", "/compare", "/data/live", "/data/{tail}", "/runs/{tail}"]
    assert 404 == status
    assert f"/unknown does not exist; the paths are {', '.join(sorted(paths))}" == json.loads(text)["error"]
