"""Pages in a real browser, which all tests share: after each test, the browser must have reported no message."""

import json

import numpy as np
import pyarrow as pa
import pytest
from tests.view.browser import Browser
from tests.view.served import served
from tests.view.training import MAIN, START, event, events, run_row, scalars, write

from rankscope_view.pages.format import percent
from rankscope_view.site import Site

NOW = START / 1e6 + 6000


@pytest.fixture(scope="session")
def address(store_path):
    with served(Site(store_path, clock=lambda: NOW)) as found:
        yield found


class Reader:
    """A reader, beginning at the list of runs. `clicks` counts clicks, drags and keys that select something."""

    def __init__(self, page: Browser, address: str) -> None:
        self.page = page
        self.clicks = 0
        # The page before may still send requests to a server that has ended.
        page.call("Page.navigate", url="about:blank")
        page.problems.clear()
        page.look(1280, 900)
        page.open(address + "/")

    def click(self, selector: str, then: str = "true") -> None:
        self.page.click(selector)
        self.clicks += 1
        self.page.wait(then)

    def open(self, run: str) -> None:
        self.page.open(self.page.run(f"location.origin + '/runs/{run}'"))

    def text(self, selector: str) -> str:
        return self.page.wait(f"document.querySelector({json.dumps(selector)})?.innerText")


@pytest.fixture
def reader(chromium, address):
    found = Reader(chromium, address)
    yield found

    assert [] == chromium.problems
    assert found.clicks <= 4


