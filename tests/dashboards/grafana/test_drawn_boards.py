"""Boards that a real Grafana server draws in Chromium: of a run that trains, and of a run that ended months ago.

With RANKSCOPE_GRAFANA_PICTURES, pictures of all boards are written to this folder.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from tests.dashboards.grafana.conftest import complete, needs_server, real_server
from tests.dashboards.grafana.watched import Watched, watched
from tests.end_to_end import past
from tests.programs import start_script
from tests.view.browser import Browser, browser

from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.deploy.prometheus import HISTORY_SOURCE, LIVE_SOURCE

pytestmark = [needs_server, pytest.mark.timeout(600)]
TRAINING = Path(__file__).parents[2] / "end_to_end" / "troubled_training.py"
TRAINING_STEPS = 100
DEFAULT_WITHIN_SECONDS = 60.0
AGO_SECONDS = 60 * 86_400
THEN = int(time.time()) // 60 * 60 - AGO_SECONDS
VIEWS = {
    "live": {"var-datasource": LIVE_SOURCE, "var-run": "watched", "from": "now-5m", "to": "now", "refresh": ""},
    "ended": {
        "var-datasource": HISTORY_SOURCE,
        "var-run": past.RUN,
        "from": (THEN - 60) * 1000,
        "to": (THEN + past.STEPS * past.SECONDS_PER_STEP + 60) * 1000,
    },
}
BOARDS = {board["uid"]: board for board in complete().boards}
NO_REASON = {"No data", "No data in response", "Data is missing a number field", "Data is missing a time field"}
"""Texts of Grafana for a panel without data."""

LOADED_WITHIN_SECONDS = 150.0
"""Longest time for all queries of a board, on a machine with other work."""

WIDTH, HEIGHT = 1600, 4200
LOADED = """(() => {
    const panels = document.querySelectorAll("section.panel-container");
    return panels.length > 0 && !document.querySelector(".panel-loading, .panel-loading__spinner") && panels.length;
})()"""
PANELS = """[...document.querySelectorAll("section.panel-container")].map((panel) => ({
    title: panel.querySelector("h2, h6")?.innerText ?? "",
    text: panel.innerText,
    drawn: panel.querySelectorAll("canvas, [role=cell], .flot-text").length,
    cut: [...panel.querySelectorAll("*")]
        .filter((one) => one.childElementCount === 0 && one.innerText?.trim())
        .filter((one) => getComputedStyle(one).overflowX !== "visible" && one.scrollWidth > one.clientWidth + 1)
        .map((one) => one.innerText),
}))"""


@pytest.fixture(scope="module")
def all_programs(require_server, tmp_path_factory) -> Iterator[Watched]:
    """Yield all programs. The default policy notifies the receiver."""
    folder = tmp_path_factory.mktemp("drawn")
    past.put(folder / "history", THEN)
    servers = (require_server("prometheus"), require_server("prometheus-alertmanager"))
    with watched(real_server(folder, complete()), folder, servers, add_route=False) as found:
        yield found


@pytest.fixture(scope="module")
def training(all_programs: Watched) -> Iterator[Watched]:
    """Yield all programs while two ranks train."""
    folder = all_programs.programs.folder
    for sign in ("go", "seen-21", "seen-31", "seen-40"):
        (folder / sign).touch()
    ranks = []
    for rank in ("0", "1"):
        settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "RANKSCOPE_RUN": "watched"}
        settings["RANKSCOPE_INGEST_URL"] = all_programs.programs.urls["service"]
        ranks.append(start_script(TRAINING, folder, log=folder / f"rank{rank}.log", **settings))
    step = f'rankscope_step{{run="watched"}} > {TRAINING_STEPS}'
    all_programs.wait_for(lambda: all_programs.query(step))
    yield all_programs
    for process in ranks:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def chromium(training: Watched, require_server, tmp_path_factory) -> Iterator[Browser]:
    with browser(require_server("chromium"), tmp_path_factory.mktemp("chromium")) as found:
        credentials = training.grafana.credentials
        if isinstance(credentials, str):
            login = f"Bearer {credentials}"
        else:
            login = f"Basic {base64.b64encode(':'.join(credentials).encode()).decode()}"
        found.call("Network.enable")
        found.call("Network.setExtraHTTPHeaders", headers={"Authorization": login})
        yield found


def test_nan_of_one_step_reaches_the_default_policy(all_programs: Watched):
    """Grafana's default policy waits 30 s before it notifies a new group.

    No other fault may come before this one: the group of an alert has all runs, and waits 5 minutes after a message.
    """
    all_programs.start("single")

    assert all_programs.seconds_until_message("single", "nan", "AnomalyNan") < DEFAULT_WITHIN_SECONDS


def panels_of(board: dict) -> list[str]:
    """Return the titles of the panels that are shown when a board is opened."""
    folded = [panel for row in board["panels"] if row.get("collapsed") for panel in row["panels"]]
    return [panel["title"] for panel in all_panels(board) if panel["type"] != "row" and panel not in folded]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("uid", BOARDS)
def test_board_is_drawn(training: Watched, chromium: Browser, uid: str, view: str, theme: str):
    titles = panels_of(BOARDS[uid])
    address = urlencode(VIEWS[view] | {"orgId": 1, "theme": theme})
    chromium.problems.clear()
    chromium.look(WIDTH, HEIGHT, theme)

    chromium.open(f"{training.grafana.url}/d/{uid}?{address}&kiosk")
    chromium.wait(f"({LOADED}) >= {len(titles)}", LOADED_WITHIN_SECONDS)
    chromium.drain(1.0)
    chromium.wait(f"({LOADED}) >= {len(titles)}", LOADED_WITHIN_SECONDS)
    panels = chromium.run(PANELS)
    save_picture(chromium, f"{uid}-{view}-{theme}")

    assert sorted(titles) == sorted(panel["title"] for panel in panels)
    assert [] == [panel for panel in panels if NO_REASON & {*panel["text"].splitlines()}]
    assert [] == [panel["title"] for panel in panels if not panel["drawn"] and panel["text"] == panel["title"]]
    assert [] == [panel for panel in panels if panel["cut"]]
    assert [] == [problem for problem in chromium.problems if '"level": "error"' in problem]


def save_picture(chromium: Browser, name: str) -> None:
    """Write a picture of the page to the folder for pictures, if it is set."""
    if folder := os.environ.get("RANKSCOPE_GRAFANA_PICTURES"):
        Path(folder, f"{name}.png").write_bytes(chromium.picture())
