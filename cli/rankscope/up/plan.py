"""From the options of `rankscope up` to what is started: configuration read, programs found, ports chosen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from rankscope.base.errors import USAGE, CommandError
from rankscope.base.http_client import Trust
from rankscope.base.service_settings import load_settings, service_trust
from rankscope.up import ports as port_choice
from rankscope.up.executables import ALERTMANAGER, PROMETHEUS, required
from rankscope.up.notify_addresses import receivers
from rankscope.up.ports import Ports
from rankscope.up.programs import LOOPBACK, SERVICE, TOKEN_FILE, Piece, ServiceWish, Wish, files, pace, pieces
from rankscope.up.state_dir import Folder
from rankscope_dashboards.alertmanager_config import Mail, Webhook
from rankscope_dashboards.prometheus_config import RANKS_JOB, Tls, duration

if TYPE_CHECKING:
    from rankscope_ingest.config import ServiceConfig

EVENT_SECONDS: Final = 120.0
KEEP_SECONDS: Final = 60.0
_LEFT_OUT: Final = "left out"
_HIDDEN: Final = "<secret>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The options of the command."""

    config: Path | None = None
    store: Path | None = None
    listen: str | None = None
    notify: tuple[str, ...] = ()
    ports: Ports = Ports.FIXED
    state: Path | None = None
    scrape_seconds: float = 5.0
    retention: str = "15d"
    with_prometheus: bool = True
    with_alertmanager: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Everything that is known before the first program is started."""

    wish: Wish
    folder: Folder
    files: dict[str, str]
    pieces: Sequence[Piece]
    notes: tuple[str, ...]  # what is not as one would expect
    facts: tuple[str, ...]  # who is told, and how fast
    left_out: dict[str, str]
    advertised: str  # where ranks find the service
    trust: Trust | None  # how we check its certificate

    @property
    def token(self) -> str | None:
        """Return the token that service and ranks share."""
        return self.wish.service.token

    @property
    def token_file(self) -> Path | None:
        """Return where the token stands for others to read; None without one."""
        return None if self.token is None else self.folder.config(TOKEN_FILE)

    @property
    def environment(self) -> dict[str, str]:
        """Return what the programs are told beside their commands: the token's file, wherever the token came from."""
        return {} if self.token_file is None else {"RANKSCOPE_TOKEN_FILE": str(self.token_file)}

    def shown(self) -> dict[str, str]:
        """Return the generated files as they would be without secrets: what is quoted in YAML is hard to find there."""
        service = replace(self.wish.service, token=None if self.token is None else _HIDDEN)
        told = [replace(one, ways=tuple(map(_without_secrets, one.ways))) for one in self.wish.receivers]
        return files(replace(self.wish, service=service, receivers=told), self.folder)

    def prepare(self) -> None:
        """Write the files, and remember what the next start and `rankscope doctor` want to know."""
        self.folder.write(self.files)
        addresses = {piece.name: piece.url for piece in self.pieces}
        self.folder.remember({"ports": dict(self.wish.ports), "urls": addresses})


def arranged(choices: Choices) -> Arrangement:
    """Return what to start. Raises CommandError, with the remedy, for whatever cannot be."""
    _check_retention(choices.retention)
    settings = load_settings(choices.config, choices.store, choices.listen, None)
    folder = Folder(choices.state) if choices.state else Folder.beside(settings.store.path)
    addresses = (*_addresses_of(settings), *choices.notify)
    if addresses and not choices.with_alertmanager:
        raise CommandError(
            'without Alertmanager nobody reads --notify and mode = "alertmanager": '
            'give the service [notify] mode = "embedded" with urls, or let Alertmanager run',
            code=USAGE,
        )
    wanted = {PROMETHEUS: "--without-prometheus"} if choices.with_prometheus else {}
    programs = required(wanted | ({ALERTMANAGER: "--without-alertmanager"} if choices.with_alertmanager else {}))
    chosen, notes = _ports(choices, settings, folder)
    wish = Wish(
        service=_service_wish(choices, settings),
        ports=chosen,
        prometheus=programs.get(PROMETHEUS),
        alertmanager=programs.get(ALERTMANAGER),
        receivers=receivers(addresses),
        scrape_seconds=choices.scrape_seconds,
        event_window=duration(max(EVENT_SECONDS, 4 * choices.scrape_seconds)),  # a rate needs several looks
        keep_firing_for=duration(max(KEEP_SECONDS, 2 * choices.scrape_seconds)),
        retention=choices.retention,
    )
    return Arrangement(
        wish=wish,
        folder=folder,
        files=files(wish, folder),
        pieces=pieces(wish, folder),
        notes=tuple(notes),
        facts=tuple(_facts(wish, settings)),
        advertised=_advertised(settings, chosen[SERVICE]),
        trust=service_trust(settings),
        left_out={name: _LEFT_OUT for name in ("prometheus", "alertmanager") if getattr(wish, name) is None},
    )


