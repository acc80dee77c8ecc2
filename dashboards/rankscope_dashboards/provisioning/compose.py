"""Build a compose file with the service, Prometheus, Alertmanager and Grafana, and the Dockerfile of the service.

The containers reach each other by the names of their services. Ports of Prometheus, Alertmanager and Grafana are open
on the host only; ranks on other hosts reach the port of the service, which requires a token.
"""

from __future__ import annotations

from typing import Any, Final

from rankscope_contract import __version__
from rankscope_contract.rules.anomaly import DEFAULT_RULES
from rankscope_contract.wire.channel import HEALTH_PATH
from rankscope_dashboards.deploy.alertmanager import AlertmanagerSettings, alertmanager_config
from rankscope_dashboards.deploy.prometheus import RULE_FILE, PrometheusSettings, as_yaml, prometheus_config
from rankscope_dashboards.provisioning.datasources import DASHBOARDS_PATH, board_provider, data_sources

PYTHON_IMAGE: Final = "python:3.12.11-slim-bookworm"
PROMETHEUS_IMAGE: Final = "prom/prometheus:v2.53.4"
ALERTMANAGER_IMAGE: Final = "prom/alertmanager:v0.28.1"
GRAFANA_IMAGE: Final = "grafana/grafana:12.2.0"

SERVICE_PORT, PROMETHEUS_PORT, ALERTMANAGER_PORT, GRAFANA_PORT = 9470, 9090, 9093, 3000
SERVICE_USER: Final = "10001:10001"
NOBODY: Final = "65534:65534"
"""User of the images of Prometheus and Alertmanager: the owner of their data folders."""

GRAFANA_USER: Final = "472:0"
TOKEN_FILE: Final = "/run/secrets/rankscope_token"  # noqa: S105 - the path of a file
PASSWORD_FILE: Final = "/run/secrets/grafana_password"  # noqa: S105 - the path of a file
SERVICE_CONFIG: Final = "/etc/rankscope/rankscope.toml"

_PROVISIONING: Final = "/etc/grafana/provisioning"
_HEALTH: Final = (  # without the proxy of the environment, which cannot reach this address
    "import urllib.request as r; r.build_opener(r.ProxyHandler({}))"
    f".open('http://127.0.0.1:{SERVICE_PORT}{HEALTH_PATH}', timeout=4)"
)

_DOCKERFILE: Final = f"""\
# The image of the ingest service. The build folder contains the wheel of Rankscope:
#   pip wheel --no-deps --wheel-dir compose CHECKOUT
FROM {PYTHON_IMAGE}
COPY rankscope-*.whl /tmp/
RUN pip install --no-cache-dir "$(ls /tmp/rankscope-*.whl)[service,cli]" \\
 && rm /tmp/rankscope-*.whl \\
 && mkdir /data && chown {SERVICE_USER} /data
USER {SERVICE_USER}
WORKDIR /data
VOLUME /data
EXPOSE {SERVICE_PORT}
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "{_HEALTH}"]
ENTRYPOINT ["rankscope"]
CMD ["serve", "{SERVICE_CONFIG}", "--quiet"]
"""

_SERVICE_TOML: Final = f"""\
[service]
listen = "0.0.0.0:{SERVICE_PORT}"
token_file = "{TOKEN_FILE}"
# Networks of the ranks: private networks. The service polls only ranks in these networks.
allowed_networks = ["127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"]

[store]
path = "/data/history"

[notify]
mode = "alertmanager"
"""


def compose_files() -> dict[str, str]:
    """Return the text of each file for the compose file, by its path in the tree, without headers."""
    prometheus = PrometheusSettings(
        service=f"rankscope:{SERVICE_PORT}",
        token_file=TOKEN_FILE,
        alertmanager=f"alertmanager:{ALERTMANAGER_PORT}",
    )
    documents = {
        "compose.yaml": compose_file(),
        "compose/prometheus.yml": prometheus_config(prometheus),
        "compose/alertmanager.yml": alertmanager_config(AlertmanagerSettings(rules=DEFAULT_RULES)),
        "compose/datasources.yaml": data_sources(prometheus, url=f"http://prometheus:{PROMETHEUS_PORT}"),
        "compose/dashboards.yaml": board_provider(),
    }
    texts = {name: as_yaml(document) for name, document in documents.items()}
    return texts | {"compose/Dockerfile": _DOCKERFILE, "compose/rankscope.toml": _SERVICE_TOML}


