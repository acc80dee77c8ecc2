"""The status page: golden files, bounded size, escaping of hostile names, and no need of scripts."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.ingest.status_page.statuses import HOSTILE, STARTED, empty, large, run, small, target

from rankscope_contract.model.events import RunState
from rankscope_ingest.runs.models import Health
from rankscope_ingest.status_page import assets
from rankscope_ingest.status_page.page import COLOURS, MAX_ROWS, MAX_RUNS, page
from rankscope_view.pages.format import duration, number, percent

GOLDEN = Path(__file__).parents[2] / "golden" / "status"
VOID = {"meta", "link", "br"}
IMPLIED = {"tr", "td", "th"}  # their ends need not be written


class Reader(HTMLParser):
    """Elements, attributes and visible text of a page; fails if elements are not nested properly."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words, self.folded = [], [], [], []
        self.feed(text)
        assert [] == self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID | IMPLIED:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in IMPLIED:
            assert tag == self.open.pop()

    def handle_data(self, data):
        if data.strip() and not {"style", "script"} & set(self.open):
            (self.folded if "details" in self.open else self.words).append(" ".join(data.split()))

    @property
    def text(self):
        return " ".join(self.words)


def standing_of(*runs, targets=()):
    return dataclasses.replace(empty(), runs=runs, targets=targets)


