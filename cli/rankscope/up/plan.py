"""Create the start plan of `rankscope up` from its options: read the configuration, find executables, select ports.

The module also parses the addresses of `--notify` into Alertmanager receivers: webhooks, Slack and mail. The service
notifies all other addresses, such as those that only Apprise supports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from rankscope.access.service import ClientTls, load_settings, service_tls
from rankscope.shell.errors import USAGE, CommandError
from rankscope.up import machine
from rankscope.up.machine import ALERTMANAGER, PROMETHEUS, PortChoice, StateDir, find_required
from rankscope.up.programs import SERVICE, TOKEN_FILE, Program, ServiceOptions, UpOptions, files, programs
from rankscope_dashboards.deploy.alertmanager import Mail, Receiver, Slack, Webhook
from rankscope_dashboards.deploy.prometheus import RANKS_JOB, Tls, duration

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


if TYPE_CHECKING:
    from rankscope_ingest.base.config import ServiceConfig

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

    def save_addresses(self) -> None:
        """Save the ports and URLs of the started programs for the next start and for `rankscope doctor`."""
        addresses = {program.name: program.url for program in self.programs}
        self.folder.save_notes({"ports": dict(self.options.ports), "urls": addresses})


def make_plan(
    *,
    config: Path | None = None,
    store: Path | None = None,
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
    mode, urls = settings.notify.mode, [url.get_secret_value() for url in settings.notify.urls]
    addresses = [*(urls if mode == "alertmanager" else ()), *notify]
    made, others = receivers(addresses) if with_alertmanager else ([], addresses)
    if others and mode != "embedded":
        raise CommandError(
            f'{len(others)} addresses are for the service, but [notify] mode is "{mode}": set mode = "embedded", or '
            "name addresses that Alertmanager supports: https://…, slack+https://… or smtp://…",
            code=USAGE,
        )
    notified = [*(urls if mode == "embedded" else ()), *others]
    wanted = {PROMETHEUS: "--without-prometheus"} if with_prometheus else {}
    executables = find_required(wanted | ({ALERTMANAGER: "--without-alertmanager"} if with_alertmanager else {}))
    # The listen address of an option or of the file is kept.
    is_explicit = listen is not None or config is not None
    names = [one for one, path in (("prometheus", with_prometheus), ("alertmanager", with_alertmanager)) if path]
    chosen, notes = _ports(names, ports, settings, folder, is_explicit=is_explicit)
    options = UpOptions(
        service=_service_options(config, settings),
        ports=chosen,
        prometheus=executables.get(PROMETHEUS),
        alertmanager=executables.get(ALERTMANAGER),
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
        notify=tuple(notified) if others else (),
        notification_lines=tuple(_notification_lines(options, len(notified))),
        advertised=_advertised_url(settings, chosen[SERVICE]),
        client_tls=service_tls(settings),
        left_out=tuple(name for name in ("prometheus", "alertmanager") if name not in chosen),
    )


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
    return Tls(
        ca_file=_absolute(client_tls.ca_file),
        cert_file=_absolute(client_tls.cert_file),
        key_file=_absolute(client_tls.key_file or client_tls.cert_file),
        server_name=client_tls.server_name,
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


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
