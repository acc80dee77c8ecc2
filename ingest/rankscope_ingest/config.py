"""The service's one TOML file: its sections, their meaning and limits. Loading and error texts are in `config_file`."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from rankscope_contract.channel import DEFAULT_MAX_BYTES

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `host:port` or `[v6]:port`; raises ValueError with the form that is wanted."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f'"{address}" is not host:port, such as 127.0.0.1:9470 or [::1]:9470')
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host` names this machine alone; a name other than localhost is not looked up and counts as no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSection(_Section):
    """[service]: where the service listens and with whom it speaks."""

    listen: str = "127.0.0.1:9470"
    token: SecretStr | None = None
    allowed_networks: tuple[Network, ...] = (
        ipaddress.ip_network("127.0.0.0/8"),
        ipaddress.ip_network("::1/128"),
    )
    insecure: bool = False

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str) -> str:
        split_address(listen)
        return listen

    @field_validator("token")
    @classmethod
    def _check_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not token.get_secret_value():
            raise ValueError("is empty: leave the key out or give a token")
        return token

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        host, _ = split_address(self.listen)
        if not is_loopback(host) and self.token is None and not self.insecure:
            raise ValueError(
                f'listen = "{self.listen}" can be reached from other machines: set token, '
                "or insecure = true if that is what you want"
            )
        return self


class StoreSection(_Section):
    """[store]: the table that receives everything."""

    path: str
    shard: Annotated[str, Field(pattern=r"^\d+/[1-9]\d*$")] = "0/1"


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


class ServiceConfig(_Section):
    """The whole file."""

    service: ServiceSection = ServiceSection()
    store: StoreSection
    ingest: IngestSection = IngestSection()
    runs: RunsSection = RunsSection()
    notify: NotifySection = NotifySection()
    targets: tuple[StaticTarget, ...] = ()

    @property
    def token(self) -> str | None:
        """Return the bearer token that both sides show, or None."""
        token = self.service.token
        return None if token is None else token.get_secret_value()
