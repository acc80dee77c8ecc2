"""Boards that a real Grafana server draws in Chromium: every panel, for runs of each kind, at several time ranges."""
# With RANKSCOPE_GRAFANA_PICTURES, pictures of all boards and the measured times are written to this folder.

import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.dashboards.grafana.conftest import complete, needs_server, real_server
from tests.dashboards.grafana.drawn_page import LOADED, MARKS, OPEN_ROWS, PANELS, Requests, mark
from tests.dashboards.grafana.watched import Watched, watched
from tests.end_to_end import past
from tests.programs import Started, start_script

from rankscope.up.machine import free_port
from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.deploy.prometheus import HISTORY_SOURCE, LIVE_SOURCE
from rankscope_storage.connection import connect

pytestmark = [needs_server, pytest.mark.timeout(900)]
ONE_RANK = Path(__file__).with_name("drawn_training.py")
TWO_RANKS = Path(__file__).parents[2] / "end_to_end" / "slow_rank_training.py"
TROUBLED = Path(__file__).parents[2] / "end_to_end" / "troubled_training.py"
CHECKPOINT_STEP, NAN_STEP, LAST_STEP = 10, 40, 60
ENDED_STEPS = 1300  # The run lasts longer than the distance of two points at a range of 24 h

ENDLESS = 100_000
LATE_SECONDS = 0.3  # The last rank waits this long for its data in each step

DEFAULT_WITHIN_SECONDS = 60.0
SETTLED_SECONDS = 130.0  # At a range of 24 h, points of a chart and marks are a minute apart

LATER_SECONDS = 480
"""A view ends at the latest this long after all faults, so that each range contains them on a slow machine too."""

AGO_SECONDS = 60 * 86_400
THEN = int(time.time()) // 60 * 60 - AGO_SECONDS
RUNS = {"live": "watched-alone", "simulated": "watched", "past": past.RUN}
RUNS |= {kind: f"watched-{kind}" for kind in ("slow", "nan", "failed", "ended")}
RANGES = {"15m": 900, "6h": 21_600, "24h": 86_400}
BOARDS = {board["uid"]: board for board in complete().boards}
NO_REASON = {"No data", "No data in response", "Data is missing a number field", "Data is missing a time field"}
"""Texts of Grafana for a panel without data."""

NO_INCIDENT = "No data of an incident in the time range"
PROBABLE = "No data. Probable reason: "
NO_FIRING = f"{PROBABLE}No counter of firings here: none fired, or the run has ended"
NO_RANK = f"{PROBABLE}No rank of this run is scraped: it has ended"
NO_LOSS = f"{PROBABLE}The script logs no loss"
FALSE = {  # Texts of our panels that contradict the store for a run. The range contains all of its faults.
    "live": {NO_INCIDENT, NO_FIRING, NO_RANK},
    "simulated": {
        NO_INCIDENT,
        NO_FIRING,
        NO_RANK,
        f"{PROBABLE}No GPU on this machine, or no rankscope[nvidia]",
        f"{PROBABLE}No GPU memory: PyTorch runs on the CPU",
    },
    "slow": {NO_INCIDENT, NO_RANK, f"{PROBABLE}The framework of this run does not show when a rank waits for others"},
    "nan": {NO_INCIDENT, NO_FIRING, NO_RANK, NO_LOSS},
    "failed": {NO_INCIDENT},
    "ended": {NO_INCIDENT, NO_LOSS},
    "past": {NO_INCIDENT, NO_LOSS},
}

CLAIMS = re.compile(r"No (?:rule|tensor|rank|anomaly|incident) (?:fired|holds|failed|deviates)\b.*")
"""Claims that nothing happened, which a panel without data cannot know. Each of these runs had a fault."""

SHOWN = {kind: {"State": "running"} for kind in ("simulated", "slow", "nan")}
SHOWN |= {kind: {"State": "completed"} for kind in ("ended", "past")}
SHOWN |= {"failed": {"State": "failed", "Failed ranks": "RuntimeError"}}
SHOWN["slow"]["Slow ranks"] = "rank 1"
SHOWN["nan"]["Latest loss"] = "NaN"  # A text that a panel must show for a run

ENDED = {"failed", "ended", "past"}  # Runs whose last step must be shown

NOT_GREEN = {"nan": {"Latest loss"}, "failed": {"State", "Ranks up"}}  # Tiles that must not be green for a run

LOADED_WITHIN_SECONDS = 150.0
"""Longest time for all queries of a board, on a machine with other work. On two idle cores it is at most 5 s."""

QUERY_WITHIN_SECONDS = 10.0
"""Longest time for one query alone, on a machine with other work. On two idle cores it is at most 1 s."""

