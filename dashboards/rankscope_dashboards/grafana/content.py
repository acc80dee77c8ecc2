"""The content of a deployment, from the committed provisioning files: folders, data sources, boards and alert rules.

Grafana's files and its API name some keys differently. This module returns documents in the form of the API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from rankscope_dashboards.boards.elements.pages import with_pages
from rankscope_dashboards.provisioning.tree import BOARDS, PACKAGED_TREE

RULES_FOLDER: Final = "rankscope-alerts"
"""Uid of the folder of alert rules, so that links to it remain valid. Files cannot set this uid."""


API_KEYS: Final = {
    "keepFiringFor": "keep_firing_for",
    "missing_series_evals_to_resolve": "missingSeriesEvalsToResolve",
}
"""Keys of a rule in the API, by their names in a file."""

LINK_KEYS: Final = {"dashboardUid": "__dashboardUid__", "panelId": "__panelId__"}
"""Annotations with which Grafana makes the links of a message, by the keys of a rule in a file."""

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder of the deployment."""

    uid: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGroup:
    """Alert rules that Grafana evaluates together, every `interval_seconds`."""

    name: str
    interval_seconds: int
    rules: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All objects of a deployment. Data sources are without an address, which the user gives."""

    boards_folder: Folder
    rules_folder: Folder
    sources: tuple[dict[str, Any], ...]
    boards: tuple[dict[str, Any], ...]
    groups: tuple[RuleGroup, ...]


def read_content(tree: Path = PACKAGED_TREE, *, pages_url: str = "") -> Content:
    """Return the content of the provisioning files in `tree`. Panels link to our pages at `pages_url` if it is set."""
    (provider,) = _yaml(tree / "dashboards" / "rankscope.yaml")["providers"]
    groups = _yaml(tree / "alerting" / "rules.yaml")["groups"]
    (title,) = {group["folder"] for group in groups}
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((tree / BOARDS).glob("*.json"))]
    return Content(
        boards_folder=Folder(uid=provider["folderUid"], title=provider["folder"]),
        rules_folder=Folder(uid=RULES_FOLDER, title=_unescaped(title)),
        sources=tuple(map(_source, _yaml(tree / "datasources" / "rankscope.yaml")["datasources"])),
        boards=tuple(with_pages(board, pages_url) for board in boards),
        groups=tuple(map(_group, groups)),
    )


def _source(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data source without its address and without the keys that only files have."""
    return {name: value for name, value in entry.items() if name not in {"orgId", "editable", "url", "version"}}


def _group(entry: Mapping[str, Any]) -> RuleGroup:
    name = _unescaped(entry["name"])
    return RuleGroup(
        name=name,
        interval_seconds=_interval_seconds(entry["interval"]),
        rules=tuple(_rule(rule, name) for rule in entry["rules"]),
    )


def _rule(entry: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the rule of a file in the form of the API."""
    links = {LINK_KEYS[name]: str(entry[name]) for name in LINK_KEYS if name in entry}
    made = {API_KEYS.get(name, name): value for name, value in entry.items() if name not in LINK_KEYS}
    return made | {
        "orgID": 1,  # the server replaces it with the organisation of the token
        "folderUID": RULES_FOLDER,
        "ruleGroup": group,
        "title": _unescaped(entry["title"]),
        "labels": {name: _unescaped(value) for name, value in entry.get("labels", {}).items()},
        "annotations": links | entry.get("annotations", {}),
    }


def _unescaped(text: str) -> str:
    """Return a value of a file without the doubled dollar signs that prevent the expansion of variables."""
    return text.replace("$$", "$")


def _interval_seconds(text: str) -> int:
    return sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+)([smh])", text))


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
