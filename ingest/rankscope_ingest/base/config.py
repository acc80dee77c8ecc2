"""Sections, keys and limits of the service's TOML file.

`config_file` reads the file and produces the error texts.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from rankscope_contract.model.identity import check_run_name
from rankscope_contract.wire.channel import DEFAULT_MAX_BYTES
from rankscope_contract.wire.tls import TlsServer, WebConfigError
from rankscope_ingest.base.addresses import address_of
from rankscope_ingest.base.proxies import ENVIRONMENT, NO_PROXY, is_proxy
from rankscope_ingest.base.tls import read_service_web_config
from rankscope_storage.base.errors import NotAStoreError
from rankscope_storage.base.location import located
from rankscope_storage.base.rule_names import SLOW_FACTOR
from rankscope_storage.base.shards import Shard
from rankscope_storage.maintenance.retention_policy import Retention

_BASE_PATH: Final = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=1, allow_inf_nan=False)]
Rows = Annotated[int, Field(ge=1, le=1000)]
RunName = Annotated[str, AfterValidator(check_run_name)]
Days = Annotated[float, Field(gt=0, le=36_500, allow_inf_nan=False)]
LabelName = Annotated[str, Field(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")]


def _unmapped(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Return an IPv4-mapped IPv6 network as an IPv4 network, and any other network unchanged.

    Addresses are compared in IPv4 form.
    """
    mapped = ipaddress.IPv6Network("::ffff:0:0/96")
    if not isinstance(network, ipaddress.IPv6Network) or not network.subnet_of(mapped):
        return network
    return ipaddress.IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))


Network = Annotated[ipaddress.IPv4Network | ipaddress.IPv6Network, AfterValidator(_unmapped)]