@pytest.mark.parametrize(("name", "standing"), [("empty", empty), ("small", small)])
def test_page_of_a_fixed_status_equals_the_golden_file(name, standing):
    """RANKSCOPE_UPDATE_GOLDEN=1 writes the file again; then check it in a browser."""
    text, path = page(standing()), GOLDEN / f"{name}.html"
    if os.environ.get("RANKSCOPE_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    assert path.read_text(encoding="utf-8") == text
    Reader(text)


def test_every_state_has_a_color_and_its_name():
    for state in RunState:
        found = page(standing_of(run(state)))
        assert f'<span class="badge {COLOURS[state]}">{state}</span>' in found
        assert f".{COLOURS[state]}{{" in assets.STYLE

    told = [COLOURS[state] for state in (RunState.RUNNING, RunState.STALLED, RunState.FAILED, RunState.COMPLETED)]
    assert ["green", "amber", "red", "blue"] == told


def test_hostile_names_are_shown_as_text():
    """Names of runs, tags, hosts and errors can contain any text."""
    texts = {"reason": HOSTILE, "tags": {HOSTILE: HOSTILE}, "note": f"{HOSTILE}\n{HOSTILE}"}
    hostile = run("failed", run=HOSTILE, started_at=STARTED, **texts)
    rank = target(0, run=HOSTILE, host=HOSTILE, url=f"http://{HOSTILE}", last_error=HOSTILE, health="failing")
    exporter = dict.fromkeys(("name", "url", "samples", "lag_seconds", "last_error"), HOSTILE) | {"up": False}
    service = dataclasses.replace(empty().service, reason=HOSTILE, store=HOSTILE, status="degraded")
    whole = dataclasses.replace(standing_of(hostile, targets=[rank]), service=service, exporters=[exporter])
    found = Reader(page(whole))

    assert 1 == sum(tag == "script" for tag, _ in found.elements)
    assert not {name for _, attrs in found.elements for name in attrs if name.startswith("on") or name == "style"}
    assert found.text.count("<script>alert(1)</script>") >= 12
    assert all(char.isprintable() for char in found.text)


def test_content_security_policy_allows_only_the_own_style_and_script():
    text = page(small())
    policy = assets.PAGE_HEADERS["Content-Security-Policy"]
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert all(attrs.get("href", "/").startswith(("/", "./", "data:")) for _, attrs in Reader(text).elements)


def test_degraded_ranks_are_listed_first_and_healthy_ones_are_collapsed():
    text = page(large())
    found = Reader(text)
    shown = " ".join(found.words)

    assert len(text) < 400_000
    assert "no answer within 10 s" in shown
    assert re.search(r"failing.* 1 min 35 s .*pending", shown)  # the one that lags, and then the one to come
    assert "995 up" in " ".join(found.folded)
    assert "1 gone" in " ".join(found.folded)
    assert "node124" not in shown
    assert {"well", "gone"} == {attrs["id"].split("-")[0] for tag, attrs in found.elements if tag == "details"}


def test_ranks_of_earlier_launches_are_listed_with_their_run():
    """A rank may still deliver records while a later launch of its run is active or completed."""
    late = target(0, attempt=1, health="failing", last_error="late")
    found = Reader(page(standing_of(run(attempt=2), targets=[late, target(1, run="forgotten", health="failing")])))

    assert "attempt 2" in found.text
    assert re.search("attempt 1 0 failing .*late .*forgotten earlier launches .*attempt 0 1 failing", found.text)


def test_page_size_is_bounded_and_omitted_rows_are_counted():
    runs = [run("completed", run=f"r{number}", started_at=STARTED + number) for number in range(MAX_RUNS + 30)]
    targets = [target(rank, run=f"r{MAX_RUNS + 29}", health="failing", last_error="x" * 200) for rank in range(2100)]
    text = page(standing_of(*runs, targets=targets))
    found = Reader(text)

    assert len(text) < 2_000_000
    assert MAX_RUNS == sum(tag == "article" for tag, _ in found.elements)
    assert "30 older runs are not shown (30 completed)" in found.text
    assert f"{2100 - MAX_ROWS:,} more are not shown" in found.text
    assert found.text.index("r129") < found.text.index("r128")  # the newest first


def test_degraded_state_is_in_the_title_and_at_the_top():
    trouble = dataclasses.replace(empty().service, status="degraded", reason="the disk is full")
    degraded = page(dataclasses.replace(small(), service=trouble))

    assert "<title>1 failed, 1 running · Rankscope</title>" in page(small())
    assert "<title>degraded · Rankscope</title>" in degraded
    assert '<p class="alarm" role="alert"><strong>Degraded.</strong> the disk is full</p>' in degraded


@pytest.mark.parametrize("loss", [float("nan"), float("-inf")])
def test_running_run_with_nan_or_infinite_loss_is_not_green(loss):
    bad = {"loss": loss, "nonfinite_loss": "loss"}
    found = page(standing_of(run(**bad), run("completed", **bad, run="a"), run(run="b")))
    bad, healthy, ended = (f"{part}</article>" for part in found.split("</article>")[:3])

    assert "<title>1 with NaN or infinite loss, 2 running · Rankscope</title>" in found
    assert f'<dd><span class="red">{number(loss)}</span></dd>' in bad
    for part, state, colour in ((bad, "running", "red"), (ended, "completed", "blue"), (healthy, "running", "green")):
        assert f'<span class="badge {colour}">{state}</span>' in part
        assert f'<progress class="{colour}"' in part
    badge = '<span class="badge red">loss not finite</span>'
    assert [True, True, False] == [badge in part for part in (bad, ended, healthy)]


def test_every_health_has_a_row():
    for health in Health:
        text = page(standing_of(run(), targets=[target(0, health=health)]))
        assert f">{health}</span>" in text


def test_durations_have_their_two_largest_units():
    shown = {0.04: "0.0 s", 9.94: "9.9 s", 59.6: "1 min", 61: "1 min 1 s", 3600: "1 h", 93_784: "1 d 2 h"}
    shown |= {9.2e18: "over 1,000 years", float("inf"): "∞"}

    assert list(shown.values()) == list(map(duration, shown))


def test_ratio_below_one_is_never_shown_as_100_percent():
    shares = (0.99999, 1.0, 0.0001, 0.125, 260 / 300)
    assert ["99.9 %", "100 %", "0 %", "12.5 %", "86.7 %"] == [percent(share) for share in shares]
