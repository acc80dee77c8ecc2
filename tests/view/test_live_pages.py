"""Open pages of a real service in a real browser: complete curves, one progress, new runs, and streams that fail."""

import asyncio
import math
from functools import partial

import pytest
from tests.ingest.conftest import FakeRank, eventually, running_service, untuned_test_process  # noqa: F401 - a fixture
from tests.view.browser import browser

from rankscope_ingest.live.tails import LiveTails
from rankscope_view.pages.format import duration

POINTS = """(() => {
  const plot = document.querySelector('#chart-loss .plot'), legend = document.querySelector('#chart-loss .legend');
  if (!plot?.querySelector('.uplot')) return null;
  const found = {};
  const press = (shiftKey, key) => plot.dispatchEvent(new KeyboardEvent('keydown', {key, shiftKey}));
  for (let count = 0; count < 20; count += 1) press(true, 'ArrowRight');
  for (let count = 0; count < 60; count += 1) {
    const [, step] = /^step ([\\d,]+)/.exec(legend.innerText) ?? [];
    if (step) found[step] = legend.querySelector('b')?.innerText;
    press(false, 'ArrowLeft');
  }
  return Object.entries(found).map(([step, value]) => [Number(step), value]);
})()"""
"""The steps of the loss curve and the value of each, as the legend shows them when the cursor moves over the chart."""

NOTED = """new MutationObserver(() => {
  const head = document.querySelector('#head [data-value=step]')?.parentElement?.innerText;
  window.noted ??= [];
  if (head && window.noted.at(-1) !== head) window.noted.push(head);
}).observe(document.querySelector('main'), {subtree: true, childList: true, characterData: true})"""
"""Keeps each text of the progress that the page shows."""


NEW = "document.querySelector('#head [data-value=step]').innerText === '{}'"
FOLLOWING = "document.querySelector('#following').innerText"
BOOM = {"type": "exit", "severity": "critical"}
BOOM |= {"details": '{"reason": "exception", "exception": "ValueError: boom"}'}


class Page:
    """A browser. Its methods run in a thread, so that the service of this process answers them."""

    def __init__(self, browser):
        self._browser = browser

    def __getattr__(self, name):
        found = getattr(self._browser, name)
        return partial(asyncio.to_thread, found) if callable(found) else found

    async def shows_step(self, step):
        await self.wait(NEW.format(step))

    async def leave(self):
        """End the stream of events of the page. It must have reported no message."""
        await self.call("Page.navigate", url="about:blank")
        assert [] == self.problems


@pytest.fixture(scope="module")
def page(require_server, tmp_path_factory):
    with browser(require_server("chromium"), tmp_path_factory.mktemp("chromium")) as found:
        found.look(1280, 900)
        yield Page(found)


async def ends(rank, service):
    rank.publish(step=None, events=[{"type": "exit", "details": '{"reason": "completed"}'}])
    rank.state = "draining"
    await rank.register(service.url)


EVALUATION = "document.querySelector('#more [aria-label=\"Evaluation loss\"]').parentElement"


