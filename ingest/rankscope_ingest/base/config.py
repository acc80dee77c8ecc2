"""The service's one TOML file: its sections, their meaning and limits. Loading and error texts are in `config_file`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from rankscope_contract.protocol.channel import DEFAULT_MAX_BYTES
from rankscope_contract.security.web_config import WebConfig, WebConfigError
from rankscope_ingest.base.tls import read_service_web_config
from rankscope_storage.base.errors import is_url
from rankscope_storage.maintenance.retention_policy import Retention

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Days = Annotated[float, Field(gt=0, le=36_500, allow_inf_nan=False)]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `host:port` or `[v6]:port`; raises ValueError with the form that is wanted."""
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if (
        not colon
        or not host
        or (":" in host) != is_bracketed
        or set("[]") & set(host)
        or not port.isdecimal()
        or int(port) > 65535
    ):
        raise ValueError(f'"{address}" is not host:port, such as 127.0.0.1:9470 or [::1]:9470')
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host` names this machine alone; a name other than localhost is not looked up and counts as no."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSection(_Section):
    """[service]: where the service listens and with whom it speaks."""

    listen: str = "127.0.0.1:9470"
    advertise: str | None = None
    token: SecretStr | None = None
    token_file: str | None = None
    web_config: str | None = None
    ca_file: str | None = None  # these four: how ranks are dialled
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    allowed_networks: tuple[Network, ...] = (
        ipaddress.ip_network("127.0.0.0/8"),
        ipaddress.ip_network("::1/128"),
    )
    allowed_hosts: tuple[str, ...] = ()  # names beside its own under which it answers without a token
    insecure: bool = False

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str) -> str:
        split_address(listen)
        return listen

    @field_validator("advertise")
    @classmethod
    def _check_advertise(cls, advertise: str | None) -> str | None:
        if advertise is not None and split_address(advertise)[0] in {"0.0.0.0", "::"}:  # noqa: S104 - refused here
            raise ValueError(f'"{advertise}" is no address to dial: give a name or address of this machine')
        return advertise

    @model_validator(mode="before")
    @classmethod
    def _read_token(cls, section: Any) -> Any:
        """Put the token of a file where a token in the configuration itself would stand."""
        if not isinstance(section, dict) or not isinstance(section.get("token_file"), str):
            return section
        if section.get("token") is not None:
            raise ValueError("token and token_file are both set: leave one of them out")
        path = Path(section["token_file"]).expanduser()
        try:
            return {**section, "token": path.read_text(encoding="utf-8").strip()}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"token_file {path}: {getattr(error, 'strerror', None) or error}") from error

    @field_validator("token")
    @classmethod
    def _check_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is None:
            return None
        text = token.get_secret_value()
        if not text:
            raise ValueError("is empty: leave the key out or give a token")
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("must be printable ASCII without spaces: it travels in an HTTP header")
        return token

    @field_validator("allowed_networks")
    @classmethod
    def _plain_networks(cls, networks: tuple[Network, ...]) -> tuple[Network, ...]:
        """Return IPv4 networks that were written as IPv6 ones as what they are: addresses are compared as such."""
        return tuple(map(_unmapped, networks))

    @property
    def web(self) -> WebConfig | None:
        """Return what `web_config` says, or None without one."""
        return None if self.web_config is None else read_service_web_config(Path(self.web_config))

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        host, _ = split_address(self.listen)
        try:
            web = self.web
        except WebConfigError as error:
            raise ValueError(str(error)) from error
        is_guarded = self.token is not None or self.insecure or (web is not None and web.demands_identity)
        if not is_loopback(host) and not is_guarded:
            raise ValueError(
                f'listen = "{self.listen}" can be reached from other machines: set token '
                "(or RANKSCOPE_TOKEN in the environment), or insecure = true if that is what you want"
            )
        return self


def _unmapped(network: Network) -> Network:
    mapped = ipaddress.IPv6Network("::ffff:0:0/96")
    if not isinstance(network, ipaddress.IPv6Network) or not network.subnet_of(mapped):
        return network
    return ipaddress.IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))


def _local(path: str) -> str:
    if is_url(path):
        raise ValueError("a store is a local folder, not a URL; name a folder")
    return path


class StoreSection(_Section):
    """[store]: the table that receives everything."""

    path: Annotated[str, AfterValidator(_local)]
    shard: Annotated[str, Field(pattern=r"^\d+/[1-9]\d*$")] = "0/1"
    mantissa_bits: Annotated[int, Field(ge=4, le=22)] | None = None


class RetentionSection(_Section):
    """[retention]: days that rows are kept, by the clock in them; what has no days stays for ever."""

    raw_days: Days | None = None
    scalars_days: Days | None = None
    samples_days: Days | None = None
    rollup_days: Days | None = None
    every_seconds: Seconds = 3600.0

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        _ = self.policy  # refuses rollups that would be too old when they are made
        return self

    @property
    def policy(self) -> Retention:
        """Return the same as the store takes it."""
        return Retention(
            raw_days=self.raw_days,
            scalars_days=self.scalars_days,
            samples_days=self.samples_days,
            rollup_days=self.rollup_days,
        )


class IngestSection(_Section):
    """[ingest]: how ranks are polled, and when rows are committed."""

    poll_seconds: Seconds = 2.0
    timeout_seconds: Seconds = 10.0
    max_backoff_seconds: Seconds = 30.0
    flush_after_seconds: Seconds = 10.0
    flush_rows: Annotated[int, Field(gt=0)] = 1_000_000
    max_pending_rows: Annotated[int, Field(gt=0)] = 4_000_000
    max_bytes: Annotated[int, Field(ge=65_536, le=1 << 30)] = DEFAULT_MAX_BYTES
    drain_seconds: Seconds = 20.0

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.max_pending_rows < self.flush_rows:
            raise ValueError(
                f"max_pending_rows ({self.max_pending_rows}) is below flush_rows ({self.flush_rows}): "
                "pulling would stop before a batch is full; raise max_pending_rows"
            )
        return self


class RunsSection(_Section):
    """[runs]: how long silence may last before it means something."""

    heartbeat_seconds: Seconds = 5.0
    refused_after_seconds: Seconds = 10.0  # nobody listens on the rank's port any more, and no heartbeat came
    failed_after_seconds: Seconds = 25.0  # neither a heartbeat nor an answer, for whatever reason
    stalled_after_seconds: Seconds = 300.0
    stalled_in_phase_after_seconds: Seconds = 1800.0  # while a phase other than training is announced

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.failed_after_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"failed_after_seconds ({self.failed_after_seconds:g}) must be at least twice heartbeat_seconds "
                f"({self.heartbeat_seconds:g}), or one late heartbeat would fail a run"
            )
        return self


class SpoolSection(_Section):
    """[spool]: folders in which ranks keep their records, as far as this service can read them."""

    folders: tuple[str, ...] = ()
    scan_seconds: Seconds = 2.0


class NotifySection(_Section):
    """[notify]: who tells people. Only `embedded` makes the service send; the others leave it to Prometheus' side."""

    mode: Literal["embedded", "alertmanager", "grafana", "off"] = "embedded"
    urls: tuple[SecretStr, ...] = ()
    group_wait_seconds: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 1.0
    quiet_steps: Annotated[int, Field(gt=0)] = 20
    timeout_seconds: Seconds = 10.0


class StaticTarget(_Section):
    """[[targets]]: a rank that does not register, read at a fixed address."""

    url: str
    run: str
    rank: Annotated[int, Field(ge=0)] = 0
    world_size: Annotated[int, Field(ge=1)] = 1
    launch_id: str = "static"  # all its lives are one attempt unless the file says otherwise

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f'"{url}" is not an address such as http://127.0.0.1:9400')
        return url.rstrip("/")


LabelName = Annotated[str, Field(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")]


class RemoteReadSection(_Section):
    """[remote_read]: how much of its history the store shows Prometheus at once."""

    max_series: Annotated[int, Field(gt=0)] = 20_000
    max_samples: Annotated[int, Field(gt=0)] = 5_000_000
    external_labels: dict[LabelName, str] = {}

    @field_validator("external_labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        if taken := sorted({"run", "rank", "job", "instance"} & labels.keys()):
            raise ValueError(f"{', '.join(taken)} is a label of series themselves, and cannot be one outside of them")
        return labels


class RemoteWriteSection(_Section):
    """[remote_write]: samples that Prometheus pushes."""

    hold_seconds: Annotated[float, Field(ge=0, le=15, allow_inf_nan=False)] = 2.0
    max_pending_samples: Annotated[int, Field(gt=0)] = 1_000_000
    max_bytes: Annotated[int, Field(ge=65_536, le=1 << 28)] = 1 << 25


class _Scraping(_Section):
    """How exporters that are not ours are read."""

    every_seconds: Seconds = 15.0
    timeout_seconds: Seconds = 10.0
    max_bytes: Annotated[int, Field(ge=1024, le=1 << 28)] = 1 << 24
    labels: dict[LabelName, str] = {}


class ExporterSection(_Scraping):
    """[[exporters]]: one page of an exporter that is not ours."""

    url: str
    name: str | None = None

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return _checked_http(url, "http://127.0.0.1:9100/metrics")


class ExporterListSection(_Scraping):
    """[[exporter_lists]]: lists of such exporters as Prometheus takes them, in files or at a URL."""

    file: str | None = None
    url: str | None = None
    refresh_seconds: Seconds = 10.0

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else _checked_http(url, "http://127.0.0.1:8080/targets")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.file is None) == (self.url is None):
            raise ValueError('give either file = "targets/*.json" or url = "http://…"')
        return self


def _checked_http(url: str, example: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f'"{url}" is not an address such as {example}: {error}') from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f'"{url}" is not an address such as {example}')
    return url


class ServiceConfig(_Section):
    """The whole file."""

    service: ServiceSection = ServiceSection()
    store: StoreSection
    retention: RetentionSection = RetentionSection()
    ingest: IngestSection = IngestSection()
    runs: RunsSection = RunsSection()
    spool: SpoolSection = SpoolSection()
    notify: NotifySection = NotifySection()
    remote_read: RemoteReadSection = RemoteReadSection()
    remote_write: RemoteWriteSection = RemoteWriteSection()
    targets: tuple[StaticTarget, ...] = ()
    exporters: tuple[ExporterSection, ...] = ()
    exporter_lists: tuple[ExporterListSection, ...] = ()

    @property
    def token(self) -> str | None:
        """Return the bearer token that both sides show, or None."""
        token = self.service.token
        return None if token is None else token.get_secret_value()
