"""`rankscope view`: pages of a store without a service."""

import asyncio
import subprocess
import sys
import urllib.request

import aiohttp
import pytest
from tests.view.training import MAIN, Size, write_store

from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.http.pages import serve_pages
from rankscope_storage.api.store import Store


def test_view_serves_the_pages_of_a_store_until_it_is_interrupted(tmp_path):
    write_store(tmp_path / "store", Size(steps=48, layers=1))
    command = [sys.executable, "-m", "rankscope", "view", str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        address = shown.stdout.readline().split()[-1]
        with urllib.request.urlopen(address, timeout=30) as answer:
            page = answer.read().decode()
        shown.send_signal(2)

    assert address.startswith("http://127.0.0.1:")
    assert MAIN in page
    assert 0 == shown.returncode


async def _answers(store, environment, headers):
    """Return the statuses of the page with each of `headers` at an address that other machines reach."""
    ready = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_pages(store, "0.0.0.0:0", environment=environment, on_ready=ready.set_result))
    await asyncio.wait([ready, serving], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    address = f"http://127.0.0.1:{ready.result().rpartition(':')[2]}/"
    try:
        async with aiohttp.ClientSession() as session:
            return [(await session.get(address, headers=one)).status for one in headers]
    finally:
        serving.cancel()


async def test_view_beyond_loopback_needs_the_token(tmp_path):
    Store.open(tmp_path / "store", create=True)
    given = [{}, {"Authorization": "Bearer secret"}, {"Authorization": aiohttp.BasicAuth("any", "secret").encode()}]

    assert [401, 200, 200] == await _answers(tmp_path / "store", {"RANKSCOPE_TOKEN": "secret"}, given)
    with pytest.raises(ConfigError, match="can be reached from other machines: set token"):
        await _answers(tmp_path / "store", {}, [])