async def test_curve_is_complete_and_progress_is_one_number(page, tmp_path, monkeypatch):
    """Each second poll brings only scalars of the machine, as for a run with steps that take longer than a poll."""
    # Once, the sender of rows fails.
    ten_seconds = 10_000_000
    fails = [False, False, False, True]
    changed = LiveTails.changed

    async def fragile(tails, run, seen):
        if fails and fails.pop(0):
            raise RuntimeError("injected")
        return await changed(tails, run, seen)

    monkeypatch.setattr(LiveTails, "changed", fragile)
    changes = {"ingest.flush_after_seconds": 2.0}
    async with running_service(tmp_path / "store", **changes) as service, FakeRank(planned_steps=9) as rank:

        def publish(step, **values):
            listed = [{"name": name, "value": value} for name, value in values.items()]
            rank.publish(step=step, ts=ten_seconds * step, scalars=listed)

        for step in range(3):
            publish(step, loss=step + 1.0, **({} if step else {"grad_norm": 1.0}))
        await rank.register(service.url)
        await eventually(lambda: service.rows("FROM runs WHERE state = 'running'"))
        for step in (3, 4):
            publish(step, loss=step + 1.0)
        await eventually(lambda: len(rank.polls) > 3)
        await page.open(f"{service.url}/runs/r")
        await page.wait("document.querySelector('#chart-loss .uplot')")
        await page.run(NOTED)
        await page.shows_step(4)
        requests = await page.run("performance.getEntriesByType('resource').map((one) => one.name)")
        for step in range(5, 9):
            polls = len(rank.polls)
            rank.publish(step=None, scalars=[{"name": "host_cpu_utilization", "value": 1.0}])
            await eventually(lambda before=polls: len(rank.polls) > before + 2)
            publish(step, loss=float(step), **({"eval_loss": 2.0 if step < 8 else math.nan} if step > 6 else {}))
            await page.shows_step(step)
        await page.run(f"{EVALUATION}.scrollIntoView()")
        await page.wait(f"{EVALUATION}.querySelector('.legend').innerText.includes('NaN')")
        group = await page.run(f"{EVALUATION}.closest('details').querySelector('summary').innerText")
        points = sorted(await page.run(POINTS))
        publish(9, loss=9.0)
        await ends(rank, service)
        await page.wait("document.querySelector('#head .pill.completed')")
        await page.wait(f"{FOLLOWING} === 'History'")
        noted = await page.run("window.noted")
        await page.leave()

    assert [] == fails
    assert "Gradient norm, evaluation loss 2 charts m" == group
    assert list(range(9)) == [step for step, _ in points]
    assert ["5.000", "6.000", "7.000", "8.000"] == [value for _, value in points[-4:]]
    steps = [int(text.split()[0]) for text in noted]
    assert sorted(steps) == steps
    assert 9 == steps[-1]
    assert [f"{min(round(100 * step / 9, 1), 100):g} %" for step in steps] == [text.split(" · ")[1] for text in noted]
    left = [text.split(" · ")[2].split(",")[0] for text in noted if " left" in text]
    assert [f"{duration(10.0 * (9 - step))} left" for step in steps if step < 9] == left
    assert 1 == sum("/data/curve?" in one and "name=loss" in one for one in requests)


async def test_page_of_a_followed_log_shows_its_new_rows_and_its_end(page, tmp_path):
    log = tmp_path / "train.jsonl"

    def write(first, last):
        with log.open("a") as file:
            file.writelines(f'{{"step": {step}, "loss": {9 - step / 10}}}\n' for step in range(first, last))

    write(1, 4)
    section = {"log": str(log), "run": "followed", "poll_seconds": 0.2, "settle_seconds": 0.0}
    async with running_service(tmp_path / "store", watch=[section]) as service:
        await eventually(lambda: service.rows("FROM scalars WHERE run = 'followed' AND name = 'loss' AND step = 3"))
        await page.open(f"{service.url}/runs/followed")
        await page.shows_step(3)
        for step in (6, 9):
            write(step - 2, step + 1)
            await page.shows_step(step)
        await page.wait(f"/^Live, last step [1-9] s ago$/.test({FOLLOWING})")
        await page.leave()


async def test_open_list_shows_a_new_run_and_its_first_step(page, tmp_path):
    """The list is opened while the store is empty, and then while all runs have ended."""
    async with running_service(tmp_path / "store", **{"ingest.flush_after_seconds": 60.0}) as service:
        await page.open(service.url)
        for run in ("first", "second"):
            async with FakeRank(run=run) as rank:
                await rank.register(service.url)
                row = f"document.querySelector('#runs tr:has([value={run}])')"
                await page.wait(row, 10)
                rank.publish_steps(3)
                await page.wait(f"{row}.innerText.includes('Running')", 10)
                assert "2" in await page.run(f"{row}.querySelector('.progress').innerText")
                await ends(rank, service)
                await page.wait(f"{row}.innerText.includes('Completed')", 10)
        names = await page.run("[...document.querySelectorAll('#runs input')].map((one) => one.value)")
        about = await page.run("document.querySelector('#about').innerText")
        await page.leave()

    assert ["second", "first"] == names
    assert "2 runs, 0 active" == about


