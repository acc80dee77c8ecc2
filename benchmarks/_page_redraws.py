"""Cost of redraws in Chromium: ten updates a second of four charts of 4,000 points, from a recorded trace."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from _history_store import START, Builder, losses
from _rows import Row
from aiohttp import web

from rankscope_ingest.http.pages import Pages
from rankscope_view.site import Site

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.view.browser import Browser, browser
from tests.view.served import served_application

STEPS = 4000
UPDATES_PER_SECOND = 10
_NAMES = ("loss", "grad_norm", "learning_rate")  # and the perplexity: four charts
_OF_PAGE = {
    "FunctionCall",
    "FireAnimationFrame",
    "EventDispatch",
    "UpdateLayoutTree",
    "Layout",
    "TimerFire",
    "MinorGC",
    "MajorGC",
}
_COUNT = """
window.redraws = new Map();
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...box) {
  const at = document.timeline.currentTime;
  const known = window.redraws.get(this.canvas) ?? new Map();
  known.set(at, (known.get(at) ?? 0) + 1);
  window.redraws.set(this.canvas, known);
  return clear.apply(this, box);
};
"""


def redraws(seconds: float) -> Iterator[Row]:
    """Measure script and layout per update in a trace of `seconds`."""
    program = shutil.which("chromium")
    if program is None:
        yield Row("redraws", float("nan"), "ms", "chromium is not installed")
        return
    with tempfile.TemporaryDirectory(prefix="rankscope-redraws-") as name:
        folder = Path(name)
        _write(folder / "store")
        with _served(folder / "store") as url, browser(program, folder / "profile") as page:
            page.look(1440, 1400)
            page.open(f"{url}/runs/live")
            page.run("document.getElementById('more').open = true")
            page.wait("document.querySelectorAll('.uplot').length === 4")
            page.wait("document.querySelector('.live span').textContent.includes('behind')")
            page.run(_COUNT)
            trace = _trace(page, seconds)
            most = page.run("Math.max(...[...redraws.values()].flatMap((one) => [...one.values()]))")
            drawn = page.run("Math.min(...[...redraws.values()].map((one) => one.size))")
        costs, cpu = sorted(_costs(trace, "dur")), sorted(_costs(trace, "tdur"))
        note = f"{len(costs)} updates, four charts of {STEPS:,} points; target"
        yield Row("script and layout of an update, median", statistics.median(costs), "ms", f"{note} 16 ms")
        yield Row("script and layout of an update, p99", costs[int(0.99 * len(costs))], "ms", f"{note} 50 ms")
        note = f"p99 {cpu[int(0.99 * len(cpu))]:.1f} ms"
        yield Row("the same as CPU time, median", statistics.median(cpu), "ms", note)
        yield Row(
            "redraws of a chart in one frame, most", most, "", f"target 1; each chart was drawn {drawn} times or more"
        )


def _write(root: Path) -> None:
    rows = losses("live", 1, range(STEPS), 1.0, np.random.default_rng(0))
    at, codes = rows.column_names.index("name"), np.zeros(rows.num_rows, np.int32)
    tables = [rows.set_column(at, "name", pa.DictionaryArray.from_arrays(codes, [name])) for name in _NAMES]
    times = pa.array([START + dt.timedelta(seconds=STEPS)], pa.timestamp("us", tz="UTC"))
    state = {
        "run": ["live"],
        "attempt": pa.array([0], pa.int32()),
        "ordinal": [1],
        "ts": times,
        "ts_origin": ["ingest"],
    }
    state |= {"source_kind": ["live"], "state": ["running"], "last_step": [STEPS - 1], "planned_steps": [10 * STEPS]}
    Builder(root).append({"scalars": pa.concat_tables(tables), "runs": pa.table(state)}, START.date())


def _served(store: Path) -> AbstractContextManager[str]:
    """Serve the pages of a store, with ten updates a second of one step each in place of those of a service."""

    async def live(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        step = STEPS
        while request.transport is not None:
            value = 5 + (step * 7 % 13) / 100
            rows = [[0, step, START.timestamp() + step, {name: [value, value, value] for name in _NAMES}]]
            await stream.write(f"event: rows\ndata: {json.dumps(rows)}\n\n".encode())
            step += 1
            await asyncio.sleep(1 / UPDATES_PER_SECOND)
        return stream

    application = web.Application()
    pages = Pages(Site(store))
    application.add_routes([route for route in pages.routes() if not route.path.endswith("/live")])
    application.router.add_get("/data/live", live)
    return served_application(application)


def _trace(page: Browser, seconds: float) -> list[dict[str, Any]]:
    page.events.clear()
    page.call("Tracing.start", categories="devtools.timeline,toplevel", transferMode="ReportEvents")
    page.drain(seconds)
    page.call("Tracing.end")
    while not any(event["method"] == "Tracing.tracingComplete" for event in page.events):
        page.drain(0.1)
    parts = [event["params"]["value"] for event in page.events if event["method"] == "Tracing.dataCollected"]
    return [event for part in parts for event in part]


def _costs(trace: list[dict[str, Any]], clock: str) -> Iterator[float]:
    """Yield the milliseconds of script and layout of each update: of the thread that draws, in windows of an update.

    `clock` is `dur` for elapsed time, and `tdur` for CPU time.
    """
    drawing = [event for event in trace if event.get("name") == "FireAnimationFrame" and "dur" in event]
    threads = statistics.mode((event["pid"], event["tid"]) for event in drawing)
    own = [e for e in trace if (e["pid"], e.get("tid")) == threads and e.get("name") in _OF_PAGE and e.get("ph") == "X"]
    own.sort(key=lambda event: (event["ts"], -event["dur"]))
    begin = own[0]["ts"]
    windows: dict[int, float] = {}
    end = 0.0
    for event in own:
        if event["ts"] < end:  # within another one
            continue
        end = event["ts"] + event["dur"]
        at = int((event["ts"] - begin) // (1e6 / UPDATES_PER_SECOND))
        windows[at] = windows.get(at, 0.0) + event.get(clock, 0) / 1000
    yield from windows.values()
