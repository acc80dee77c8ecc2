"""Which pages are scraped: those of the service's own file, and of lists as file_sd and http_sd have them. Pure.

Of a list's labels `__scheme__`, `__metrics_path__` and `__param_…` say where the page is, `instance` what the target is
called; other names that begin with two underscores are for Prometheus' relabelling, and left out.
"""

from __future__ import annotations

import asyncio
import glob
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit

import yaml

from rankscope_ingest.base.config import ExporterListSection, ExporterSection
from rankscope_ingest.base.errors import ConfigError, FetchError
from rankscope_ingest.scrape.http import JSON, PageFetcher

INSTANCE: Final = "instance"
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SCHEMES: Final = ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """One page to scrape; `name` is the `target` of its rows."""

    name: str
    url: str
    labels: tuple[tuple[str, str], ...]
    every_seconds: float
    timeout_seconds: float
    max_bytes: int


def configured(section: ExporterSection) -> ScrapeTarget:
    """Return the exporter that the service's own file names."""
    labels = dict(section.labels)
    name = labels.pop(INSTANCE, "") or section.name or urlsplit(section.url).netloc
    return _exporter(section, name, section.url, labels)


def listed(text: str | bytes, section: ExporterListSection, *, is_yaml: bool = False) -> list[ScrapeTarget]:
    """Return the exporters of one list: `[{"targets": ["host:port"], "labels": {…}}, …]`. Raises ConfigError."""
    try:
        # As Prometheus reads it: a label that looks like a number or a truth is the text that stands there.
        groups = yaml.load(text, yaml.BaseLoader) if is_yaml else json.loads(text)  # noqa: S506 - it makes no objects
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"it is not {'YAML' if is_yaml else 'JSON'}: {error}") from error
    if not isinstance(groups, list):
        raise ConfigError('it is not a list such as [{"targets": ["host:9100"], "labels": {}}]')
    return [exporter for group in groups for exporter in _of_group(group, section)]


def _of_group(group: Any, section: ExporterListSection) -> Iterable[ScrapeTarget]:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        raise ConfigError(f'it has an entry without "targets": {str(group)[:100]}')
    labels = group.get("labels") or {}
    if not isinstance(labels, dict) or not all(_is_label(*pair) for pair in labels.items()):
        raise ConfigError(f"it has labels that are no labels: {str(labels)[:100]}")
    for address in group["targets"]:
        yield _of_address(address, labels, section)


def _is_label(name: str, value: Any) -> bool:
    return _LABEL.fullmatch(name) is not None and isinstance(value, str)


def _of_address(address: Any, labels: Mapping[str, str], section: ExporterListSection) -> ScrapeTarget:
    scheme = labels.get("__scheme__", "http")
    path = labels.get("__metrics_path__", "/metrics")
    query = {name.removeprefix("__param_"): text for name, text in labels.items() if name.startswith("__param_")}
    url = f"{scheme}://{address}{path}" + (f"?{urlencode(query)}" if query else "")
    try:
        parts = urlsplit(url)
        is_address = parts.netloc == address and parts.hostname and (parts.port or True) and scheme in _SCHEMES
    except ValueError:
        is_address = False
    if not is_address or parts.username is not None:
        raise ConfigError(f"it has a target that is not host:port: {str(address)[:100]!r}")
    own = {**section.labels, **{name: text for name, text in labels.items() if not name.startswith("__")}}
    return _exporter(section, own.pop(INSTANCE, "") or address, url, own)


def _exporter(
    section: ExporterSection | ExporterListSection, name: str, url: str, labels: Mapping[str, str]
) -> ScrapeTarget:
    return ScrapeTarget(
        name=name,
        url=url,
        labels=tuple(sorted((key, text) for key, text in labels.items() if text)),
        every_seconds=section.every_seconds,
        timeout_seconds=section.timeout_seconds,
        max_bytes=section.max_bytes,
    )


log = logging.getLogger(__name__)

MAX_LIST_BYTES: Final = 1 << 24
_YAML: Final = (".yml", ".yaml")


class Audience(Protocol):
    """Whoever follows the exporters."""

    def show(self, source: str, exporters: list[ScrapeTarget]) -> None:
        """Follow these of `source` from now on."""
        ...


class ExporterList:
    """One [[exporter_lists]]; `look` may raise nothing."""

    def __init__(self, section: ExporterListSection, fetch: PageFetcher, audience: Audience) -> None:
        self._section = section
        self._fetch = fetch
        self._audience = audience
        self._source = str(section.file or section.url)
        self._good: dict[str, list[ScrapeTarget]] = {}
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