WIDTH, HEIGHT = 1440, 4200


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
    """Yield all programs after the faults of all runs, while the live ones train."""
    folder, started = all_programs.programs.folder, list[Started]()

    def start(kind: str, script: Path, *arguments: object, ranks: int = 1) -> list[Started]:
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        group |= {"RANKSCOPE_RUN": RUNS[kind], "RANKSCOPE_INGEST_URL": all_programs.programs.urls["service"]}
        made = [
            start_script(script, *arguments, log=folder / f"{kind}{rank}.log", RANK=rank, LOCAL_RANK=rank, **group)
            for rank in map(str, range(ranks))
        ]
        started.extend(made)
        return made

    try:
        for sign in ("go", "seen-21", "seen-31", "seen-40"):
            (folder / sign).touch()
        start("simulated", TROUBLED, folder, ranks=2)
        start("slow", TWO_RANKS, ENDLESS, LATE_SECONDS, 0, 0, ranks=2)
        (ended,) = start("ended", ONE_RANK, ENDED_STEPS, CHECKPOINT_STEP, NAN_STEP)
        (first,) = start("nan", ONE_RANK, LAST_STEP, CHECKPOINT_STEP, ENDLESS)
        all_programs.start(*{RUNS["live"], RUNS["failed"]} - all_programs.ranks.keys())
        all_programs.send(RUNS["live"], "nan")
        all_programs.send(RUNS["failed"], "nan-raise")
        assert 0 == first.wait(120)
        time.sleep(5.0)
        start("nan", ONE_RANK, ENDLESS, -1, NAN_STEP)
        for kind in ("simulated", "slow", "nan"):
            all_programs.wait_for_result(f'rankscope_step{{run="{RUNS[kind]}"}} > {LAST_STEP}')
        all_programs.wait_for_result(f'rankscope_run_state{{run="{RUNS["failed"]}",state="failed"}} == 1')
        time.sleep(SETTLED_SECONDS)
        assert 0 == ended.wait(120)
        all_programs.wait_for_result(f'rankscope_run_state{{run="{RUNS["ended"]}",state="completed"}} == 1')
        yield all_programs
    finally:
        for process in started:
            process.kill()
            process.wait(10)


@pytest.fixture(scope="module")
def chromium(training: Watched, require_server, tmp_path_factory) -> Iterator[Requests]:
    with closing(Requests(require_server("chromium"), tmp_path_factory.mktemp("chromium"))) as found:
        found.log_in(training.grafana.credentials)
        yield found


@pytest.fixture(scope="module")
def ready(training: Watched) -> int:
    """Return the time after all faults, in seconds since the epoch."""
    return int(time.time())


@pytest.fixture(scope="module")
def times() -> Iterator[list[tuple[Any, ...]]]:
    """Yield a table of measured seconds, which is printed at the end: of a board, of a query in it and of one alone."""
    rows: list[tuple[Any, ...]] = [("board, run and range", "board", "query", "query alone", "slowest query alone")]
    yield rows
    table = "\n".join("\t".join(map(str, row)) for row in rows)
    print(table)
    if folder := os.environ.get("RANKSCOPE_GRAFANA_PICTURES"):
        Path(folder, "times.tsv").write_text(f"{table}\n", encoding="utf-8")


def test_nan_of_one_step_reaches_the_default_policy(all_programs: Watched):
    """Grafana's default policy waits 30 s before it notifies a new group."""
    # No other fault may come before this one: the group of an alert has all runs, and waits 5 minutes after a message.
    all_programs.start("single")

    assert all_programs.seconds_until_message("single", "nan", "AnomalyNan") < DEFAULT_WITHIN_SECONDS


def test_texts_of_this_test_are_texts_of_panels():
    panels = [panel for board in BOARDS.values() for panel in all_panels(board)]
    texts = {panel.get("fieldConfig", {}).get("defaults", {}).get("noValue") for panel in panels}
    titles = {panel["title"] for panel in panels}

    assert set() == set().union(*FALSE.values()) - texts
    assert set() == set().union(*SHOWN.values(), *NOT_GREEN.values()) - titles


def stored(store: Path, run: str, end: int) -> dict[str, int]:
    """Return the numbers of incidents and checkpoints of a run until `end`, and its restarts and last steps."""
    counted = """SELECT
        (SELECT count(DISTINCT (rank, rule, kind, tensor, step)) FROM events
            WHERE run = $run AND type = 'incident' AND details->>'$.state' = 'opened'
                AND epoch(ts) <= $until) AS "Incidents",
        (SELECT count(DISTINCT (attempt, step)) FROM events
            WHERE run = $run AND type = 'phase' AND details->>'$.phase' = 'checkpoint'
                AND epoch(ts) <= $until) AS "Checkpoints",
        (SELECT max(attempt) FROM attempts WHERE run = $run) AS "Restarts",
        (SELECT max(last_step) FROM attempts WHERE run = $run) AS "Step",
        (SELECT coalesce(max(step), -1) FROM events WHERE run = $run AND type = 'exit') AS "Step of the end"
    """
    with connect(store) as connection:
        (found,) = connection.query(counted, {"run": run, "until": end}).to_pylist()
    return dict(found)


