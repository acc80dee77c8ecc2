"""Write the tree of configuration files for Grafana, Prometheus, Alertmanager and compose, with addresses and paths.

The boards are read from the files in the package, so that this module needs no library that generates boards. The
compose file and the examples of notifications have no settings. They are files of the package that are written by hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope_contract.model.events import Severity
from rankscope_contract.rules.anomaly import DEFAULT_RULES
from rankscope_dashboards.alerts.alert import RUNBOOKS
from rankscope_dashboards.alerts.groups import alert_groups, rule_file
from rankscope_dashboards.boards.elements.pages import with_pages
from rankscope_dashboards.deploy.alertmanager import AlertmanagerSettings, Mail, Receiver, Webhook, alertmanager_config
from rankscope_dashboards.deploy.prometheus import (
    DEFAULT_ALERTMANAGER,
    RULE_FILE,
    PrometheusSettings,
    as_yaml,
    prometheus_config,
)
from rankscope_dashboards.provisioning.alert_rules import alert_rules, panel_ids
from rankscope_dashboards.provisioning.datasources import (
    DASHBOARDS_PATH,
    PROMETHEUS_URL,
    board_provider,
    data_sources,
)

BOARDS: Final = "dashboards/rankscope"
"""Folder of the board files. The provider of the boards reads this folder only, not other boards next to it."""

MANIFEST: Final = ".rankscope.json"
"""File that contains hashes of each file that was written to a folder. It shows which files a user has changed."""

_Hashes = Mapping[str, list[str]]

HEADER: Final = "# Written by `rankscope dashboards provision`.\n"

_PACKAGED: Final = Path(__file__).parents[1] / "tree"
_CHECKOUT: Final = Path(__file__).parents[2] / "provisioning"
PACKAGED_TREE: Final = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
"""Folder with the generated tree: in the package, or in a checkout `dashboards/provisioning`."""

HAND_WRITTEN: Final = (
    *("compose.yaml", "compose/Dockerfile", "compose/rankscope.toml"),
    *("examples/alerting/contact-points.yaml", "examples/alerting/policies.yaml"),
    *("examples/alerting/mute-timings.yaml", "examples/alerting/templates.yaml"),
)
COMPOSE_PROMETHEUS: Final = PrometheusSettings(
    service="rankscope:9470",
    token_file="/run/secrets/rankscope_token",  # noqa: S106 - the path of a file
    alertmanager="alertmanager:9093",
)
"""Addresses and the token file in the containers of `compose.yaml`."""

EXAMPLE_PROMETHEUS: Final = PrometheusSettings(alertmanager=DEFAULT_ALERTMANAGER)
EXAMPLE_ALERTMANAGER: Final = AlertmanagerSettings(
    rules=DEFAULT_RULES,
    receivers=(
        Receiver(name="chat", integrations=(Webhook(url="http://127.0.0.1:8080/alerts"),)),
        Receiver(
            name="on-call",
            integrations=(
                Mail(to="oncall@example.invalid", sender="rankscope@example.invalid", smarthost="127.0.0.1:587"),
            ),
            severities=(Severity.CRITICAL,),
        ),
    ),
)
"""Receivers with example addresses, which a user must replace.

`rankscope up --notify` generates `alertmanager.yml` with real addresses.
"""


class TreeError(Exception):
    """Exception for a folder to which the tree cannot be written. Its message names the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings:
    """Addresses and paths in the tree.

    - `prometheus_url`, `history_url`: addresses of the data sources, as seen from Grafana. Without `history_url`, it is
      `prometheus_url`.
    - `pages_url`: address of the pages of runs, to which boards link. Without it, boards have no such links.
    - `runbooks_url`: address of the runbooks page, to which messages link. Without it, messages have no such link.
    - `boards_path`: folder of the board files, as seen from Grafana.

    Raises ValueError for an address that is not http or https.
    """

    prometheus_url: str = PROMETHEUS_URL
    history_url: str = ""
    pages_url: str = ""
    runbooks_url: str = RUNBOOKS
    boards_path: str = DASHBOARDS_PATH

    def __post_init__(self) -> None:
        for name in ("prometheus_url", "history_url", "pages_url", "runbooks_url"):
            url = getattr(self, name)
            if (url or name == "prometheus_url") and not url.startswith(("http://", "https://")):
                raise ValueError(f"{name.replace('_', '-')} is {url!r}: write an address such as https://host:9090")
            if "$" in url:
                raise ValueError(f"{name.replace('_', '-')} contains '$', which Grafana replaces: write it as %24")


