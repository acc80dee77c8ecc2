"""Which pages are scraped: those of the service's own file, and of lists as file_sd and http_sd have them. Pure.

Of a list's labels `__scheme__`, `__metrics_path__` and `__param_…` say where the page is, `instance` what the target is
called; other names that begin with two underscores are for Prometheus' relabelling, and left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import yaml

from rankscope_ingest.config import ExporterListSection, ExporterSection
from rankscope_ingest.errors import ConfigError

INSTANCE: Final = "instance"
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SCHEMES: Final = ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """One page to scrape; `name` is the `target` of its rows."""

    name: str
    url: str
    labels: tuple[tuple[str, str], ...]
    every_seconds: float
    timeout_seconds: float
    max_bytes: int


def configured(section: ExporterSection) -> Exporter:
    """Return the exporter that the service's own file names."""
    labels = dict(section.labels)
    name = labels.pop(INSTANCE, "") or section.name or urlsplit(section.url).netloc
    return _exporter(section, name, section.url, labels)


def listed(text: str | bytes, section: ExporterListSection, *, is_yaml: bool = False) -> list[Exporter]:
    """Return the exporters of one list: `[{"targets": ["host:port"], "labels": {…}}, …]`. Raises ConfigError."""
    try:
        # As Prometheus reads it: a label that looks like a number or a truth is the text that stands there.
        groups = yaml.load(text, yaml.BaseLoader) if is_yaml else json.loads(text)  # noqa: S506 - it makes no objects
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"it is not {'YAML' if is_yaml else 'JSON'}: {error}") from error
    if not isinstance(groups, list):
        raise ConfigError('it is not a list such as [{"targets": ["host:9100"], "labels": {}}]')
    return [exporter for group in groups for exporter in _of_group(group, section)]


def _of_group(group: Any, section: ExporterListSection) -> Iterable[Exporter]:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        raise ConfigError(f'it has an entry without "targets": {str(group)[:100]}')
    labels = group.get("labels") or {}
    if not isinstance(labels, dict) or not all(_is_label(*pair) for pair in labels.items()):
        raise ConfigError(f"it has labels that are no labels: {str(labels)[:100]}")
    for address in group["targets"]:
        yield _of_address(address, labels, section)


def _is_label(name: str, value: Any) -> bool:
    return _LABEL.fullmatch(name) is not None and isinstance(value, str)


def _of_address(address: Any, labels: Mapping[str, str], section: ExporterListSection) -> Exporter:
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
) -> Exporter:
    return Exporter(
        name=name,
        url=url,
        labels=tuple(sorted((key, text) for key, text in labels.items() if text)),
        every_seconds=section.every_seconds,
        timeout_seconds=section.timeout_seconds,
        max_bytes=section.max_bytes,
    )
