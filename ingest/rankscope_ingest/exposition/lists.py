"""Watch lists of exporters: files as Prometheus' file_sd has them, and URLs as its http_sd.

A list that cannot be read or understood changes nothing: the last good one holds, and the trouble is told once. A file
that is gone takes its exporters along.
"""

from __future__ import annotations

import asyncio
import glob
import logging
from pathlib import Path
from typing import Final, Protocol

from rankscope_ingest.config import ExporterListSection
from rankscope_ingest.errors import ConfigError, FetchError
from rankscope_ingest.exposition.fetch import JSON, PageFetcher
from rankscope_ingest.exposition.targets import Exporter, listed

log = logging.getLogger(__name__)

MAX_LIST_BYTES: Final = 1 << 24
_YAML: Final = (".yml", ".yaml")


class Audience(Protocol):
    """Whoever follows the exporters."""

    def show(self, source: str, exporters: list[Exporter]) -> None:
        """Follow these of `source` from now on."""
        ...


class ExporterList:
    """One [[exporter_lists]]; `look` may raise nothing."""

    def __init__(self, section: ExporterListSection, fetch: PageFetcher, audience: Audience) -> None:
        self._section = section
        self._fetch = fetch
        self._audience = audience
        self._source = str(section.file or section.url)
        self._good: dict[str, list[Exporter]] = {}
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._section.refresh_seconds)

    async def look(self) -> None:
        """Read the list once, and show what it names."""
        places = [self._source] if self._section.url else await asyncio.to_thread(_matching, self._source)
        before = dict(self._good)
        self._good = {place: self._good[place] for place in places if place in self._good}
        for place in places:
            try:
                is_yaml = self._section.url is None and place.endswith(_YAML)
                self._good[place] = listed(await self._text(place), self._section, is_yaml=is_yaml)
                self._told.pop(place, None)
            except (ConfigError, FetchError) as error:
                self._tell(place, str(error))
        if self._good != before:
            self._audience.show(self._source, [one for found in self._good.values() for one in found])

    async def _text(self, place: str) -> bytes:
        if self._section.url is None:
            return await asyncio.to_thread(_file, place)
        timeout, limit = self._section.timeout_seconds, MAX_LIST_BYTES
        return (await self._fetch.get(place, accept=JSON, timeout_seconds=timeout, max_bytes=limit)).body

    def _tell(self, place: str, why: str) -> None:
        if self._told.get(place) != why:
            self._told[place] = why
            log.warning("the list of exporters %s cannot be used, the last good one holds: %s", place, why)


def _matching(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern))  # noqa: PTH207 - the pattern is absolute, which Path.glob does not take


def _file(place: str) -> bytes:
    try:
        with Path(place).open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from error
    if len(data) > MAX_LIST_BYTES:
        raise ConfigError(f"it has more than {MAX_LIST_BYTES} bytes")
    return data
