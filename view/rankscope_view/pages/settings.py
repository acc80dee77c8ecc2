"""The configuration of a run: hyper-parameters, command, commit, hosts and versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rankscope_view.data.detail import RunDetail
from rankscope_view.data.documents import flat, json_object
from rankscope_view.pages.format import text, utc
from rankscope_view.pages.parts import fact_table, panel

MOST_SETTINGS: Final = 60
LONGEST_CONFIG: Final = 100_000
_OF_TRAINING: Final = ("hyperparameters", "argv", "git_commit", "device", "quantities", "every")
"""Settings in the configuration of a monitor that describe the training. The others are only in the folded JSON."""

_WORDS: Final = {"argv": "command", "git_commit": "commit"}


def settings(found: RunDetail) -> list[tuple[str, str]]:
    """Return the configuration of a run and facts about it as (name, value). Nested settings have names with dots."""
    row, facts = found.row, found.facts
    known = [("source", row.source_kind), ("ranks", row.world_size), ("hosts", ", ".join(facts.hosts[:8]))]
    known += [("started", utc(row.started_at, "%Y-%m-%d %H:%M:%S UTC") if row.started_at is not None else None)]
    known += [("ended", utc(row.ended_at, "%Y-%m-%d %H:%M:%S UTC") if row.ended_at is not None else None)]
    known += [(name, version) for name, version in facts.versions.items()]
    listed = [(name, str(value)) for name, value in known if value not in (None, "")]
    return [(_WORDS.get(name, name), value) for name, value in _texts(_config(facts.config))] + listed


def _config(document: str | None) -> dict[str, Any]:
    found = json_object(document)
    if "serve" not in found:  # the configuration of an imported run
        return {name: value for name, value in found.items() if name != "import"}
    return {name: found[name] for name in _OF_TRAINING if name in found}


def _texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, one in flat(config):
        if one not in (None, "", []):
            words = isinstance(one, list) and all(isinstance(part, str | int | float) for part in one)
            shown = " ".join(map(str, one)) if words else one if isinstance(one, str) else json.dumps(one)
            yield name.removeprefix("hyperparameters."), shown


def configuration(found: RunDetail, *, is_report: bool = False) -> str:
    """Return the configuration as HTML: a panel of the page of the run, or a part of its report."""
    listed = settings(found)
    if len(listed) > MOST_SETTINGS:
        listed = [*listed[: MOST_SETTINGS - 1], ("more", f"{len(listed) - MOST_SETTINGS + 1} settings")]
    config = found.facts.config
    whole = ""
    if config and len(config) <= LONGEST_CONFIG:
        whole = f'<details class="further"><summary>All settings as JSON</summary><pre class="sql">{text(config)}</pre></details>'
    body = fact_table((text(name), text(_short(value))) for name, value in listed) + whole
    return f'<h2 class="part">Configuration</h2>{body}' if is_report else panel("Configuration", body, name="config")


def _short(value: str, longest: int = 200) -> str:
    return value if len(value) <= longest else f"{value[:longest]}…"
