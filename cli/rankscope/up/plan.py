"""Create the start plan of `rankscope up` from its options: programs, ports, and generated configuration files.

This module starts no program and writes no file. All programs listen on localhost only, except that the configuration
of the service can name another listen address for the service.

The module also parses the addresses of `--notify` into Alertmanager receivers: webhooks, Slack and mail. The service
notifies all other addresses, such as those that only Apprise supports.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from rankscope.access.service import ClientTls, client_address, load_settings, service_tls
from rankscope.shell.errors import USAGE, CommandError
from rankscope.up import machine
from rankscope.up.machine import PortChoice, StateDir, find_required
from rankscope_contract.rules.anomaly import DEFAULT_RULES
from rankscope_contract.wire.channel import HEALTH_PATH
from rankscope_dashboards.alerts.groups import rule_file
from rankscope_dashboards.deploy import alertmanager, prometheus
from rankscope_dashboards.deploy.alertmanager import Mail, Receiver, Slack, Webhook
from rankscope_dashboards.deploy.prometheus import RANKS_JOB, RULE_FILE, Tls, as_yaml, duration

if TYPE_CHECKING:
    from rankscope_ingest.base.config import ServiceConfig
    from rankscope_storage.base.location import Location


LOOPBACK: Final = "127.0.0.1"
SERVICE, PROMETHEUS, ALERTMANAGER = "service", "prometheus", "alertmanager"
TOKEN_FILE: Final = "token"  # noqa: S105 - the name of a file
HEADER: Final = "# Written by `rankscope up` at every start: change its options instead of this file.\n"

_DRAIN_GRACE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that `rankscope up` starts and restarts after an exit."""

    name: str
    command: tuple[str, ...]
    url: str
    ready_path: str = "/-/ready"  # responds with status 200 as soon as the program is ready
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
        made["prometheus.yml"] = HEADER + as_yaml(prometheus.prometheus_config(_prometheus_settings(options, folder)))
        made[RULE_FILE] = HEADER + as_yaml(rules)
    if options.alertmanager is not None:
        settings = alertmanager.AlertmanagerSettings(
            rules=DEFAULT_RULES,
            receivers=options.receivers,
            group_wait_seconds=options.group_wait_seconds,
            group_interval_seconds=options.group_interval_seconds,
        )
        made["alertmanager.yml"] = HEADER + as_yaml(alertmanager.alertmanager_config(settings))
    return made


def programs(options: UpOptions, folder: StateDir) -> list[Program]:
    """Return the programs in the order in which they are started and stopped; the service is the first.

    While the service stores the last records of the ranks, Prometheus and Alertmanager are therefore still running and
    can send alerts.
    """
    service, port = options.service, options.ports[SERVICE]
    listen = f"[{service.host}]:{port}" if ":" in service.host else f"{service.host}:{port}"
    # -P: a user module in the working folder must not replace a module of Rankscope.
    command = [sys.executable, "-P", "-m", "rankscope", "serve"]
    command += [] if service.config is None else [str(service.config)]
    command += ["--listen", listen, "--quiet", *(["--store", service.store] if service.config is None else [])]
    made = [
        Program(
            name=SERVICE,
            command=tuple(command),
            url=service.url(port),
            ready_path=HEALTH_PATH,
            grace_seconds=service.drain_seconds + _DRAIN_GRACE_SECONDS,
            is_essential=True,
        )
    ]
    if options.alertmanager is not None:
        address = f"{LOOPBACK}:{options.ports[ALERTMANAGER]}"
        arguments = (
            f"--config.file={folder.config('alertmanager.yml')}",
            f"--storage.path={folder.data(ALERTMANAGER)}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",  # empty: no cluster; the default listens on all addresses
        )
        command = [str(options.alertmanager), *arguments]
        made.append(Program(name=ALERTMANAGER, command=tuple(command), url=f"http://{address}"))
    if options.prometheus is not None:
        address = f"{LOOPBACK}:{options.ports[PROMETHEUS]}"
        arguments = (
            f"--config.file={folder.config('prometheus.yml')}",
            f"--storage.tsdb.path={folder.data(PROMETHEUS)}",
            f"--storage.tsdb.retention.time={options.retention}",
            f"--web.listen-address={address}",
        )
        command = [str(options.prometheus), *arguments]
        made.append(Program(name=PROMETHEUS, command=tuple(command), url=f"http://{address}"))
    return made


