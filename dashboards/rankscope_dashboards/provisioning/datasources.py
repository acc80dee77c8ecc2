"""Build the provisioning files for Grafana's data source and for the folder of boards.

In these files, Grafana replaces `${NAME}` by an environment variable of the Grafana server. A variable that is not set
becomes an empty text.
"""

from __future__ import annotations

from typing import Any, Final

from rankscope_dashboards.boards.elements.names import LIVE_SOURCE
from rankscope_dashboards.deploy.prometheus import PrometheusSettings, duration

PROMETHEUS_URL: Final = "${RANKSCOPE_PROMETHEUS_URL}"
DASHBOARDS_DIR: Final = "${RANKSCOPE_DASHBOARDS_DIR}"

BOARDS_FOLDER: Final = "Training"
ORGANISATION: Final = 1


def data_sources(prometheus: PrometheusSettings) -> dict[str, Any]:
    """Return the content of `datasources/rankscope.yaml`: the Prometheus that scrapes the ranks.

    The entry is not the default data source, because a Grafana server may already have another default.
    """
    source = {
        "name": LIVE_SOURCE,
        "uid": LIVE_SOURCE,  # alert rules refer to it, because they cannot use variables
        "type": "prometheus",
        "access": "proxy",
        "orgId": ORGANISATION,
        "url": PROMETHEUS_URL,
        "isDefault": False,
        "editable": False,
        "jsonData": {
            "httpMethod": "POST",
            # The scrape interval. With a lower value, rate() over `$__rate_interval` could see only one sample.
            "timeInterval": duration(prometheus.scrape_seconds),
            "prometheusType": "Prometheus",
            # Get lists of runs and ranks from series: remote read returns series from the store, but no label values.
            "seriesEndpoint": True,
            "manageAlerts": False,
        },
    }
    return {"apiVersion": 1, "datasources": [source]}


def board_provider() -> dict[str, Any]:
    """Return the content of `dashboards/rankscope.yaml`: the folder of the board files.

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
        "options": {"path": DASHBOARDS_DIR, "foldersFromFilesStructure": False},
    }
    return {"apiVersion": 1, "providers": [provider]}
