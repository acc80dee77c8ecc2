"""Build the configuration of a Prometheus that gets the addresses of the ranks from the service.

This module reads and writes no files. The configuration contains no secret, only the path of the token's file.
`as_yaml` writes it as YAML that is easy to read, and easy to compare with diff.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import yaml

from rankscope_contract.wire.channel import REMOTE_READ_PATH, SERVICE_DISCOVERY_PATH


def as_yaml(document: dict[str, Any]) -> str:
    """Return `document` as YAML text. Keys remain in their order, and texts with several lines become block scalars."""
    return yaml.dump(document, sort_keys=False, width=10_000, Dumper=_Dumper, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes texts with several lines as block scalars, and that never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - signature of the base class
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


LIVE_SOURCE: Final = "rankscope-live"
HISTORY_SOURCE: Final = "rankscope-history"
"""Uids and names of the data sources in Grafana.

Boards select the live data source by default, and alert rules always use it, because rules cannot use variables."""

DEFAULT_PROMETHEUS: Final = "127.0.0.1:9090"
DEFAULT_SERVICE: Final = "127.0.0.1:9470"
DEFAULT_ALERTMANAGER: Final = "127.0.0.1:9093"
RULE_FILE: Final = "rankscope.rules.yml"

RANKS_JOB: Final = "rankscope"
SERVICE_JOB: Final = "rankscope-service"
"""Values of the label `job` in scrapes of the ranks and of the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS settings of a scrape: the verification of the server's certificate, and the client certificate to send.

    Without `ca_file`, the certificate authorities of the operating system are used.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    insecure_skip_verify: bool = False

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: set both or neither")

    def document(self) -> dict[str, Any]:
        """Return the value of the key `tls_config` in the Prometheus configuration."""
        named = {name: getattr(self, name) for name in ("ca_file", "cert_file", "key_file", "server_name")}
        found = {name: value for name, value in named.items() if value is not None}
        return found | ({"insecure_skip_verify": True} if self.insecure_skip_verify else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSettings:
    """Settings of the Prometheus configuration. Addresses have the form host:port.

    - `token_file`: path of a file that contains only the token of the service and the ranks.
    - `tls`: TLS settings for the service. If they are set, Prometheus uses HTTPS for the service.
    - `ranks_tls`: TLS settings for ranks, used if the service discovery lists ranks with the scheme https.
    - `with_history`: also query the store of the service by remote read.
    """

    service: str = DEFAULT_SERVICE
    token_file: str | None = None
    tls: Tls | None = None
    ranks_tls: Tls | None = None
    alertmanager: str | None = None
    rule_files: tuple[str, ...] = (RULE_FILE,)
    scrape_seconds: float = 5.0
    evaluation_seconds: float = 5.0
    discovery_seconds: float = 5.0
    with_history: bool = True

    def __post_init__(self) -> None:
        for name in ("scrape_seconds", "evaluation_seconds", "discovery_seconds"):
            if not 0.1 <= getattr(self, name) <= 3600:
                raise ValueError(f"{name} is {getattr(self, name):g}: set a value between 0.1 and 3600")


def prometheus_config(settings: PrometheusSettings | None = None) -> dict[str, Any]:
    """Return the content of `prometheus.yml`: scrapes of ranks and service, rule files, Alertmanager, remote read."""
    chosen = settings or PrometheusSettings()
    document: dict[str, Any] = {
        "global": {
            "scrape_interval": duration(chosen.scrape_seconds),
            # Prometheus requires a timeout of at most the interval. If both are equal, the next scrape of a target that
            # hangs starts directly after the timeout.
            "scrape_timeout": duration(min(chosen.scrape_seconds, 10.0)),
            "evaluation_interval": duration(chosen.evaluation_seconds),
        },
        "rule_files": list(chosen.rule_files),
    }
    if chosen.alertmanager is not None:
        document["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [chosen.alertmanager]}]}]}
    document["scrape_configs"] = [_ranks(chosen), _service(chosen)]
    return document | ({"remote_read": [_history(chosen)]} if chosen.with_history else {})


def duration(seconds: float) -> str:
    """Return `seconds` as text in the form of Prometheus and Alertmanager: a whole number of h, m, s or ms."""
    milliseconds = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def seconds(text: str) -> float:
    """Return the number of seconds in `text`, a duration in the form of Prometheus such as 2m or 1m30s."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdwy])", text))


def _ranks(settings: PrometheusSettings) -> dict[str, Any]:
    scheme = "http" if settings.tls is None else "https"
    discovery = {
        "url": f"{scheme}://{settings.service}{SERVICE_DISCOVERY_PATH}",
        "refresh_interval": duration(settings.discovery_seconds),
        **_authentication(settings, settings.tls),
    }
    return {"job_name": RANKS_JOB, "http_sd_configs": [discovery], **_authentication(settings, settings.ranks_tls)}


def _history(settings: PrometheusSettings) -> dict[str, Any]:
    """Return the `remote_read` entry for samples that Prometheus never had or has deleted.

    The entry applies only to selectors that contain the job of the ranks. Without this limit, a Prometheus would read
    from remote storage for all queries during the first hours after its start. Alert rules query every tensor at each
    evaluation. Their selectors do not contain the job. Alerts therefore never wait for the store, and stored samples
    never make an alert fire.
    """
    scheme = "http" if settings.tls is None else "https"
    return {
        "url": f"{scheme}://{settings.service}{REMOTE_READ_PATH}",
        "name": SERVICE_JOB,
        "required_matchers": {"job": RANKS_JOB},
        **_authentication(settings, settings.tls),
    }


def _service(settings: PrometheusSettings) -> dict[str, Any]:
    return {
        "job_name": SERVICE_JOB,
        **({} if settings.tls is None else {"scheme": "https"}),
        "static_configs": [{"targets": [settings.service]}],
        **_authentication(settings, settings.tls),
    }


def _authentication(settings: PrometheusSettings, tls: Tls | None) -> dict[str, Any]:
    """Return the keys for authentication and TLS of an entry in the Prometheus configuration."""
    token = settings.token_file
    authorization = {} if token is None else {"authorization": {"type": "Bearer", "credentials_file": token}}
    tls_config = {} if tls is None else {"tls_config": tls.document()}
    return {**authorization, **tls_config}