MAIN_RUN = f"#runs .name a[href='/runs/{MAIN}']"
NOT_FINITE = "document.querySelector('#head').innerText.includes('loss is not finite')"
FIRST_NAN = "/rank 1/i.test(document.querySelector('h1').innerText)"
SILENT = "document.querySelector('#verdicts strong').innerText.includes('is silent')"
WAYS = {
    "failed run": (["#chips a[href*='state=failed']", "#runs .name a[href*='qwen-7b']"], NOT_FINITE),
    "first NaN": ([f"#runs tr:has(a[href='/runs/{MAIN}']) .why a"], FIRST_NAN),
    "slow rank": (
        [MAIN_RUN, "#tabs a[href$='/ranks']"],
        f"{SILENT} && document.querySelector('#heat canvas')?.width > 100",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_fault_is_found_with_at_most_two_clicks(reader, course, way):
    clicks, shown = WAYS[way]
    for selector in clicks:
        before = reader.page.run("location.href")
        reader.click(selector, f"document.readyState === 'complete' && location.href !== {json.dumps(before)}")

    reader.page.wait(shown)
    assert way != "first NaN" or f"became NaN at step {course.nan_from}" in reader.text("h1")


def test_text_below_a_number_of_a_run_does_not_reach_the_next_number(chromium, address):
    chromium.look(1440, 900)
    chromium.open(f"{address}/runs/{MAIN}")
    right = "getBoundingClientRect().right"
    widths = f"(box) => [box.{right}, Math.max(...[...box.querySelectorAll('dd *')].map((one) => one.{right}))]"
    found = chromium.run(f"[...document.querySelectorAll('.runhead dl div')].map({widths})")

    assert len(found) == 7
    assert [] == [(box, text) for box, text in found if text > box]


def test_two_runs_are_compared(reader):
    reader.click(f"#runs input[value='{MAIN}']")
    reader.click("#runs input[value='llama-1b-muon-sweep-04']")
    reader.click("#compare", "document.body.dataset.page === 'compare'")

    assert "differ first at step" in reader.text(".verdict strong")
    assert 2 == reader.page.wait(
        "document.querySelectorAll('.uplot').length >= 2 && document.querySelectorAll('.badge').length"
    )


def test_spike_is_zoomed(reader, course):
    reader.click(MAIN_RUN, "document.querySelector('#chart-loss .uplot')")
    page = reader.page
    first, last = (page.place("#chart-loss .u-over", across) for across in (0.2, 0.3))
    page.click_at(*first, to=last)
    reader.clicks += 1
    page.wait("location.search.includes('from=')")

    window = [float(page.run(f"new URLSearchParams(location.search).get('{name}')")) for name in ("from", "to")]
    assert window[0] < 25 < window[1]  # the spike of the course
    assert "rows stored, all drawn" in reader.text("#chart-loss .notice")
    page.open(page.run("location.href"))  # the address restores the window

    page.wait("document.querySelector('#whole:not(.off)') && document.querySelector('#chart-loss .uplot')")


def test_keys_open_pages_and_the_help_lists_all(reader):
    page = reader.page
    reader.open(MAIN)
    for key, where in (("t", "tensors"), ("k", "ranks"), ("i", "incidents"), ("c", "compare"), ("r", "list")):
        page.press("g" + key)
        page.wait(f"document.readyState === 'complete' && document.body.dataset.page === '{where}'")
    reader.open(f"{MAIN}/incidents/a1")
    page.press("]")
    page.wait("document.readyState === 'complete' && location.pathname.endsWith('/b2')")
    page.press("[")
    page.wait("document.readyState === 'complete' && location.pathname.endsWith('/a1')")
    page.press("?")
    keys = page.wait("[...document.querySelectorAll('dialog kbd')].map((one) => one.textContent)")

    known = {"g r", "g o", "g t", "g k", "g i", "g c", "[", "]", "T", "?", "s", "l", "o", "0", "← →", "drag"}
    assert known <= set(keys)


def test_page_of_a_long_run_gets_its_goodput_later(chromium, store_path, connection):
    (row,) = connection.query("SELECT goodput FROM goodput WHERE run = $run", {"run": MAIN}).to_pylist()
    with served(Site(store_path, clock=lambda: NOW, most_step_times=10)) as address:
        chromium.open(f"{address}/runs/{MAIN}")
        chromium.wait("document.querySelector('[data-pending]').textContent !== 'calculate'")

        assert percent(row["goodput"]) == chromium.run("document.querySelector('[data-value=goodput]').textContent")
        assert "lost" in chromium.run("document.querySelector('[data-pending]').textContent")


def test_shift_and_drag_pans_a_zoomed_chart(reader):
    page = reader.page
    reader.open(f"{MAIN}?from=20&to=60")
    page.wait("document.querySelector('#chart-loss .uplot')")
    first, last = (page.place("#chart-loss .u-over", across) for across in (0.7, 0.2))
    page.point(*first)
    for kind, (x, y) in (("mousePressed", first), ("mouseMoved", last), ("mouseReleased", last)):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1, modifiers=8)

    found = page.wait("Number(new URLSearchParams(location.search).get('from')) > 30 && location.search")
    low, high = (float(part.split("=")[1]) for part in found[1:].split("&"))
    assert (40, 40) == (pytest.approx(low, abs=1), pytest.approx(high - low, abs=0.5))


def test_cell_of_the_heat_map_has_its_exact_value_and_opens_its_tensor(reader, connection):
    page = reader.page
    reader.open(f"{MAIN}/tensors")
    page.wait("document.querySelector('#gridnotice')?.textContent.includes('no pooling')")
    x, y = page.place("#heat canvas", 0.5, 0.06)
    page.point(x, y)
    page.wait("document.querySelectorAll('#readout span').length >= 5")
    words = page.run("[...document.querySelectorAll('#readout b')].map((one) => one.textContent)")
    name, step, attempt, value, rank = words
    stored = connection.query(
        "SELECT norm FROM tensor_stats WHERE run = $run AND tensor = $tensor AND step = $step AND attempt = $attempt "
        "AND rank = $rank",
        {"run": MAIN, "tensor": name, "step": int(step), "attempt": int(attempt), "rank": int(rank)},
    )["norm"].to_pylist()
    assert [float(value)] == pytest.approx(stored, rel=1e-3)

    page.click_at(x, y)
    page.wait(f"new URLSearchParams(location.search).get('tensor') === {json.dumps(name)}")
    page.wait("document.querySelector('#tensor .legend')?.innerText.includes('baseline')")
    legend = reader.text("#tensor .legend")
    assert "rank" in legend
    assert "limit 4×" in legend


def test_number_of_ranks_with_a_loss_is_below_its_curve(chromium, stored):
    """A note next to the curve made the table wider than the window."""
    losses = [scalars("r", "loss", np.arange(9 - rank), 2.0, rank=rank, incarnation=f"r-{rank}") for rank in (0, 1)]
    store = stored(runs=run_row("r", "completed", world_size=2), scalars=pa.concat_tables(losses))
    note, curve = (f"document.querySelector('#runs .loss {one}').getBoundingClientRect()" for one in (".dim", "svg"))
    with served(Site(store, clock=lambda: NOW)) as own:
        chromium.open(f"{own}/")

        assert "1 of 2 ranks" == chromium.wait("document.querySelector('#runs .loss .dim').innerText")
        assert chromium.run(f"{note}.top >= {curve}.bottom")
        chromium.open("about:blank#end")


WORDS = """(() => {
  const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
  const size = Object.getOwnPropertyDescriptor(HTMLCanvasElement.prototype, 'width');
  const set = function (value) { this.words = []; size.set.call(this, value); };
  Object.defineProperty(HTMLCanvasElement.prototype, 'width', { ...size, set });
  Object.assign(CanvasRenderingContext2D.prototype, {
    clearRect(...box) { this.canvas.words = []; clearRect.apply(this, box); },
    fillText(word, x, y, ...rest) {
      const { actualBoundingBoxLeft: left, actualBoundingBoxRight: right } = this.measureText(word);
      if (word) (this.canvas.words ??= []).push([word, x - left, x + right, y]);
      fillText.call(this, word, x, y, ...rest);
    },
  });
})()"""
"""Keeps the words on each canvas, with their left and right ends and their height."""


def test_labels_of_charts_and_scales_are_whole_and_apart(chromium, stored):
    names = {"loss": None, "pre_collective_seconds": None, "step_phase_seconds": '{"phase":"forward"}'}
    step = 119_880 + np.arange(121)
    times = [
        scalars("r", name, step, 1 + rank / 20, rank=rank, incarnation=f"r-{rank}", labels=labels)
        for rank in (0, 1)
        for name, labels in names.items()
    ]
    store = stored(runs=run_row("r", "completed", world_size=2), scalars=pa.concat_tables(times))
    found = {}
    script = chromium.call("Page.addScriptToEvaluateOnNewDocument", source=WORDS)["identifier"]
    with served(Site(store, clock=lambda: NOW)) as own:
        for path, box, last in (("", "#chart-loss", "120,000"), ("/ranks", "#heat", "absent")):
            chromium.look(1280, 900)
            chromium.open(f"{own}/runs/r{path}")
            canvas = f"document.querySelector('{box} canvas')"
            chromium.wait(f"{canvas}?.words?.some(([word]) => word === '{last}')")
            found[box] = chromium.run(f"[{canvas}.width, {canvas}.words]")
        chromium.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        chromium.open("about:blank#end")

    for width, words in found.values():
        assert [] == [word for word, left, right, _ in words if left < 0 or right > width]
    places = sorted(y for word, _, _, y in found["#heat"][1] if word.endswith("×"))
    assert len(places) > 1
    assert min(np.diff(places)) >= 11


@pytest.mark.usual(2)
@pytest.mark.parametrize("run", ["only-nan", "no-loss", "no-times", "one-row", "mamba2-370m-32k-ctx"])
def test_run_of_any_shape_has_pages_without_messages(chromium, address, run):
    chromium.problems.clear()
    chromium.look(420, 800, "dark")
    for path in ("", "/tensors", "/ranks"):
        chromium.open(f"{address}/runs/{run}{path}")
        chromium.drain(0.1)

    assert [] == chromium.problems
    assert chromium.run("document.documentElement.scrollWidth") <= 420


def attempt_rows(attempt: int, steps: range) -> dict[str, pa.Table]:
    step = np.array(steps)
    source = {"attempt": attempt, "incarnation": f"live-{attempt}", "seq": step, "ts": START + step * 1_000_000}
    launch = event("live", "launch", None, START, attempt=attempt, rank=0, details={"host": "a", "world_size": 1})
    values = {"loss": 4.0 - step / 50, "grad_norm": 1 + 0 * step}
    tables = [scalars("live", name, step, value, **source) for name, value in values.items()]
    row = run_row("live", "running", attempt=attempt, planned_steps=200, last_step=steps[-1], ordinal=attempt + 1)
    return {"scalars": pa.concat_tables(tables), "events": events([launch]), "runs": row}


def test_live_run_is_followed_across_a_restart(chromium, stored):
    store = stored(**attempt_rows(0, range(60)))
    with served(Site(store, clock=lambda: NOW)) as address:
        reader = Reader(chromium, address)
        reader.click("#runs .name a", "document.querySelector('#chart-loss .uplot')")
        assert "59" == reader.text("#head [data-value=step]")
        write(store, attempt_rows(1, range(40, 90)))

        chromium.wait("document.querySelector('#head [data-value=step]').innerText === '89'")
        assert "59 → 40" in reader.text("#head > .figures")
        assert "4.0" not in reader.text("#head [data-value=loss]")
        chromium.call("Page.navigate", url="about:blank")  # ends the stream of events
    assert [] == chromium.problems
    assert 1 == reader.clicks
