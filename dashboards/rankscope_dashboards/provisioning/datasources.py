"""Build the provisioning files for Grafana's data sources and for the folder of boards.

The files contain addresses and paths, not `${NAME}`: Grafana replaces a variable that is not set by an empty text. With
an empty path, Grafana would read all JSON files in its working directory as boards, and delete those of Rankscope.
"""

from __future__ import annotations

from typing import Any, Final

from rankscope_dashboards.deploy.prometheus import (
    DEFAULT_PROMETHEUS,
    HISTORY_SOURCE,
    LIVE_SOURCE,
    PrometheusSettings,
    duration,
)

PROMETHEUS_URL: Final = f"http://{DEFAULT_PROMETHEUS}"
DASHBOARDS_PATH: Final = "/etc/grafana/provisioning/dashboards/rankscope"
"""Folder of the board files. It is below the provisioning folder of Grafana's packages and container images."""

BOARDS_FOLDER: Final = "Training"
ORGANISATION: Final = 1


def data_sources(prometheus: PrometheusSettings, *, url: str = PROMETHEUS_URL, history_url: str = "") -> dict[str, Any]:
    """Return the content of `datasources/rankscope.yaml`: the data sources for live values and for history.

    `url` is the address of the Prometheus that scrapes the ranks. `history_url` is the address of a Prometheus that
    reads the store by remote read; the default is `url`. No entry is the default data source, because a Grafana server
    may already have another default.
    """
    sources = ((LIVE_SOURCE, url), (HISTORY_SOURCE, history_url or url))
    return {"apiVersion": 1, "datasources": [_source(name, address, prometheus) for name, address in sources]}


def _source(name: str, url: str, prometheus: PrometheusSettings) -> dict[str, Any]:
    return {
        "name": name,
        "uid": name,
        "type": "prometheus",
        "access": "proxy",
        "orgId": ORGANISATION,
        "url": url,
        "isDefault": False,
        "editable": False,
        "jsonData": {
            "httpMethod": "POST",
            # The scrape interval. With a lower value, rate() over `$__rate_interval` could see only one sample.
            "timeInterval": duration(prometheus.scrape_seconds),
            "prometheusType": "Prometheus",
            # Get lists of runs and ranks from series: remote read returns series from the store, but no label values.
            # With `prometheusVersion`, Grafana 9.4 would ask for label values.
            "seriesEndpoint": True,
            "manageAlerts": False,
        },
    }


def board_provider(path: str = DASHBOARDS_PATH) -> dict[str, Any]:
    """Return the content of `dashboards/rankscope.yaml`: the folder of the board files, which is at `path`.

    Users cannot save changes of these boards in the Grafana UI.
    """
    provider = {
        "name": "rankscope",
        "orgId": ORGANISATION,
        "folder": BOARDS_FOLDER,
        "folderUid": "rankscope",
        "type": "file",
        "disableDeletion": False,
        "updateIntervalSeconds": 30,
        "allowUiUpdates": False,
        "options": {"path": path, "foldersFromFilesStructure": False},
    }
    return {"apiVersion": 1, "providers": [provider]}
