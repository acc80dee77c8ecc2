"""Add links to the pages of runs to a generated board, and names that all boards share.

This module works on JSON and does not import Grafana's SDK. The committed boards have no such links, because the
address of the pages is known only when the boards are deployed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

TAG: Final = "rankscope"
"""Tag of all boards. Each board has a menu with links to all boards that have the tag."""

PAGES: Final = "pages"
"""Name of the hidden variable that contains the address of the pages of runs."""

_RUN: Final = "/runs/${run:percentencode}"

BOARD_PAGES: Final = {
    "rankscope-runs": "/",
    "rankscope-run-overview": _RUN,
    "rankscope-ranks": f"{_RUN}/ranks",
    "rankscope-tensors": f"{_RUN}/tensors?kind=${{kind:percentencode}}",
    "rankscope-incidents": f"{_RUN}/incidents",
    "rankscope-pipeline": "/service",
}
"""Path of the page that shows the same view as the panels of a board, by the uid of the board."""

PANEL_PAGES: Final = {
    "Ranks up": f"{_RUN}/ranks",
    "Anomaly count": f"{_RUN}/incidents",
    "Skipped steps": f"{_RUN}/events",
    "Anomalies": f"{_RUN}/events",
    "Latest events": f"{_RUN}/events",
}
"""Path of the page of a panel, by its title, if it differs from the page of its board."""


def all_panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each panel and row of a board, including the panels of folded rows."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def with_pages(board: dict[str, Any], pages_url: str) -> dict[str, Any]:
    """Return a copy of `board` whose panels link to the pages of runs at `pages_url`, such as `https://host:9470`.

    Without an address, the copy is equal to `board`. Raises ValueError for an address without a scheme.
    """
    linked = copy.deepcopy(board)
    if not pages_url:
        return linked
    if not pages_url.startswith(("http://", "https://")):
        raise ValueError(f"the address of the pages is {pages_url!r}: write it as https://host:port/path")
    address = pages_url.rstrip("/")
    (variable,) = (one for one in linked["templating"]["list"] if one["name"] == PAGES)
    variable["query"] = address
    variable["current"] = {"text": address, "value": address, "selected": True}
    for panel in all_panels(linked):
        path = PANEL_PAGES.get(panel["title"], BOARD_PAGES[linked["uid"]])
        if panel["type"] != "row":
            panel["links"] = [{"title": "Page of this view", "url": f"${{{PAGES}}}{path}", "targetBlank": True}]
    return linked