def _prometheus_settings(options: UpOptions, folder: StateDir) -> prometheus.PrometheusSettings:
    address = None if options.alertmanager is None else f"{LOOPBACK}:{options.ports[ALERTMANAGER]}"
    return prometheus.PrometheusSettings(
        service=options.service.address(options.ports[SERVICE]),
        token_file=None if options.service.token is None else str(folder.config(TOKEN_FILE)),
        tls=options.service.tls,
        ranks_tls=options.service.ranks_tls,
        alertmanager=address,
        rule_files=(str(folder.config(RULE_FILE)),),
        scrape_seconds=options.scrape_seconds,
        evaluation_seconds=options.scrape_seconds,
        discovery_seconds=options.scrape_seconds,
    )


DEFAULT_SENDER: Final = "rankscope@localhost"
_SLACK_SCHEMES: Final = ("slack+http", "slack+https")
_MAIL_KEYS: Final = {"to", "from", "tls"}


def receivers(addresses: Sequence[str]) -> tuple[list[Receiver], list[str]]:
    """Return one Alertmanager receiver per address, and the addresses that only the service can notify.

    Raises CommandError for an address in a wrong form. The message lists the valid forms and contains no secret.
    """
    from rankscope_ingest.base.errors import ConfigError
    from rankscope_ingest.notify.notifiers import make_notifiers, split_severity

    made, others = [], []
    for number, address in enumerate(addresses, 1):
        severity, url = split_severity(address)
        try:
            way = _integration(url, urlsplit(url))
        except ValueError as error:
            scheme = url.partition("://")[0]
            raise CommandError(f"--notify address {number} ({scheme}://…): {error}", code=USAGE) from error
        if way is None:
            others.append(address)
        else:
            severities = (severity,) if severity else ()
            made.append(Receiver(name=f"address-{number}", integrations=(way,), severities=severities))
    try:
        make_notifiers(others, timeout_seconds=1.0)
    except ConfigError as error:
        raise CommandError(f"--notify: {error}", code=USAGE) from error
    return made, others


def _integration(url: str, parts: SplitResult) -> Webhook | Slack | Mail | None:
    """Return the Alertmanager integration for an address; None if Alertmanager does not support the URL scheme."""
    if parts.scheme in _SLACK_SCHEMES or _is_slack(parts):
        return Slack(url=url.removeprefix("slack+"))
    if parts.scheme in ("http", "https"):
        return Webhook(url=url)
    return _mail(parts) if parts.scheme == "smtp" else None


def _is_slack(parts: SplitResult) -> bool:
    """Return whether an address is an incoming webhook of Slack, by its host or by the form of its path."""
    is_web = parts.scheme in ("http", "https")
    is_host = (parts.hostname or "").startswith("hooks.slack")
    return is_web and (is_host or re.fullmatch(r"/services/T\w+/B\w+/\w+", parts.path) is not None)


def _mail(parts: SplitResult) -> Mail:
    asked = parse_qs(parts.query)
    if unknown := asked.keys() - _MAIL_KEYS:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))} in the address: use to, from and tls")
    if not parts.hostname or "to" not in asked:
        raise ValueError("host or recipient is missing: write smtp://host:port?to=ADDRESS")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Mail(
        to=", ".join(asked["to"]),
        sender=asked.get("from", [DEFAULT_SENDER])[0],
        smarthost=f"{host}:{parts.port or 25}",
        require_tls=asked.get("tls", ["yes"])[0] != "no",
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )


EVENT_SECONDS: Final = 120.0
KEEP_SECONDS: Final = 60.0
_HIDDEN: Final = "<secret>"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The start plan: all programs and configuration files of `rankscope up`.

    It is made before the first program starts.
    """

    options: UpOptions
    folder: StateDir
    files: dict[str, str]
    programs: Sequence[Program]
    warnings: tuple[str, ...]  # ports that differ from the expected ones
    notify: tuple[str, ...]  # addresses that the service notifies, if they differ from those in the configuration
    notification_lines: tuple[str, ...]  # receivers of notifications, and the delay
    left_out: tuple[str, ...]  # names of the programs that do not run
    advertised: str  # URL of the service for ranks
    client_tls: ClientTls | None  # TLS settings for requests to the service

    @property
    def token(self) -> str | None:
        """Return the token that the service and the ranks use; None without authentication."""
        return self.options.service.token

    @property
    def token_file(self) -> Path | None:
        """Return the path of the file with the token of the service and the ranks; None without a token."""
        return None if self.token is None else self.folder.config(TOKEN_FILE)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables for the programs: the file of the token, and addresses, which are secret."""
        token = {} if self.token_file is None else {"RANKSCOPE_TOKEN_FILE": str(self.token_file)}
        return token | ({"RANKSCOPE_NOTIFY": " ".join(self.notify)} if self.notify else {})

    def redacted_files(self) -> dict[str, str]:
        """Return the generated configuration files without secrets, for display.

        The files are generated from options without secrets. Removing a secret from the finished text would be
        unreliable, because YAML quoting can change it.
        """
        service = replace(self.options.service, token=None if self.token is None else _HIDDEN)
        redacted = [
            replace(one, integrations=tuple(map(_redacted, one.integrations))) for one in self.options.receivers
        ]
        return files(replace(self.options, service=service, receivers=redacted), self.folder)


def make_plan(
    *,
    config: Path | None = None,
    store: Location | None = None,
    listen: str | None = None,
    notify: Sequence[str] = (),
    ports: PortChoice = "fixed",
    state: Path | None = None,
    scrape_seconds: float = 5.0,
    retention: str = "15d",
    with_prometheus: bool = True,
    with_alertmanager: bool = True,
) -> StartPlan:
    """Return the start plan for the options of `rankscope up`.

    Raises CommandError if an option cannot be satisfied; the message names the remedy.
    """
    if not re.fullmatch(r"([1-9][0-9]*(ms|[smhdwy]))+", retention):
        raise CommandError(f"--retention {retention}: write numbers with units, such as 15d, 12h or 1y6w", code=USAGE)
    settings = load_settings(config, store, listen, None)
    folder = StateDir(state) if state else StateDir.next_to(settings.store.path)
    made, notified, has_more = _addresses(settings, notify, with_alertmanager=with_alertmanager)
    wanted = {machine.PROMETHEUS: "--without-prometheus"} if with_prometheus else {}
    wanted |= {machine.ALERTMANAGER: "--without-alertmanager"} if with_alertmanager else {}
    executables = find_required(wanted)
    # The listen address of an option or of the file is kept.
    is_explicit = listen is not None or config is not None
    names = [one for one, path in (("prometheus", with_prometheus), ("alertmanager", with_alertmanager)) if path]
    chosen, notes = _ports(names, ports, settings, folder, is_explicit=is_explicit)
    options = UpOptions(
        service=_service_options(config, settings),
        ports=chosen,
        prometheus=executables.get(machine.PROMETHEUS),
        alertmanager=executables.get(machine.ALERTMANAGER),
        receivers=made,
        scrape_seconds=scrape_seconds,
        event_window=duration(max(EVENT_SECONDS, 4 * scrape_seconds)),  # a rate needs several scrapes
        keep_firing_for=duration(max(KEEP_SECONDS, 2 * scrape_seconds)),
        retention=retention,
    )
    return StartPlan(
        options=options,
        folder=folder,
        files=files(options, folder),
        programs=programs(options, folder),
        warnings=tuple(notes),
        notify=tuple(notified) if has_more else (),
        notification_lines=tuple(_notification_lines(options, len(notified))),
        advertised=_advertised_url(settings, chosen[SERVICE]),
        client_tls=service_tls(settings),
        left_out=tuple(name for name in ("prometheus", "alertmanager") if name not in chosen),
    )


def _addresses(
    settings: ServiceConfig, notify: Sequence[str], *, with_alertmanager: bool
) -> tuple[list[Receiver], list[str], bool]:
    """Return the receivers of Alertmanager, the addresses of the service, and whether `notify` added one to them."""
    mode, urls = settings.notify.mode, [url.get_secret_value() for url in settings.notify.urls]
    addresses = [*(urls if mode == "alertmanager" else ()), *notify]
    made, others = receivers(addresses) if with_alertmanager else ([], addresses)
    if others and mode != "embedded":
        raise CommandError(
            f'{len(others)} addresses are for the service, but [notify] mode is "{mode}": set mode = "embedded", or '
            "name addresses that Alertmanager supports: https://…, slack+https://… or smtp://…",
            code=USAGE,
        )
    return made, [*(urls if mode == "embedded" else ()), *others], bool(others)