def _addresses_of(settings: ServiceConfig) -> list[str]:
    """Return whom the configuration wants Alertmanager to tell."""
    notify = settings.notify
    return [url.get_secret_value() for url in notify.urls] if notify.mode == "alertmanager" else []


def _ports(choices: Choices, settings: ServiceConfig, folder: Folder) -> tuple[dict[str, int], list[str]]:
    from rankscope_ingest.config import split_address

    host, port = split_address(settings.service.listen)
    known = port_choice.remembered(folder.notes().get("ports"))
    names = [name for name in ("prometheus", "alertmanager") if getattr(choices, f"with_{name}")]
    if _is_explicit(choices) and port:
        if not port_choice.is_free(port, host):
            raise CommandError(f"{settings.service.listen} is taken{_by_whom(port)}: give another --listen")
        # The service's own port is settled; the others must keep clear of it.
        chosen, notes = _chosen(names, choices.ports, known, avoid=port)
        return {SERVICE: port, **chosen}, notes
    return _chosen([SERVICE, *names], Ports.FREE if _is_explicit(choices) else choices.ports, known)


def _by_whom(port: int) -> str:
    listener = port_choice.listeners().get(port)
    return f" by {listener}" if listener else ""


def _check_retention(text: str) -> None:
    if not re.fullmatch(r"([1-9][0-9]*(ms|[smhdwy]))+", text):
        raise CommandError(f"--retention {text}: write numbers with units, such as 15d, 12h or 1y6w", code=USAGE)


def _is_explicit(choices: Choices) -> bool:
    """Return whether somebody said where the service is to listen."""
    return choices.listen is not None or choices.config is not None


def _chosen(
    names: Sequence[str], ports: Ports, former: dict[str, int], avoid: int | None = None
) -> tuple[dict[str, int], list[str]]:
    def is_free(port: int) -> bool:
        return port != avoid and port_choice.is_free(port, LOOPBACK)

    return port_choice.choose(names, ports, former, is_free=is_free, any_free=port_choice.any_free)


def _service_wish(choices: Choices, settings: ServiceConfig) -> ServiceWish:
    from rankscope_ingest.config import split_address

    return ServiceWish(
        config=None if choices.config is None else choices.config.absolute(),
        store=settings.store.path,
        host=split_address(settings.service.listen)[0],
        token=settings.token,
        tls=_tls(service_trust(settings)),
        ranks_tls=_tls(_ranks_trust(settings)),
        drain_seconds=settings.ingest.drain_seconds,
    )


def _advertised(settings: ServiceConfig, port: int) -> str:
    """Return the address that ranks are given, also those on other machines."""
    from rankscope_ingest.web.listening import advertised

    scheme = "http" if service_trust(settings) is None else "https"
    return f"{scheme}://{advertised(settings.service, port)}"


def _ranks_trust(settings: ServiceConfig) -> Trust | None:
    """Return how Prometheus checks the ranks' certificates: as the service does."""
    section = settings.service
    files = (section.ca_file, section.cert_file, section.key_file, section.server_name)
    ca_file, cert_file, key_file, server_name = files
    trust = Trust(ca_file=ca_file, cert_file=cert_file, key_file=key_file, server_name=server_name)
    return trust if any(files) else None


def _tls(trust: Trust | None) -> Tls | None:
    """Return the same for Prometheus."""
    if trust is None:
        return None
    return Tls(
        ca_file=_absolute(trust.ca_file),
        cert_file=_absolute(trust.cert_file),
        key_file=_absolute(trust.key_file or trust.cert_file),
        server_name=trust.server_name,
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _facts(wish: Wish, settings: ServiceConfig) -> list[str]:
    """Return who is told by whom: the two ways are independent, and each has addresses of its own."""
    mode, count = settings.notify.mode, len(settings.notify.urls)
    told = f"{count} addresses" if count != 1 else "1 address"
    service = f"{told}, by itself" if mode == "embedded" and count else f'nobody ([notify] mode = "{mode}")'
    lines = [f"the service tells    {service}"]
    if wish.alertmanager is not None:
        ways = ", ".join(_words(receiver.ways[0]) for receiver in wish.receivers)
        lines.append(f"Alertmanager tells   {ways or 'nobody: name somebody with --notify'} ({pace(wish)})")
    if wish.prometheus is not None:
        lines.append(
            f'Prometheus shows     the whole store too, where the job is named: rankscope_loss{{job="{RANKS_JOB}"}}'
        )
    return lines


def _without_secrets(way: Webhook | Mail) -> Webhook | Mail:
    """Return the way with its password hidden, or whatever of an address may be one."""
    if isinstance(way, Mail):
        return replace(way, password=None if way.password is None else _HIDDEN)
    parts = urlsplit(way.url)
    has_more = parts.path.strip("/") or parts.query or parts.username
    host = parts.netloc.rpartition("@")[2]
    return replace(way, url=f"{parts.scheme}://{host}/{_HIDDEN}") if has_more else way


def _words(way: object) -> str:
    return f"1 {type(way).__name__.lower()}"
