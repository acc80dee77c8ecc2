"""What `rankscope up` starts: each program with its command line, and the files it is given. Pure; nothing is started.

Everything listens on this machine alone. Only the service may be told otherwise, by its own configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.up.state_dir import Folder
from rankscope_contract.channel import HEALTH_PATH
from rankscope_dashboards.alertmanager_config import AlertmanagerSettings, Receiver, alertmanager_config
from rankscope_dashboards.prometheus_config import RULE_FILE, PrometheusSettings, Tls, duration, prometheus_config
from rankscope_dashboards.rules import rule_file
from rankscope_dashboards.yaml_text import as_yaml

LOOPBACK: Final = "127.0.0.1"
SERVICE, PROMETHEUS, ALERTMANAGER = "service", "prometheus", "alertmanager"
TOKEN_FILE: Final = "token"  # noqa: S105 - the name of a file
HEADER: Final = "# Written by `rankscope up` at every start: change its options, not this file.\n"

_READY: Final = "/-/ready"
_DRAIN_GRACE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One program to be kept running."""

    name: str
    command: tuple[str, ...]
    url: str
    ready_path: str
    log: Path
    grace_seconds: float = 15.0  # how long it may take to end when asked
    is_essential: bool = False  # without it there is no point in going on

    @property
    def ready_url(self) -> str:
        """Return the page that answers once the program works."""
        return self.url + self.ready_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceWish:
    """How the service is to run."""

    config: Path | None
    store: str
    host: str  # where it listens
    token: str | None = None
    tls: Tls | None = None  # how its certificate is checked; None: it speaks plain HTTP
    ranks_tls: Tls | None = None
    drain_seconds: float = 20.0

    def address(self, port: int) -> str:
        """Return where programs on this machine reach it."""
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)  # noqa: S104 - the wildcard is replaced
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def url(self, port: int) -> str:
        """Return its address as a URL."""
        return f"{'http' if self.tls is None else 'https'}://{self.address(port)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Everything that was asked for; a program without a path is left out."""

    service: ServiceWish
    ports: Mapping[str, int]
    prometheus: Path | None = None
    alertmanager: Path | None = None
    receivers: Sequence[Receiver] = ()
    scrape_seconds: float = 5.0
    group_wait_seconds: float = 2.0
    group_interval_seconds: float = 60.0
    event_window: str = "2m"
    keep_firing_for: str = "1m"
    retention: str = "15d"


def files(wish: Wish, folder: Folder) -> dict[str, str]:
    """Return every generated file by its name under the folder's `config`."""
    made = {}
    if wish.service.token is not None:
        made[TOKEN_FILE] = wish.service.token
    if wish.prometheus is not None:
        rules = rule_file(window=wish.event_window, keep_firing_for=wish.keep_firing_for)
        made["prometheus.yml"] = HEADER + as_yaml(prometheus_config(_prometheus_settings(wish, folder)))
        made[RULE_FILE] = HEADER + as_yaml(rules)
    if wish.alertmanager is not None:
        settings = AlertmanagerSettings(
            receivers=wish.receivers,
            group_wait_seconds=wish.group_wait_seconds,
            group_interval_seconds=wish.group_interval_seconds,
        )
        made["alertmanager.yml"] = HEADER + as_yaml(alertmanager_config(settings))
    return made


def pieces(wish: Wish, folder: Folder) -> list[Piece]:
    """Return the programs in the order in which they are started; they are ended in the same order.

    The service first: while it takes the ranks' last records, Prometheus still sees it, and people still hear of it.
    """
    made = [_service(wish, folder)]
    if wish.alertmanager is not None:
        made.append(_alertmanager(wish.alertmanager, wish, folder))
    if wish.prometheus is not None:
        made.append(_prometheus(wish.prometheus, wish, folder))
    return made


def _service(wish: Wish, folder: Folder) -> Piece:
    service, port = wish.service, wish.ports[SERVICE]
    listen = f"[{service.host}]:{port}" if ":" in service.host else f"{service.host}:{port}"
    given = [] if service.config is None else [str(service.config)]
    # -P: a module of the user's own beside the training script must not pass for one of ours.
    command = [sys.executable, "-P", "-m", "rankscope", "serve", *given, "--listen", listen, "--quiet"]
    return Piece(
        name=SERVICE,
        command=(*command, *(() if service.config is not None else ("--store", service.store))),
        url=service.url(port),
        ready_path=HEALTH_PATH,
        log=folder.log(SERVICE),
        grace_seconds=service.drain_seconds + _DRAIN_GRACE_SECONDS,
        is_essential=True,
    )


def _prometheus(program: Path, wish: Wish, folder: Folder) -> Piece:
    address = f"{LOOPBACK}:{wish.ports[PROMETHEUS]}"
    return Piece(
        name=PROMETHEUS,
        command=(
            str(program),
            f"--config.file={folder.config('prometheus.yml')}",
            f"--storage.tsdb.path={folder.data(PROMETHEUS)}",
            f"--storage.tsdb.retention.time={wish.retention}",
            f"--web.listen-address={address}",
        ),
        url=f"http://{address}",
        ready_path=_READY,
        log=folder.log(PROMETHEUS),
    )


def _alertmanager(program: Path, wish: Wish, folder: Folder) -> Piece:
    address = f"{LOOPBACK}:{wish.ports[ALERTMANAGER]}"
    return Piece(
        name=ALERTMANAGER,
        command=(
            str(program),
            f"--config.file={folder.config('alertmanager.yml')}",
            f"--storage.path={folder.data(ALERTMANAGER)}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",  # it would look for others on every address of the machine
        ),
        url=f"http://{address}",
        ready_path=_READY,
        log=folder.log(ALERTMANAGER),
    )


def _prometheus_settings(wish: Wish, folder: Folder) -> PrometheusSettings:
    alertmanager = None if wish.alertmanager is None else f"{LOOPBACK}:{wish.ports[ALERTMANAGER]}"
    return PrometheusSettings(
        service=wish.service.address(wish.ports[SERVICE]),
        token_file=None if wish.service.token is None else str(folder.config(TOKEN_FILE)),
        tls=wish.service.tls,
        ranks_tls=wish.service.ranks_tls,
        alertmanager=alertmanager,
        rule_files=(str(folder.config(RULE_FILE)),),
        scrape_seconds=wish.scrape_seconds,
        evaluation_seconds=wish.scrape_seconds,
        discovery_seconds=wish.scrape_seconds,
    )


def told_within_seconds(wish: Wish) -> float:
    """Return how long an anomaly takes at most until Alertmanager sends it on: scrape, evaluation, gathering."""
    return 2 * wish.scrape_seconds + wish.group_wait_seconds


def pace(wish: Wish) -> str:
    """Return the pace in words."""
    return f"a scrape every {duration(wish.scrape_seconds)}, told within {duration(told_within_seconds(wish))}"
