"""Readers of pages, which send the requests of the scripts of a page: each follows the live events."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp

CHARTS = ("loss", "perplexity")
"""Curves that a page of a run asks for while its group of further charts is folded."""


@dataclass(slots=True)
class Reader:
    """One page of `run` at the service `url`. `seen` has the UTC seconds at which each step was received."""

    url: str
    run: str
    seen: dict[int, float] = field(default_factory=dict)
    updates: int = 0
    bytes: int = 0

    async def read(self, session: aiohttp.ClientSession) -> None:
        """Load the page, and update it after each event until the task is cancelled."""
        page = f"{self.url}/runs/{quote(self.run)}"
        text = await self._load(session, page)
        version = (re.findall(rb'data-version="(\d+)"', text) or [b""])[0].decode()
        address = f"{self.url}/data/live?run={quote(self.run)}&version={version}"
        async with session.get(address, read_bufsize=1 << 20) as events, asyncio.TaskGroup() as loads:
            kind = b""
            async for line in events.content:
                if line.startswith(b"event:"):
                    kind = line[6:].strip()
                elif line.startswith(b"data:") and kind == b"rows":
                    self._receive(line[5:])
                elif line.startswith(b"data:"):  # rows are received meanwhile
                    loads.create_task(self._load(session, page))
                kind = kind if line.strip() else b""

    def _receive(self, data: bytes) -> None:
        at = time.time()
        self.bytes += len(data)
        for _, step, _, values in json.loads(data):
            if "loss" in values:
                self.seen.setdefault(step, at)

    async def _load(self, session: aiohttp.ClientSession, page: str) -> bytes:
        names = [f"{self.url}/data/curve?run={quote(self.run)}&name={name}&markers=1" for name in CHARTS]
        texts = await asyncio.gather(*(self._get(session, address) for address in (page, *names)))
        at = time.time()
        self.updates += 1
        lines = json.loads(texts[1])["lines"] if texts[1].startswith(b"{") else []
        for step in lines[-1]["step"][-50:] if lines else ():
            self.seen.setdefault(step, at)
        return texts[0]

    async def _get(self, session: aiohttp.ClientSession, address: str) -> bytes:
        async with session.get(address) as answer:
            body = await answer.read()
        self.bytes += len(body)
        return body