def _ports(
    names: Sequence[str], ports: PortChoice, settings: ServiceConfig, folder: StateDir, *, is_explicit: bool
) -> tuple[dict[str, int], list[str]]:
    """Return the port of the service and of each program in `names`, and a line for each that is not the usual one."""
    from rankscope_ingest.base.config import split_address

    host, port = split_address(settings.service.listen)
    known = folder.load_notes().get("ports", {})
    if is_explicit and port:
        if not machine.is_free(port, host):
            listener = machine.listeners().get(port)
            by = f" by {listener}" if listener else ""
            raise CommandError(f"{settings.service.listen} is in use{by}: name another --listen address")
        # The port of the service is fixed; the other programs must not use it.
        chosen, notes = machine.choose(names, ports, known, avoid=port)
        return {SERVICE: port, **chosen}, notes
    return machine.choose([SERVICE, *names], "free" if is_explicit else ports, known)


def _service_options(config: Path | None, settings: ServiceConfig) -> ServiceOptions:
    from rankscope_ingest.base.config import split_address

    return ServiceOptions(
        config=None if config is None else config.absolute(),
        store=settings.store.path,
        host=split_address(settings.service.listen)[0],
        token=settings.token,
        tls=_tls(service_tls(settings)),
        ranks_tls=_tls(_ranks_tls(settings)),
        drain_seconds=settings.ingest.drain_seconds,
    )


def _advertised_url(settings: ServiceConfig, port: int) -> str:
    """Return the URL of the service that ranks on any machine can use."""
    from rankscope_ingest.network.connections import advertised

    scheme = "http" if service_tls(settings) is None else "https"
    return f"{scheme}://{advertised(settings.service, port)}"


def _ranks_tls(settings: ServiceConfig) -> ClientTls | None:
    """Return the TLS settings with which Prometheus scrapes ranks; the service polls ranks with the same settings."""
    names = ("ca_file", "cert_file", "key_file", "server_name")
    given = {name: getattr(settings.service, name) for name in names}
    return ClientTls(**given) if any(given.values()) else None


def _tls(client_tls: ClientTls | None) -> Tls | None:
    """Return TLS settings of the service in the form of the Prometheus configuration, with absolute paths."""
    if client_tls is None:
        return None
    files = (client_tls.ca_file, client_tls.cert_file, client_tls.key_file or client_tls.cert_file)
    ca_file, cert_file, key_file = (name and str(Path(name).expanduser().absolute()) for name in files)
    return Tls(ca_file=ca_file, cert_file=cert_file, key_file=key_file, server_name=client_tls.server_name)


def _notification_lines(options: UpOptions, count: int) -> list[str]:
    """Return one line for each program that sends notifications or serves data, for display at start.

    `count` is the number of addresses that the service notifies. The line of Alertmanager has the type of each address
    that it notifies, the line of Prometheus the data that it serves.
    """
    lines = [f"service notifies       {count} address{'' if count == 1 else 'es'}"] if count else []
    if options.alertmanager is not None:
        kinds = (type(receiver.integrations[0]).__name__.lower() for receiver in options.receivers)
        receivers = ", ".join(f"1 {kind}" for kind in kinds)
        receivers = receivers or ("no other address" if count else "no address: name one with --notify")
        interval, delay = duration(options.scrape_seconds), duration(options.delay_seconds)
        times = f"scrape interval {interval}, notification within {delay}"
        lines.append(f"Alertmanager notifies  {receivers} ({times})")
    if options.prometheus is not None:
        lines.append(
            f'Prometheus serves      the whole store, selected by the job label: rankscope_loss{{job="{RANKS_JOB}"}}'
        )
    return lines


def _redacted(receiver: Webhook | Slack | Mail) -> Webhook | Slack | Mail:
    """Return the receiver of Alertmanager notifications without secrets, for display.

    A mail password is hidden; of a webhook URL, only the scheme and the host remain.
    """
    if isinstance(receiver, Mail):
        return replace(receiver, password=None if receiver.password is None else _HIDDEN)
    parts = urlsplit(receiver.url)
    has_more = parts.path.strip("/") or parts.query or parts.username
    host = parts.netloc.rpartition("@")[2]
    return replace(receiver, url=f"{parts.scheme}://{host}/{_HIDDEN}") if has_more else receiver