def faults_of_page(
    board: dict[str, Any], kind: str, expected: dict[str, int], panels: list[dict[str, Any]]
) -> list[str]:
    """Return the faults of the panels of a board for a run with these last steps."""
    texts = {panel["title"]: panel["text"] for panel in panels}
    shown = SHOWN.get(kind, {})
    if kind in ENDED:  # a scrape can precede the record of the step in which a rank raised
        steps = [str(expected[name]) for name in ("Step", "Step of the end")]
        shown = shown | {"Step": next((step for step in steps if step in texts.get("Step", "")), steps[0])}
    lines = {(title, line) for title, text in texts.items() for line in text.splitlines()}
    wanted = sorted(panel["title"] for panel in all_panels(board) if panel["type"] != "row")
    return [
        *([] if wanted == sorted(texts) else [f"panels: {sorted(texts)}"]),
        *(f"{title}: {line}" for title, line in lines if line in NO_REASON | FALSE[kind] or CLAIMS.search(line)),
        *(f"{one['title']}: empty" for one in panels if not one["drawn"] and one["text"] == one["title"]),
        *(f"{one['title']}: cut {one['cut']}" for one in panels if one["cut"]),
        *(f"{one['title']}: green" for one in panels if one["green"] and one["title"] in NOT_GREEN.get(kind, ())),
        *(
            f"{title}: {texts[title]!r} without {text!r}"
            for title, text in shown.items()
            if title in texts and text not in texts[title].removeprefix(title)
        ),
    ]


def faults_of_marks(board: dict[str, Any], expected: dict[str, int], panels: list[dict[str, Any]]) -> list[str]:
    """Return the charts whose marks are not those of the store."""
    has_marks = {"Restarts", *MARKS.values()} <= {one["name"] for one in board["annotations"]["list"]}
    charts = {panel["title"] for panel in all_panels(board) if panel["type"] == "timeseries"}
    drawn = {
        one["title"]: {name: [*map(mark, one["marks"])].count(name) for name in MARKS.values()}
        for one in panels
        if one["drawn"] and one["title"] in charts
    }
    wanted = {name: expected[name] if has_marks else 0 for name in MARKS.values()}
    return [f"{title}: marks {found}, in the store {wanted}" for title, found in drawn.items() if found != wanted]


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("uid", BOARDS)
@pytest.mark.parametrize("seconds", RANGES.values(), ids=RANGES)
def test_board_is_drawn(training, chromium: Requests, ready: int, times: list[Any], uid: str, seconds: int, kind: str):
    board, theme, name = BOARDS[uid], "dark" if seconds == RANGES["6h"] else "light", f"{uid}-{kind}-{seconds // 60}m"
    ended = THEN + past.STEPS * past.SECONDS_PER_STEP + 60
    end = ended if kind == "past" else min(int(time.time()), ready + LATER_SECONDS)
    view = {"var-datasource": HISTORY_SOURCE if kind == "past" else LIVE_SOURCE, "var-run": RUNS[kind], "refresh": ""}
    view |= {"from": str((end - seconds) * 1000), "to": str(end * 1000)}
    wanted = sum(panel["type"] != "row" for panel in all_panels(board))
    chromium.forget()
    chromium.look(WIDTH, HEIGHT, theme)

    chromium.open(f"{training.grafana.url}/d/{uid}?{urlencode(view | {'orgId': 1, 'theme': theme})}&kiosk")
    chromium.wait(LOADED, LOADED_WITHIN_SECONDS)
    chromium.run(OPEN_ROWS)
    for _ in range(2):
        chromium.wait(f"({LOADED}) >= {wanted}", LOADED_WITHIN_SECONDS)
        chromium.drain(1.0)
    panels, queries = chromium.run(PANELS), chromium.queries()
    if folder := os.environ.get("RANKSCOPE_GRAFANA_PICTURES"):
        Path(folder, f"{name}-{theme}.png").write_bytes(chromium.picture())
    expected = stored(training.programs.folder / "history", RUNS[kind], end)
    asked = {query: query.ask(training.programs.urls["prometheus"]) for query in queries}
    slowest = max(asked, key=lambda query: asked[query][0])
    times.append((name, *(f"{one:.2f}" for one in (*chromium.seconds(), asked[slowest][0])), slowest.expression))

    faults = [
        *faults_of_page(board, kind, expected, panels),
        *faults_of_marks(board, expected, panels),
        *(f"refused: {query.substituted}: {error}" for query, (_, error) in asked.items() if error),
        *(f"[]: {query.expression}" for query in queries if "[]" in query.expression),
        *(f"[]: {one}" for one in chromium.lists if re.search(r"(?<!match)\[\]", one)),
        *(problem for problem in chromium.problems if '"level": "error"' in problem),
    ]
    assert [] == faults
    assert chromium.seconds()[0] < LOADED_WITHIN_SECONDS
    assert asked[slowest][0] < QUERY_WITHIN_SECONDS