async def test_page_opened_before_its_run_shows_the_run_and_then_its_incident(page, tmp_path):
    """The header, the tab, the panel and the page of incidents show the incident together, without a new request."""
    panel, loss = (f"document.querySelector('#{name}')?.innerText" for name in ("incidents", "chart-loss"))
    async with running_service(tmp_path / "store", **{"ingest.flush_after_seconds": 1.0}) as service:
        await page.open(f"{service.url}/runs/r")
        missing = await page.run("document.querySelector('main').innerText")
        page.problems.clear()  # the answers 404
        async with FakeRank(world_size=2) as rank, FakeRank(world_size=2, rank=1) as other:
            await rank.register(service.url)
            await page.wait("document.querySelector('#no-loss')?.innerText.startsWith('Waiting for')", 15)
            rank.publish_steps(3)
            await page.wait(f"{panel}?.includes('None.')", 15)
            await page.wait(f"{loss}.includes('logged by 1 rank')", 15)
            other.publish_steps(2)
            await other.register(service.url)
            await page.wait(f"{loss}.includes('1 of 2 ranks')", 15)
            page.problems.clear()
            rank.publish(step=None, events=[BOOM])
            await page.wait("document.querySelector('#head .pill.failed')", 15)
            count = "document.querySelector('#tabs .count')?.innerText"
            shown = await page.run(f"[{panel}, document.title, {count}]")
        await page.leave()

    assert "This page loads again every 2 s until the run appears." in missing
    assert ("1 open incident: r · Rankscope", "1") == (shown[1], shown[2])
    assert "rank 0: exception\n" in shown[0]


IS_FOUR = "[...document.querySelectorAll('#runs tbody .progress')].every((one) => /\\b4\\b/.test(one.innerText))"
HIDE = """(() => {
  Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true});
  document.dispatchEvent(new Event('visibilitychange'));
})()"""


async def test_eight_windows_follow_of_which_one_is_hidden_for_a_while(page, tmp_path):
    """A browser permits six connections to one server."""
    first = page.window
    paths = ["/runs/r"] * 4 + ["/runs/s"] * 2 + ["/"] * 2
    async with running_service(tmp_path / "store") as service, FakeRank() as rank, FakeRank(run="s") as other:
        for one in (rank, other):
            one.publish_steps(3)
            await one.register(service.url)
        await eventually(lambda: len(service.rows("FROM runs WHERE state = 'running'")) == 2)
        windows = [await page.new_window() for _ in paths]
        for window, path in zip(windows, paths, strict=True):
            await page.use(window)
            await page.open(service.url + path)
        await page.use(windows[0])
        await page.run(HIDE % "true")
        for one in (rank, other):
            one.publish_steps(2)
        for window, path in zip(windows[1:], paths[1:], strict=True):
            await page.use(window)
            await page.wait(IS_FOUR if path == "/" else NEW.format(4))
        await page.use(windows[0])
        await page.shows_step(4)  # of the store: a hidden page has no rows
        rank.publish_steps(1)
        await page.run(HIDE % "false")
        await page.shows_step(5)
        await page.wait("document.querySelector('.live').innerText.startsWith('Live')")
        await page.run(HIDE % "true")
        rank.publish(step=None, events=[BOOM])
        await page.wait("document.title === '1 open incident: r · Rankscope'", 10)
        hidden = await page.run("document.querySelector('#head .pill').innerText")
        for state in ("frozen", "active"):
            await page.call("Page.setWebLifecycleState", state=state)
        frozen = await page.run("document.title")
        for window in windows:
            await page.use(window)
            await page.call("Page.close")
        await page.use(first)

    assert "Failed" == hidden
    assert "Late: 1 open incident: r · Rankscope" == frozen
    assert [] == page.problems
