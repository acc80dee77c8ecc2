"""The report of a run: one HTML file for runs of any shape, offline, within its size, with zoomable charts."""

import base64
import dataclasses
import hashlib
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from tests.properties import few
from tests.view.browser import browser
from tests.view.test_site import NOW, RUNS, Reader
from tests.view.training import HOSTILE, MAIN, START, event, events, run_row, scalars

from rankscope_view.data.detail import read_detail
from rankscope_view.report import condensed, embedded_curves, fragment, offered_axes, read_content, report
from rankscope_view.site import Site

LARGEST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def made(connection):
    known: dict[str, str] = {}

    def make(run: str) -> str:
        if run not in known:
            known[run] = report(connection, run, made_at=NOW, source="history")
        return known[run]

    return make


LEADS = {
    MAIN: "119 of 192 steps in 30 min 22 s and 3 attempts. Loss 2.809 and steady.",
    "only-nan": "Failed at step 11 in 11 s. All 12 losses are NaN or infinite. No incident is stored.",
    "one-row": "Stopped at step 0 in 0.9 s. Loss 8.500. No incident is stored.",
    "no-loss": "Step 19 in 18 s. The run logs no loss.",
    "no-times": "Step 29 in 27 s. Loss 2.534 and falling.",
    "mamba2-370m-32k-ctx": "No step is stored. The run logs no loss.",
    HOSTILE: "Loss 2.595. No incident is stored.",
}


@pytest.mark.parametrize("run", few(1, RUNS))
def test_run_of_any_shape_has_a_report_that_begins_with_its_state(made, run):
    found = Reader(made(run))

    assert LEADS[run] in found.text
    for part in ("Summary", "Curves", "Incidents", "Events", "Configuration"):
        assert part in found.text
    if run == MAIN:  # complete without scripts
        assert 7 == len([one for tag, one in found.elements if tag == "svg" and one.get("class") == "chart"])
        assert "layers.1. mlp. down_proj.weight" in found.text
        assert "AnomalyNan" in found.text
    assert "<script>alert" not in made(run)


def test_first_sentences_state_that_an_incident_is_resolved(connection):
    content = read_content(connection, MAIN, made_at=NOW, source="history")
    over = [dataclasses.replace(one, states=(*one.states, (None, "resolved"))) for one in content.incidents]
    row = dataclasses.replace(content.detail.row, incidents=())
    summary = dataclasses.replace(content.summary, detail=dataclasses.replace(content.detail, row=row))
    found = Reader(fragment(dataclasses.replace(content, incidents=over, summary=summary)))

    assert " became NaN at step 46 (resolved), and 1 more incident." in found.text


def test_report_and_its_policy_refer_to_nothing_outside_of_itself(made):
    html = made(MAIN)
    parts = re.findall(r"<(script|style)>(.*?)</\1>", html, re.DOTALL)
    digests = {
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'": kind for kind, text in parts
    }
    (policy,) = [one["content"] for _, one in Reader(html).elements if "http-equiv" in one]

    for _, attributes in Reader(html).elements:
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert all((attributes.get(name) or "#").startswith(("#", "data:")) for name in ("src", "href"))
    assert {"script": 3, "style": 1} == {kind: list(digests.values()).count(kind) for kind in ("script", "style")}
    assert set(digests) == set(re.findall(r"'sha256-[^']+'", policy))
    assert policy.startswith("default-src 'none'; ")
    assert not re.search("unsafe|https?:|'self'", policy)


def test_embedded_curves_have_the_stored_values_on_each_axis(made, connection):
    (text,) = re.findall(r'id="curves">(.*?)</script>', made(MAIN), re.DOTALL)
    curves = json.loads(text, parse_constant=pytest.fail)
    loss = curves["arrival"]["loss"]
    stored = read_detail(connection, MAIN).history("loss")

    assert ["arrival", "step", "attempt", "time"] == list(curves)
    assert stored.value[np.isfinite(stored.value)] == pytest.approx(
        [one for one in loss["lines"][0]["value"] if one is not None], rel=1e-6
    )
    assert [[47.0, 49.0, "NaN 47–49"]] == loss["nonfinite"]
    assert {"restart", "checkpoint", "evaluation", "incident"} == {marker[0] for marker in loss["markers"]}
    assert {"incident"} == {marker[0] for marker in curves["arrival"]["grad_norm"]["markers"]}