def compose_file() -> dict[str, Any]:
    """Return the content of `compose.yaml`. Its secrets come from the environment of the compose command."""
    return {
        "name": "rankscope",
        "services": {
            "rankscope": _rankscope(),
            "prometheus": _prometheus(),
            "alertmanager": _alertmanager(),
            "grafana": _grafana(),
        },
        "volumes": {"history": {}, "prometheus": {}, "alertmanager": {}, "grafana": {}},
        "secrets": {
            "rankscope_token": {"environment": "RANKSCOPE_TOKEN"},
            "grafana_password": {"environment": "GRAFANA_PASSWORD"},
        },
    }


def _rankscope() -> dict[str, Any]:
    return {
        "image": f"rankscope:{__version__}",
        "build": {"context": "./compose"},
        **_limits(SERVICE_USER),
        "command": ["serve", SERVICE_CONFIG, "--quiet"],
        "ports": [f"{SERVICE_PORT}:{SERVICE_PORT}"],
        "volumes": [f"./compose/rankscope.toml:{SERVICE_CONFIG}:ro", "history:/data"],
        "secrets": ["rankscope_token"],
        "healthcheck": _health("python", "-c", _HEALTH),
    }


def _prometheus() -> dict[str, Any]:
    return {
        "image": PROMETHEUS_IMAGE,
        **_limits(NOBODY),
        "command": [
            "--config.file=/etc/prometheus/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
            "--storage.tsdb.retention.time=15d",
            f"--web.listen-address=0.0.0.0:{PROMETHEUS_PORT}",
        ],
        "ports": [_local_port(PROMETHEUS_PORT)],
        "volumes": [
            "./compose/prometheus.yml:/etc/prometheus/prometheus.yml:ro",
            f"./prometheus/{RULE_FILE}:/etc/prometheus/{RULE_FILE}:ro",
            "prometheus:/prometheus",
        ],
        "secrets": ["rankscope_token"],
        "healthcheck": _fetches(f"http://127.0.0.1:{PROMETHEUS_PORT}/-/ready"),
    }


def _alertmanager() -> dict[str, Any]:
    return {
        "image": ALERTMANAGER_IMAGE,
        **_limits(NOBODY),
        "command": [
            "--config.file=/etc/alertmanager/alertmanager.yml",
            "--storage.path=/alertmanager",
            f"--web.listen-address=0.0.0.0:{ALERTMANAGER_PORT}",
            "--cluster.listen-address=",  # empty: no cluster; the default listens on all addresses
        ],
        "ports": [_local_port(ALERTMANAGER_PORT)],
        "volumes": [
            "./compose/alertmanager.yml:/etc/alertmanager/alertmanager.yml:ro",
            "alertmanager:/alertmanager",
        ],
        "healthcheck": _fetches(f"http://127.0.0.1:{ALERTMANAGER_PORT}/-/ready"),
    }


def _grafana() -> dict[str, Any]:
    return {
        "image": GRAFANA_IMAGE,
        **_limits(GRAFANA_USER),
        "environment": {
            "GF_SECURITY_ADMIN_PASSWORD__FILE": PASSWORD_FILE,
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        },
        "ports": [_local_port(GRAFANA_PORT)],
        "volumes": [
            f"./compose/datasources.yaml:{_PROVISIONING}/datasources/rankscope.yaml:ro",
            f"./compose/dashboards.yaml:{_PROVISIONING}/dashboards/rankscope.yaml:ro",
            f"./dashboards/rankscope:{DASHBOARDS_PATH}:ro",
            f"./alerting/rules.yaml:{_PROVISIONING}/alerting/rankscope.yaml:ro",
            "grafana:/var/lib/grafana",
        ],
        "secrets": ["grafana_password"],
        "healthcheck": _fetches(f"http://127.0.0.1:{GRAFANA_PORT}/api/health"),
    }


def _limits(user: str) -> dict[str, Any]:
    """Return the keys that restrict a container: a user other than root, and no rights beyond those of this user."""
    return {
        "user": user,
        "restart": "unless-stopped",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _local_port(port: int) -> str:
    return f"127.0.0.1:{port}:{port}"


def _fetches(url: str) -> dict[str, Any]:
    return _health("wget", "-q", "-O", "/dev/null", url)


def _health(*command: str) -> dict[str, Any]:
    return {"test": ["CMD", *command], "interval": "10s", "timeout": "5s", "retries": 3, "start_period": "60s"}
