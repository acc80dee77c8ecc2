"""CPU time of fetching a page over loopback with the HTTP client of the service."""

from __future__ import annotations

import asyncio
import ipaddress
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from _rows import Row, print_rows

from rankscope_ingest.network.http_client import TEXT, PageFetcher

BYTES = (20_000, 200_000, 1_800_000)
"""The last is the size of a page with 15,000 series."""

ROUNDS, PAUSE_SECONDS = 60, 0.01
ANYWHERE_HERE = [ipaddress.ip_network("127.0.0.0/8")]

_SERVER = """
import http.server
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        size = int(self.path.rpartition("/")[2])
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(b"\\n" * size)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
print(server.server_port, flush=True)
server.serve_forever()
"""

Get = Callable[[str, int], Awaitable[object]]


def run() -> list[Row]:
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            return asyncio.run(_measure(f"http://127.0.0.1:{server.stdout.readline().strip()}"))
        finally:
            server.kill()


async def _measure(url: str) -> list[Row]:
    rows = []
    async with PageFetcher(networks=ANYWHERE_HERE) as fetcher:

        async def get(page: str, size: int) -> None:
            await fetcher.get(page, accept=TEXT, timeout_seconds=5, max_bytes=size)

        idle = await _cpu_milliseconds(_nothing, url, 0)
        for size in BYTES:
            found = [await _cpu_milliseconds(get, f"{url}/{size}", size) - idle for _ in range(3)]
            rows.append(Row(f"{size / 1e6:g} MB", statistics.median(found), "ms CPU", "median of three times 60"))
    return rows


async def _nothing(_page: str, _size: int) -> None:
    await asyncio.sleep(0)


async def _cpu_milliseconds(get: Get, page: str, size: int) -> float:
    for _ in range(3):
        await get(page, size)
    began = time.process_time()
    for _ in range(ROUNDS):
        await get(page, size)
        await asyncio.sleep(PAUSE_SECONDS)  # as pages come: each to a loop that was asleep
    return 1000 * (time.process_time() - began) / ROUNDS


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
