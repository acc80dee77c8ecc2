"""The configuration of a Prometheus that finds the ranks through the service, from values. No file is read or written.

Secrets are named, not repeated: a token stands in a file of its own, whose path goes into the document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.channel import REMOTE_READ_PATH, SERVICE_DISCOVERY_PATH

DEFAULT_SERVICE: Final = "127.0.0.1:9470"
DEFAULT_ALERTMANAGER: Final = "127.0.0.1:9093"
RULE_FILE: Final = "rankscope.rules.yml"

RANKS_JOB: Final = "rankscope"
SERVICE_JOB: Final = "rankscope-service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How a certificate is checked, and which one is shown; None leaves it to the system's authorities."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    insecure_skip_verify: bool = False

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a client shows cert_file and key_file together: give both or neither")

    def document(self) -> dict[str, Any]:
        """Return what stands under `tls_config`."""
        named = {name: getattr(self, name) for name in ("ca_file", "cert_file", "key_file", "server_name")}
        found = {name: value for name, value in named.items() if value is not None}
        return found | ({"insecure_skip_verify": True} if self.insecure_skip_verify else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSettings:
    """What such a Prometheus has to know. Addresses are host:port; `tls` set means https to the service."""

    service: str = DEFAULT_SERVICE
    token_file: str | None = None  # holds the token of service and ranks, and nothing else
    tls: Tls | None = None
    ranks_tls: Tls | None = None  # how the ranks' certificates are checked, where discovery names https ranks
    per_node: bool = False  # one page per host instead of one per rank, for ranks with node_page
    alertmanager: str | None = None
    rule_files: tuple[str, ...] = (RULE_FILE,)
    scrape_seconds: float = 5.0
    evaluation_seconds: float = 5.0
    discovery_seconds: float = 5.0
    with_history: bool = True  # what the service has stored is asked for as well

    def __post_init__(self) -> None:
        for name in ("scrape_seconds", "evaluation_seconds", "discovery_seconds"):
            if not 0.1 <= getattr(self, name) <= 3600:
                raise ValueError(f"{name} is {getattr(self, name):g}: it must lie between 0.1 and 3600")


def prometheus_config(settings: PrometheusSettings | None = None) -> dict[str, Any]:
    """Return the document: ranks through discovery, the service itself, the rules, and where alerts go."""
    chosen = settings or PrometheusSettings()
    document: dict[str, Any] = {
        "global": {
            "scrape_interval": duration(chosen.scrape_seconds),
            # Of one that hangs, the next scrape is due as soon as it was given up.
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
    """Return `seconds` as Prometheus and Alertmanager write durations, which know no fractions."""
    milliseconds = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def _ranks(settings: PrometheusSettings) -> dict[str, Any]:
    scheme = "http" if settings.tls is None else "https"
    discovery = {
        "url": f"{scheme}://{settings.service}{SERVICE_DISCOVERY_PATH}" + ("?per=node" if settings.per_node else ""),
        "refresh_interval": duration(settings.discovery_seconds),
        **_access(settings, settings.tls),
    }
    return {"job_name": RANKS_JOB, "http_sd_configs": [discovery], **_access(settings, settings.ranks_tls)}


def _history(settings: PrometheusSettings) -> dict[str, Any]:
    """Return how the store is asked for what Prometheus has not, or no longer, itself.

    Only by who names the job: for its first hours a Prometheus asks for everything it looks at, and the rules look at
    every tensor at each evaluation. So alerts never wait for history, and history raises none.
    """
    scheme = "http" if settings.tls is None else "https"
    return {
        "url": f"{scheme}://{settings.service}{REMOTE_READ_PATH}",
        "name": SERVICE_JOB,
        "required_matchers": {"job": RANKS_JOB},
        **_access(settings, settings.tls),
    }


def _service(settings: PrometheusSettings) -> dict[str, Any]:
    return {
        "job_name": SERVICE_JOB,
        **({} if settings.tls is None else {"scheme": "https"}),
        "static_configs": [{"targets": [settings.service]}],
        **_access(settings, settings.tls),
    }


def _access(settings: PrometheusSettings, tls: Tls | None) -> dict[str, Any]:
    """Return how a request says who it is, and how it knows whom it speaks with."""
    token = settings.token_file
    shown = {} if token is None else {"authorization": {"type": "Bearer", "credentials_file": token}}
    checked = {} if tls is None else {"tls_config": tls.document()}
    return {**shown, **checked}
