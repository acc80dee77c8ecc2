"""Command lines and generated configuration files of the programs that `rankscope up` starts.

This module starts no program and writes no file. All programs listen on localhost only, except that the configuration
of the service can name another listen address for the service.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.access.service import client_address
from rankscope.up.machine import StateDir
from rankscope_contract.rules.anomaly import DEFAULT_RULES
from rankscope_contract.wire.channel import HEALTH_PATH
from rankscope_dashboards.alerts.groups import rule_file
from rankscope_dashboards.deploy.alertmanager import AlertmanagerSettings, Receiver, alertmanager_config
from rankscope_dashboards.deploy.prometheus import (
    RULE_FILE,
    PrometheusSettings,
    Tls,
    as_yaml,
    prometheus_config,
)

LOOPBACK: Final = "127.0.0.1"
SERVICE, PROMETHEUS, ALERTMANAGER = "service", "prometheus", "alertmanager"
TOKEN_FILE: Final = "token"  # noqa: S105 - the name of a file
HEADER: Final = "# Written by `rankscope up` at every start: change its options instead of this file.\n"

_READY: Final = "/-/ready"
_DRAIN_GRACE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that `rankscope up` starts and restarts after an exit."""

    name: str
    command: tuple[str, ...]
    url: str
    ready_path: str  # responds with status 200 as soon as the program is ready
    grace_seconds: float = 15.0  # time between SIGTERM and SIGKILL
    is_essential: bool = False  # `up` exits when this program is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Options of the service, as `rankscope up` starts it."""

    config: Path | None
    store: str
    host: str  # listen address
    token: str | None = None
    tls: Tls | None = None  # None: plain HTTP
    ranks_tls: Tls | None = None
    drain_seconds: float = 20.0

    def address(self, port: int) -> str:
        """Return the host and the port of the service for clients on this machine."""
        return client_address(self.host, port)

    def url(self, port: int) -> str:
        """Return the URL of the service for clients on this machine."""
        return f"{'http' if self.tls is None else 'https'}://{self.address(port)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of all programs of `rankscope up`. A program whose path is None is not started."""

    service: ServiceOptions
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

    @property
    def delay_seconds(self) -> float:
        """Return the largest delay in seconds from an anomaly to its notification by Alertmanager.

        The delay is the sum of scrape interval, rule evaluation, and the wait for other parts of the incident: in the
        service, or for anomalies that it does not report, the group wait of Alertmanager.
        """
        return 2 * self.scrape_seconds + self.group_wait_seconds


def files(options: UpOptions, folder: StateDir) -> dict[str, str]:
    """Return the text of every generated file, by its name in the folder `config` of the state folder."""
    made = {}
    if options.service.token is not None:
        made[TOKEN_FILE] = options.service.token
    if options.prometheus is not None:
        rules = rule_file(window=options.event_window, keep_firing_for=options.keep_firing_for)
        made["prometheus.yml"] = HEADER + as_yaml(prometheus_config(_prometheus_settings(options, folder)))
        made[RULE_FILE] = HEADER + as_yaml(rules)
    if options.alertmanager is not None:
        settings = AlertmanagerSettings(
            rules=DEFAULT_RULES,
            receivers=options.receivers,
            group_wait_seconds=options.group_wait_seconds,
            group_interval_seconds=options.group_interval_seconds,
        )
        made["alertmanager.yml"] = HEADER + as_yaml(alertmanager_config(settings))
    return made


def programs(options: UpOptions, folder: StateDir) -> list[Program]:
    """Return the programs in the order in which they are started and stopped; the service is the first.

    While the service stores the last records of the ranks, Prometheus and Alertmanager are therefore still running and
    can send alerts.
    """
    made = [_service(options)]
    if options.alertmanager is not None:
        made.append(_alertmanager(options.alertmanager, options, folder))
    if options.prometheus is not None:
        made.append(_prometheus(options.prometheus, options, folder))
    return made


def _service(options: UpOptions) -> Program:
    service, port = options.service, options.ports[SERVICE]
    listen = f"[{service.host}]:{port}" if ":" in service.host else f"{service.host}:{port}"
    given = [] if service.config is None else [str(service.config)]
    # -P: a user module in the working folder must not replace a module of Rankscope.
    command = [sys.executable, "-P", "-m", "rankscope", "serve", *given, "--listen", listen, "--quiet"]
    return Program(
        name=SERVICE,
        command=(*command, *(() if service.config is not None else ("--store", service.store))),
        url=service.url(port),
        ready_path=HEALTH_PATH,
        grace_seconds=service.drain_seconds + _DRAIN_GRACE_SECONDS,
        is_essential=True,
    )


def _prometheus(executable: Path, options: UpOptions, folder: StateDir) -> Program:
    address = f"{LOOPBACK}:{options.ports[PROMETHEUS]}"
    return Program(
        name=PROMETHEUS,
        command=(
            str(executable),
            f"--config.file={folder.config('prometheus.yml')}",
            f"--storage.tsdb.path={folder.data(PROMETHEUS)}",
            f"--storage.tsdb.retention.time={options.retention}",
            f"--web.listen-address={address}",
        ),
        url=f"http://{address}",
        ready_path=_READY,
    )


def _alertmanager(executable: Path, options: UpOptions, folder: StateDir) -> Program:
    address = f"{LOOPBACK}:{options.ports[ALERTMANAGER]}"
    return Program(
        name=ALERTMANAGER,
        command=(
            str(executable),
            f"--config.file={folder.config('alertmanager.yml')}",
            f"--storage.path={folder.data(ALERTMANAGER)}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",  # empty: no cluster; the default listens on all addresses
        ),
        url=f"http://{address}",
        ready_path=_READY,
    )


def _prometheus_settings(options: UpOptions, folder: StateDir) -> PrometheusSettings:
    alertmanager = None if options.alertmanager is None else f"{LOOPBACK}:{options.ports[ALERTMANAGER]}"
    return PrometheusSettings(
        service=options.service.address(options.ports[SERVICE]),
        token_file=None if options.service.token is None else str(folder.config(TOKEN_FILE)),
        tls=options.service.tls,
        ranks_tls=options.service.ranks_tls,
        alertmanager=alertmanager,
        rule_files=(str(folder.config(RULE_FILE)),),
        scrape_seconds=options.scrape_seconds,
        evaluation_seconds=options.scrape_seconds,
        discovery_seconds=options.scrape_seconds,
    )
