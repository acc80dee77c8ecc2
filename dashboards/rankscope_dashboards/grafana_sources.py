"""What tells a Grafana server, by files, where its data and its boards are.

Grafana replaces `${NAME}` in these files by variables of *its own* environment; an unset one becomes nothing.
"""

from __future__ import annotations

from typing import Any, Final

from rankscope_dashboards.layout import LIVE_SOURCE
from rankscope_dashboards.prometheus_config import PrometheusSettings, duration

PROMETHEUS_URL: Final = "${RANKSCOPE_PROMETHEUS_URL}"
DASHBOARDS_DIR: Final = "${RANKSCOPE_DASHBOARDS_DIR}"

BOARDS_FOLDER: Final = "Training"
ORGANISATION: Final = 1


def data_sources(prometheus: PrometheusSettings) -> dict[str, Any]:
    """Return `datasources/rankscope.yaml`: the Prometheus that scrapes the ranks.

    It is not made the default, which would take that place from another one in a Grafana that has more to show.
    """
    source = {
        "name": LIVE_SOURCE,
        "uid": LIVE_SOURCE,  # alert rules name it: they know no variables
        "type": "prometheus",
        "access": "proxy",
        "orgId": ORGANISATION,
        "url": PROMETHEUS_URL,
        "isDefault": False,
        "editable": False,
        "jsonData": {
            "httpMethod": "POST",
            # The pace of scrapes: a shorter one would leave rate() over `$__rate_interval` with a single sample.
            "timeInterval": duration(prometheus.scrape_seconds),
            "prometheusType": "Prometheus",
            # Lists of runs and ranks come from series, which reach what the store has: values of labels do not.
            "seriesEndpoint": True,
            "manageAlerts": False,
        },
    }
    return {"apiVersion": 1, "datasources": [source]}


def board_provider() -> dict[str, Any]:
    """Return `dashboards/rankscope.yaml`: the folder on disk that holds the boards. The files are the truth."""
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
