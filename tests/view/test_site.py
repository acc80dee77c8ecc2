"""Pages of runs of any shape: a page for each, numbers as in SQL, hostile names as text, and no request elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from tests.view.training import HOSTILE, MAIN, START

from rankscope_view.assets import ASSETS, UPLOT
from rankscope_view.data.runs import RunQuery, run_list
from rankscope_view.format import count, measure
from rankscope_view.site import Site

VOID = {"meta", "link", "input", "br", "path", "rect"}
NOW = START / 1e6 + 6000


class Reader(HTMLParser):
    """Elements and visible text of a page; fails if elements are not nested properly."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        assert [] == self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert tag == self.open.pop()

    def handle_data(self, data):
        self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(word for word in self.words if word)


@pytest.fixture(scope="module")
def site(store_path):
    return Site(store_path, clock=lambda: NOW)


def read(site, *segments, **query) -> Reader:
    found = site.respond(segments, query)
    assert 200 == found.status
    return Reader(found.body.decode())


RUNS = [MAIN, "only-nan", "one-row", "no-loss", "no-times", "mamba2-370m-32k-ctx", HOSTILE]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("page", [(), ("events",)])
def test_run_of_any_shape_has_its_pages(site, run, page):
    found = read(site, "runs", run, *page)

    assert any(tag == "h1" for tag, _ in found.elements) or page
    assert "<script>alert" not in site.respond(("runs", run, *page), {}).body.decode()


@pytest.mark.parametrize("axis", ["step", "cumulative", "attempt", "arrival", "time", "unknown"])
def test_run_page_has_charts_on_each_axis_without_scripts(site, axis):
    found = read(site, "runs", MAIN, axis=axis, smooth="average", strength="7", log="1")

    assert len([one for tag, one in found.elements if tag == "svg" and one.get("class") == "chart"]) >= 2
    assert not any(tag == "script" and not one.get("src") for tag, one in found.elements)


def test_list_shows_the_numbers_of_its_rows(site, connection):
    found = read(site)

    for row in run_list(connection, RunQuery()).rows:
        assert measure(row.loss) in found.text
        assert ("–" if row.step is None else count(row.step)) in found.text


def test_pages_request_nothing_from_elsewhere_and_have_no_inline_style(site):
    for segments in ((), ("runs", MAIN), ("runs", MAIN, "events")):
        found = read(site, *segments)
        for _, attributes in found.elements:
            assert "style" not in attributes
            assert not any(name.startswith("on") for name in attributes)
            for name in ("src", "href"):
                assert (attributes.get(name) or "/").startswith(("/", "#"))


def test_prefix_is_in_every_address(store_path):
    found = read(Site(store_path, base="/prefix"), "runs", MAIN)

    addresses = [one["href"] for _, one in found.elements if one.get("href")]
    assert addresses
    assert all(address.startswith("/prefix/") for address in addresses)


def test_curve_is_json_without_nan(site):
    found = site.respond(("data", "curve"), {"run": MAIN, "name": "loss", "axis": "arrival", "markers": "1"})
    curve = json.loads(found.body, parse_constant=pytest.fail)

    assert "application/json" == found.type
    assert [[47.0, 49.0, "NaN 47–49"]] == curve["nonfinite"]
    assert {"restart", "checkpoint", "evaluation", "incident"} == {marker[0] for marker in curve["markers"]}


def test_curve_as_csv_has_every_stored_row(site):
    lines = site.respond(("data", "curve.csv"), {"run": MAIN, "name": "loss"}).body.decode().splitlines()

    assert 139 == len(lines)
    assert lines[0].startswith("attempt,step,cumulative_step,time,loss")


@pytest.mark.parametrize("segments", [("runs", "no such run"), ("unknown",), ("runs", MAIN, "unknown")])
def test_unknown_page_is_not_found(site, segments):
    assert 404 == site.respond(segments, {}).status


@pytest.mark.parametrize(
    "query", [{"from": "x", "to": "nan", "points": "-1"}, {"tail": "1e99"}, {"from": "9", "to": "3"}]
)
def test_query_with_bad_numbers_is_answered(site, query):
    assert 200 == site.respond(("data", "curve"), {"run": MAIN, "name": "loss"} | query).status


def test_answer_is_kept_until_the_store_changes(site):
    assert site.respond(("runs", MAIN), {}) is site.respond(("runs", MAIN), {})


def test_run_named_like_a_folder_is_in_the_query_of_its_address(site):
    from rankscope_view.pages.parts import Place

    assert "/runs/-/ranks?run=.." == Place().url("runs", "..", "ranks")
    assert 404 == site.respond(("runs", "-"), {"run": ".."}).status


def test_policy_permits_only_files_of_the_page():
    from rankscope_view.site import HEADERS

    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert not re.search("unsafe|https?:", policy)


def test_uplot_is_the_file_that_was_checked():
    found = {name: hashlib.sha256(ASSETS[name].read()).hexdigest() for name in UPLOT}

    assert UPLOT == found
    assert b"MIT Licensed" in ASSETS["uPlot.iife.js"].read()[:300]


def test_asset_is_served_by_any_digest_and_may_be_kept(site):
    found = site.respond(("assets", "0", "app.js"), {})

    assert (200, "text/javascript; charset=utf-8") == (found.status, found.type)
    assert "immutable" in found.headers["Cache-Control"]
    assert 404 == site.respond(("assets", "0", "../style.css"), {}).status