def tree_files(
    boards: Mapping[str, str], settings: TreeSettings | None = None, *, header: str = HEADER
) -> dict[str, str]:
    """Return the text of each file of the tree, by its path. `boards` are the texts of the board files, by name.

    All files except boards start with `header`.
    """
    chosen = settings or TreeSettings()
    rules = alert_rules(alert_groups(), panel_ids(boards.values()), chosen.runbooks_url)
    documents = {
        "datasources/rankscope.yaml": data_sources(
            EXAMPLE_PROMETHEUS, url=chosen.prometheus_url, history_url=chosen.history_url
        ),
        "dashboards/rankscope.yaml": board_provider(chosen.boards_path),
        "alerting/rules.yaml": rules,
        f"prometheus/{RULE_FILE}": rule_file(runbooks=chosen.runbooks_url),
        "prometheus/prometheus.yml": prometheus_config(EXAMPLE_PROMETHEUS),
        "alertmanager/alertmanager.yml": alertmanager_config(EXAMPLE_ALERTMANAGER),
        "compose/prometheus.yml": prometheus_config(COMPOSE_PROMETHEUS),
        "compose/alertmanager.yml": alertmanager_config(AlertmanagerSettings(rules=DEFAULT_RULES)),
        "compose/datasources.yaml": data_sources(COMPOSE_PROMETHEUS, url="http://prometheus:9090"),
        "compose/dashboards.yaml": board_provider(),
    }
    linked = {f"{BOARDS}/{name}": _linked(text, chosen.pages_url) for name, text in boards.items()}
    texts = {name: as_yaml(document) for name, document in documents.items()}
    texts |= {name: (PACKAGED_TREE / name).read_text(encoding="utf-8") for name in HAND_WRITTEN}
    return linked | {name: header + text for name, text in texts.items()}


def packaged_boards() -> dict[str, str]:
    """Return the texts of the board files in the package, by name."""
    folder = PACKAGED_TREE / BOARDS
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))}


def write_tree(folder: Path, files: Mapping[str, str], *, force: bool = False) -> None:
    """Write `files` to `folder`, and delete files of an earlier call that are no longer part of the tree.

    Raises TreeError, and changes nothing, if the folder contains files of another origin, or if a user has changed
    files of the tree. With `force`, such files are overwritten; files that are not part of the tree always remain.
    """
    known = _manifest(folder)
    new = {name: [hashlib.sha256(text.encode()).hexdigest()] for name, text in files.items()}
    if not force:
        _check(folder, new, known)
    for name in known.keys() - files.keys():
        if _hash(folder / name) in known[name]:
            (folder / name).unlink()
    # After an interruption, files of this call and of the one before are both those of the tree.
    both = {name: known.get(name, []) + hashes for name, hashes in new.items()}
    _write(folder / MANIFEST, json.dumps(both, indent=1))
    for name, text in files.items():
        _write(folder / name, text)
    _write(folder / MANIFEST, json.dumps(new, indent=1))


def _check(folder: Path, new: _Hashes, known: _Hashes) -> None:
    if folder.exists() and not folder.is_dir():
        raise TreeError(f"{folder} is not a folder")
    if not known and folder.is_dir() and any(folder.iterdir()):
        raise TreeError(f"{folder} is not empty: name another folder, or add --force to write into this one")
    expected = {name: [None, *known.get(name, []), *hashes] for name, hashes in new.items()}
    changed = [name for name in sorted(new) if _hash(folder / name) not in expected[name]]
    if changed:
        raise TreeError(f"files in {folder} were changed: {', '.join(changed)}; add --force to overwrite them")


def _manifest(folder: Path) -> _Hashes:
    """Return the hashes of the files that earlier calls wrote, or nothing if no call wrote to the folder."""
    try:
        known = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    inside = folder.resolve()
    names = known if isinstance(known, dict) else {}
    # A damaged file must not make this module delete files outside of the folder.
    return {name: hashes for name, hashes in names.items() if (folder / name).resolve().is_relative_to(inside)}


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _linked(board: str, pages_url: str) -> str:
    return json.dumps(with_pages(json.loads(board), pages_url), indent=2, sort_keys=True) + "\n" if pages_url else board