def test_offered_axes_differ_and_curves_are_reduced_until_they_fit(connection):
    axes = {run: list(offered_axes(read_detail(connection, run))) for run in ("no-times", "no-loss", MAIN)}
    found = read_detail(connection, MAIN)
    whole, small = (embedded_curves(found, offered_axes(found), limit) for limit in (1 << 30, 80_000))

    every = ["arrival", "step", "attempt", "time"]
    assert {"no-times": ["step"], "no-loss": ["step", "time"], MAIN: every} == axes
    assert len(small) < 80_000 < len(whole)
    assert "rows stored, all drawn" in whole
    assert "rows drawn as" in json.loads(small)["step"]["grad_norm"]["notice"]


@pytest.mark.thorough
def test_run_of_100_000_steps_has_a_report_of_at_most_3_mb(opened):
    steps = 100_000
    step, random = np.arange(steps), np.random.default_rng(1)
    common = {"ts": START + step * 500_000, "attempt": step * 3 // steps, "ordinal": step}
    names = ("loss", "grad_norm")  # more curves have fewer points: see the test above
    rows = pa.concat_tables([scalars("long", name, step, random.normal(3, 0.1, steps), **common) for name in names])
    nan = {"severity": "critical", "rule": "AnomalyNan", "op": "nans"}
    places = [(at, at * 3 // steps) for at in range(0, steps, 50)]
    firings = [event("long", "anomaly", at, START, attempt=one, tensor=f"layers.{at}", **nan) for at, one in places]
    row = run_row("long", "completed", planned_steps=steps, config=json.dumps({"notes": "x" * 90_000}))
    store = opened(runs=row, scalars=rows, events=events(firings))
    html = report(store, "long", made_at=NOW, source="history")

    assert 1_000_000 < len(html.encode()) <= LARGEST_BYTES
    assert "100,000 rows drawn as " in html


def test_service_sends_the_report_as_a_file_that_is_not_cached(store_path):
    site = Site(store_path, clock=lambda: NOW)
    found = site.respond(("runs", "one-row", "report"), {})

    assert 200 == found.status
    assert "attachment; filename*=UTF-8''one-row.html" == found.headers["Content-Disposition"]
    assert "script-src 'sha256-" in found.headers["Content-Security-Policy"]
    assert found is not site.respond(("runs", "one-row", "report"), {})
    assert 404 == site.respond(("runs", "no such run", "report"), {}).status


def test_equal_consecutive_events_are_one_line(connection):
    (line, *_) = read_detail(connection, MAIN).lines
    lines = [
        dataclasses.replace(line, step=step, text=text, tensor=None)
        for step, text in ((1, "saved checkpoint-1"), (2, "saved checkpoint-2"), (3, "attempt 3 begins"), (4, "saved"))
    ]

    assert ["saved checkpoint-1 (2 times, until step 2)", "attempt 3 begins", "saved"] == [
        one.text for one in condensed(lines)
    ]


@pytest.mark.parametrize("run", few(1, [MAIN, HOSTILE, "no-loss", "mamba2-370m-32k-ctx"]))
def test_fragment_for_notebooks_needs_no_script(connection, run):
    content = read_content(connection, run, made_at=NOW, source="history")
    found = Reader(fragment(content))

    assert LEADS[run] in found.text
    assert not {"script", "link", "iframe"} & {tag for tag, _ in found.elements}
    assert (run not in {"no-loss", "mamba2-370m-32k-ctx"}) == any(tag == "svg" for tag, _ in found.elements)


def test_charts_of_the_file_can_be_zoomed_without_a_network(made, tmp_path, require_server):
    file = tmp_path / "report.html"
    file.write_text(made(MAIN), encoding="utf-8")
    notice = "document.querySelector('#chart-loss .notice').textContent"
    with browser(require_server("chromium"), tmp_path / "profile") as shown:
        shown.call("Network.enable")
        limits = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        shown.call("Network.emulateNetworkConditions", offline=True, **limits)
        pictures = []
        for theme in ("light", "dark"):
            shown.look(1100, 900, theme)
            shown.open(file.as_uri())
            shown.wait("document.querySelectorAll('.uplot').length === 7")
            shown.drain(0.2)
            pictures.append(shown.picture())
        assert "138 rows stored, all drawn" in shown.run(notice)
        assert shown.run("document.documentElement.scrollWidth <= innerWidth")
        left, right = (shown.place("#chart-loss .u-over", across=share) for share in (0.4, 0.6))
        shown.click_at(*left, to=right)
        shown.wait(f"{notice}.includes('points of the report in this window')")
        shown.press("0")
        shown.wait(f"!{notice}.includes('in this window')")
        shown.click("#toolbar [data-axis=time]")
        shown.wait("location.search === '?axis=time'")
        shown.press("T")
        shown.wait("document.documentElement.dataset.theme === 'light'")

    assert pictures[0] != pictures[1]
    assert [] == shown.problems
