"""Pages of a running service: routes below a prefix, authentication, live updates, and an end that does not wait."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from rankscope_ingest.base.config import ServiceSection


async def test_pages_are_below_the_root_and_below_the_prefix(start_service):
    async with start_service(**{"service.base_path": "/prefix"}) as service:
        for path in ("/", "/prefix/", "/service", "/prefix/service"):
            status, text = await service.get(path)
            assert 200 == status, text
        _, text = await service.get("/")

    assert 'href="/prefix/service"' in text
    assert "Nothing has been stored here" in text


async def test_pages_need_the_token(start_service):
    async with start_service(**{"service.token": "secret"}) as service, aiohttp.ClientSession() as session:
        for path in ("/", "/runs/r", "/data/live", "/assets/0/app.js"):
            async with session.get(service.url + path) as answer:
                assert 401 == answer.status


async def test_live_updates_follow_the_versions_and_end_with_the_service(start_service):
    async with aiohttp.ClientSession() as session:
        async with start_service() as service:
            answer = await session.get(service.url + "/data/live")
            first = await asyncio.wait_for(answer.content.readline(), 10)
            began = time.monotonic()

        assert first.startswith(b"data: ")
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("path", ["prefix", "/prefix/", "/a b", "//", "/../x"])
def test_bad_prefix_is_rejected(path):
    with pytest.raises(ValueError, match="is not a path prefix"):
        ServiceSection(base_path=path)
