"""Find the exporters to scrape, in the configuration file and in lists in the formats of file_sd and http_sd.

The labels `__scheme__`, `__metrics_path__` and `__param_…` in a list define the URL of an exporter, and `instance` its
name. Other labels that start with two underscores are meant for relabelling in Prometheus and are dropped.
"""

from __future__ import annotations

import asyncio
import glob
import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import yaml

from rankscope_contract.model.redaction import redacted_name
from rankscope_ingest.base.config import ExporterListSection, ExporterSection
from rankscope_ingest.base.errors import ConfigError, FetchError
from rankscope_ingest.network.http_client import JSON, PageFetcher

log = logging.getLogger(__name__)

INSTANCE: Final = "instance"
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SCHEMES: Final = ("http", "https")
MAX_LIST_BYTES: Final = 1 << 24
_YAML: Final = (".yml", ".yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """One exporter page to scrape. `name` is stored in the column `target` of all rows that come from this page."""

    name: str
    url: str
    labels: tuple[tuple[str, str], ...]
    every_seconds: float
    timeout_seconds: float
    max_bytes: int


def configured(sections: Iterable[ExporterSection]) -> Iterator[ScrapeTarget]:
    """Yield the exporters that the [[exporters]] sections of the configuration file describe.

    An exporter without a name has the name host:port. Of several users at one address, the second one has the name
    host:port#2. The name does not contain the user: it is stored, and it must not change together with a password.
    """
    users: dict[str, dict[str, int]] = defaultdict(dict)
    for section in sections:
        user, _, address = urlsplit(section.url).netloc.rpartition("@")
        number = users[address].setdefault(user, len(users[address]) + 1)
        labels = dict(section.labels)
        name = labels.pop(INSTANCE, "") or section.name or (f"{address}#{number}" if number > 1 else address)
        yield _exporter(section, name, section.url, labels)


def listed(text: str | bytes, section: ExporterListSection, *, is_yaml: bool = False) -> list[ScrapeTarget]:
    """Return the exporters of a list `[{"targets": ["host:port"], "labels": {…}}, …]`, which is JSON or YAML.

    Raises ConfigError if the list is invalid.
    """
    try:
        # As in Prometheus, label values that look like numbers or booleans remain text.
        groups = yaml.load(text, yaml.BaseLoader) if is_yaml else json.loads(text)  # noqa: S506 - BaseLoader creates only text, lists and mappings
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"the list is not valid {'YAML' if is_yaml else 'JSON'}: {error}") from error
    if not isinstance(groups, list):
        raise ConfigError('the content is not a list such as [{"targets": ["host:9100"], "labels": {}}]')
    return [exporter for group in groups for exporter in _of_group(group, section)]


def _of_group(group: Any, section: ExporterListSection) -> Iterable[ScrapeTarget]:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        raise ConfigError(f'an entry of the list has no "targets": {str(group)[:100]}')
    labels = group.get("labels") or {}
    if not isinstance(labels, dict) or not all(_is_label(*pair) for pair in labels.items()):
        raise ConfigError(f"an entry of the list has invalid labels: {str(labels)[:100]}")
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
        # Without a password.
        raise ConfigError(f"a target of the list is not host:port: {str(address).rpartition('@')[2][:100]!r}")
    own = {**section.labels, **{name: text for name, text in labels.items() if not name.startswith("__")}}
    return _exporter(section, own.pop(INSTANCE, "") or address, url, own)


def _exporter(
    section: ExporterSection | ExporterListSection, name: str, url: str, labels: Mapping[str, str]
) -> ScrapeTarget:
    return ScrapeTarget(
        name=redacted_name(name),
        url=url,
        labels=tuple(sorted((key, text) for key, text in labels.items() if text)),
        every_seconds=section.every_seconds,
        timeout_seconds=section.timeout_seconds,
        max_bytes=section.max_bytes,
    )


ShowTargets = Callable[[str, list[ScrapeTarget]], None]
"""A function that replaces all exporters of one source, such as one list.

The arguments are the source and the new exporters.
"""


class ExporterList:
    """One [[exporter_lists]] section of the configuration file, with the exporters that its list contains.

    The list is read from the files or the URL of the section at an interval.
    """

    def __init__(self, section: ExporterListSection, fetch: PageFetcher, show: ShowTargets) -> None:
        self._section = section
        self._fetch = fetch
        self._show = show
        self._source = str(section.file or section.url)
        self._good: dict[str, list[ScrapeTarget]] = {}
        self._errors: dict[str, str] = {}  # the last logged error by place

    async def run(self) -> None:
        """Read the list at the configured interval until this coroutine is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._section.refresh_seconds)

    async def look(self) -> None:
        """Read the list once. If its exporters have changed, pass them to the callback of the constructor.

        An invalid or unreadable list raises no error; its last valid content remains in use.
        """
        places = [self._source] if self._section.url else await asyncio.to_thread(_matching, self._source)
        before = dict(self._good)
        self._good = {place: self._good[place] for place in places if place in self._good}
        for place in places:
            try:
                is_yaml = self._section.url is None and place.endswith(_YAML)
                self._good[place] = listed(await self._text(place), self._section, is_yaml=is_yaml)
                self._errors.pop(place, None)
            except (ConfigError, FetchError) as error:
                if self._errors.get(place) != str(error):
                    self._errors[place] = str(error)
                    log.warning("exporter list %s cannot be read, using its last valid content: %s", place, error)
        if self._good != before:
            self._show(self._source, [one for found in self._good.values() for one in found])

    async def _text(self, place: str) -> bytes:
        if self._section.url is None:
            return await asyncio.to_thread(_file, place)
        timeout, limit = self._section.timeout_seconds, MAX_LIST_BYTES
        return (await self._fetch.get(place, accept=JSON, timeout_seconds=timeout, max_bytes=limit))[0]


def _matching(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern))  # noqa: PTH207 - the pattern is absolute, which Path.glob does not take


def _file(place: str) -> bytes:
    try:
        with Path(place).open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from error
    if len(data) > MAX_LIST_BYTES:
        raise ConfigError(f"the file has more than {MAX_LIST_BYTES} bytes")
    return data