def _http_url(example: str) -> AfterValidator:
    """Return a validator for HTTP and HTTPS URLs.

    The validator raises ValueError for other values. `example` is a valid URL that the error text shows.
    """

    def check(url: str) -> str:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise ValueError(f'"{url}" is not an address such as {example}: {error}') from error
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f'"{url}" is not an address such as {example}')
        return url

    return AfterValidator(check)


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of an address such as `host:9470` or `[::1]:9470`.

    Raises ValueError for other values; the text shows the expected form.
    """
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
    """Return whether `host` is a loopback address or `localhost`.

    Other host names are not resolved; the result for them is False.
    """
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSection(_Section):
    """Configuration section [service]: listening address, authentication, TLS and allowed networks."""

    listen: str = "127.0.0.1:9470"
    advertise: str | None = None
    token: SecretStr | None = None
    token_file: str | None = None
    web_config: str | None = None
    ca_file: str | None = None  # this key and the next three: TLS of connections to ranks
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    allowed_networks: tuple[Network, ...] = (
        ipaddress.ip_network("127.0.0.0/8"),
        ipaddress.ip_network("::1/128"),
    )
    allowed_hosts: tuple[str, ...] = ()  # further host names for which requests without a token are accepted
    base_path: str = ""
    insecure: bool = False

    @field_validator("base_path")
    @classmethod
    def _check_base_path(cls, base_path: str) -> str:
        if base_path and not _BASE_PATH.fullmatch(base_path):
            raise ValueError(f'"{base_path}" is not a path prefix: write it as /rankscope, without a slash at the end')
        return base_path

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str) -> str:
        split_address(listen)
        return listen

    @field_validator("advertise")
    @classmethod
    def _check_advertise(cls, advertise: str | None) -> str | None:
        if advertise is not None and split_address(advertise)[0] in {"0.0.0.0", "::"}:  # noqa: S104 - refused here
            raise ValueError(
                f'"{advertise}" is not an address that clients can connect to: use a name or address of this machine'
            )
        return advertise

    @model_validator(mode="before")
    @classmethod
    def _read_token(cls, section: Any) -> Any:
        """Return `section` with the content of the file `token_file` as `token`.

        A section without `token_file` is returned unchanged. Raises ValueError if `token` and `token_file` are both
        set, or if the file cannot be read.
        """
        if not isinstance(section, dict) or not isinstance(section.get("token_file"), str):
            return section
        if section.get("token") is not None:
            raise ValueError("token and token_file are both set: remove one of them")
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
            raise ValueError("the token is empty: set a token or remove the key")
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("the token must be printable ASCII without spaces, because it is sent in an HTTP header")
        return token

    @property
    def web(self) -> TlsServer | None:
        """Return the parsed web configuration file that `web_config` names, or None if this key is not set."""
        return None if self.web_config is None else read_service_web_config(Path(self.web_config))

    @property
    def is_guarded(self) -> bool:
        """Return whether only processes on this machine, or clients with a token or certificate, can send requests."""
        web = self.web
        is_local = is_loopback(split_address(self.listen)[0])
        return is_local or self.token is not None or (web is not None and web.demands_client_certificates)

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        try:
            is_guarded = self.is_guarded
        except WebConfigError as error:
            raise ValueError(str(error)) from error
        if not (is_guarded or self.insecure):
            raise ValueError(
                f'listen = "{self.listen}" can be reached from other machines: set token '
                "(or RANKSCOPE_TOKEN in the environment), or insecure = true to allow requests without a token"
            )
        return self


def _location(path: str) -> str:
    try:
        located(path)
    except NotAStoreError as error:
        raise ValueError(str(error)) from error
    return path


def _shard(text: str) -> str:
    return str(Shard.parse(text))


class StoreSection(_Section):
    """Configuration section [store]: the location of the store, and the shard whose runs this service owns."""

    path: Annotated[str, AfterValidator(_location)]
    shard: Annotated[str, AfterValidator(_shard)] = "0/1"
    mantissa_bits: Annotated[int, Field(ge=4, le=22)] | None = None

    @property
    def owned(self) -> Shard:
        """Return the shard whose runs this service owns."""
        return Shard.parse(self.shard)


class RetentionSection(_Section):
    """Configuration section [retention]: number of days for which rows are kept.

    The age of a row is measured by its time column. If no number of days is set for a dataset, its rows are never
    deleted.
    """

    raw_days: Days | None = None
    scalars_days: Days | None = None
    samples_days: Days | None = None
    rollup_days: Days | None = None
    every_seconds: Seconds = 3600.0

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        _ = self.policy  # raises ValueError if rollups would already be too old when they are created
        return self

    @property
    def policy(self) -> Retention:
        """Return this section as the retention policy that the storage package uses."""
        return Retention(**self.model_dump(exclude={"every_seconds"}))


class IngestSection(_Section):
    """Configuration section [ingest]: intervals and limits for polling ranks and for committing rows."""

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
                "polling would stop before a batch is full; raise max_pending_rows"
            )
        return self


class RunsSection(_Section):
    """Configuration section [runs]: heartbeat interval and timeouts.

    After a timeout, a rank is considered dead or a run is considered stalled.
    """

    heartbeat_seconds: Seconds = 5.0
    refused_after_seconds: Seconds = 10.0  # the rank's port is closed, and no heartbeat has arrived since
    failed_after_seconds: Seconds = 25.0  # neither a heartbeat nor a response, for any reason
    stalled_after_seconds: Seconds = 300.0
    stalled_in_phase_after_seconds: Seconds = 1800.0  # while a rank reports a phase other than training

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.failed_after_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"failed_after_seconds ({self.failed_after_seconds:g}) must be at least twice heartbeat_seconds "
                f"({self.heartbeat_seconds:g}), or one late heartbeat would set a run to failed"
            )
        return self


class SpoolSection(_Section):
    """Configuration section [spool]: folders with spools of ranks that this service can read."""

    folders: tuple[str, ...] = ()
    scan_seconds: Seconds = 2.0


class NotifySection(_Section):
    """Configuration section [notify]: the URLs to which notifications are sent, and the program that sends them.

    The service sends notifications only in mode `embedded`. In the other modes, Alertmanager or Grafana sends them.
    """

    mode: Literal["embedded", "alertmanager", "grafana", "off"] = "embedded"
    urls: tuple[SecretStr, ...] = ()
    group_wait_seconds: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 1.0
    quiet_steps: Annotated[int, Field(gt=0)] = 20
    repeat_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 4 * 3600.0
    timeout_seconds: Seconds = 10.0
    proxy: SecretStr = SecretStr(ENVIRONMENT)

    @field_validator("proxy")
    @classmethod
    def _check_proxy(cls, proxy: SecretStr) -> SecretStr:
        text = proxy.get_secret_value()
        if text not in {ENVIRONMENT, NO_PROXY} and not is_proxy(text):
            raise ValueError('must be "environment", "none", or the address of a proxy, such as http://proxy:3128')
        return proxy


class StaticTarget(_Section):
    """Configuration section [[targets]]: a rank that does not register and is polled at a fixed address."""

    url: Annotated[str, _http_url("http://127.0.0.1:9400"), AfterValidator(lambda url: url.rstrip("/"))]
    run: RunName
    rank: Annotated[int, Field(ge=0)] = 0
    world_size: Annotated[int, Field(ge=1)] = 1
    launch_id: str = "static"  # all its processes belong to one attempt, unless this key changes


class RemoteReadSection(_Section):
    """Configuration section [remote_read]: limits of a remote-read response, and Prometheus' external labels.

    Prometheus adds its external labels to each remote-read query; they must be repeated in this section.
    """

    max_series: Annotated[int, Field(gt=0)] = 20_000
    max_samples: Annotated[int, Field(gt=0)] = 5_000_000
    external_labels: dict[LabelName, str] = {}

    @field_validator("external_labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        if taken := sorted({"run", "rank", "job", "instance"} & labels.keys()):
            raise ValueError(
                f"{', '.join(taken)}: series of the service have this label, so it cannot be external: remove it"
            )
        return labels


class RemoteWriteSection(_Section):
    """Configuration section [remote_write]: limits for samples that Prometheus sends."""

    hold_seconds: Annotated[float, Field(ge=0, le=15, allow_inf_nan=False)] = 2.0
    max_pending_samples: Annotated[int, Field(gt=0)] = 1_000_000
    max_bytes: Annotated[int, Field(ge=65_536, le=1 << 28)] = 1 << 25


class _Scraping(_Section):
    """Configuration keys that [[exporters]] and [[exporter_lists]] have in common."""

    every_seconds: Seconds = 15.0
    timeout_seconds: Seconds = 10.0
    max_bytes: Annotated[int, Field(ge=1024, le=1 << 28)] = 1 << 24
    labels: dict[LabelName, str] = {}


class ExporterSection(_Scraping):
    """Configuration section [[exporters]]: the URL of the metrics of another program, such as node_exporter."""

    url: Annotated[str, _http_url("http://127.0.0.1:9100/metrics")]
    name: str | None = None


class ExporterListSection(_Scraping):
    """Configuration section [[exporter_lists]]: exporters in Prometheus' service discovery format.

    The list is in files or at a URL.
    """

    file: str | None = None
    url: Annotated[str, _http_url("http://127.0.0.1:8080/targets")] | None = None
    refresh_seconds: Seconds = 10.0

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.file is None) == (self.url is None):
            raise ValueError('set either file = "targets/*.json" or url = "http://…", not both')
        return self


class WatchSection(_Section):
    """Configuration section [[watch]]: a log that is followed, and the thresholds for the state of its training.

    `rankscope watch` uses the same section for the logs on its command line.
    """

    log: Annotated[str, Field(min_length=1)]
    run: RunName | None = None
    format: str = "auto"
    loss: str | None = None
    pattern: tuple[str, ...] = ()
    known_hosts: str | None = None
    poll_seconds: Seconds = 10.0
    timeout_seconds: Seconds = 20.0
    max_backoff_seconds: Seconds = 60.0
    settle_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    stalled_factor: Factor = 3.0
    stalled_after_seconds: Seconds = 60.0
    stalled_in_phase_after_seconds: Seconds = 1800.0
    slow_factor: Factor = SLOW_FACTOR
    warm_up_rows: Rows = 10
    recovered_rows: Rows = 5
    failed_after_seconds: Seconds = 30.0
    unreadable_after_seconds: Seconds = 120.0
    message_rows: Rows = 10
    store_seconds: Seconds = 300.0


class ServiceConfig(_Section):
    """The complete configuration of the service."""

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
    watch: tuple[WatchSection, ...] = ()

    @property
    def token(self) -> str | None:
        """Return the bearer token that ranks and the service send to each other, or None if no token is set."""
        token = self.service.token
        return None if token is None else token.get_secret_value()
