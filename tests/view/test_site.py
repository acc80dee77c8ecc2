"""Pages of runs of any shape: a page for each, numbers as in SQL, hostile names as text, and no request elsewhere."""

import hashlib
import json
import re
import struct
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.properties import few
from tests.view import training
from tests.view.training import HOSTILE, MAIN, START, Size, event, events, rank_scalars, run_row, scalars, trajectory

import rankscope_view
from rankscope_storage.api.summaries import AnomalyRow
from rankscope_view.assets import ASSETS, UPLOT
from rankscope_view.data.incidents import incidents, shared_anomalies
from rankscope_view.data.ranks import RankOrder, RankRow, SlowRank, rank_table
from rankscope_view.data.runs import RunQuery, run_list
from rankscope_view.pages.format import count, measure, short
from rankscope_view.site import Site

VOID = {"meta", "link", "input", "br", "path", "rect", "th"}  # the end of th need not be written
NOW = START / 1e6 + 6000


class Reader(HTMLParser):
    """Elements and visible text of a page; fails if elements are not nested properly."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.words = list[str](), list[str]()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
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


RUNS = [MAIN, "only-nan", HOSTILE, "no-loss", "no-times", "mamba2-370m-32k-ctx", "one-row"]


@pytest.mark.usual(10)
@pytest.mark.parametrize("run", few(4, RUNS))
@pytest.mark.parametrize("page", [(), ("events",), ("tensors",), ("ranks",), ("incidents",)])
def test_run_of_any_shape_has_its_pages(site, run, page):
    found = read(site, "runs", run, *page)

    assert any(tag == "h1" for tag, _ in found.elements) or page
    assert "<script>alert" not in site.respond(("runs", run, *page), {}).body.decode()


def test_run_page_has_charts_on_each_axis_without_scripts(site):
    for axis in ("attempt", "arrival", "time", "unknown"):
        found = read(site, "runs", MAIN, axis=axis, smooth="average", strength="7", log="1")

        assert len([one for tag, one in found.elements if tag == "svg" and one.get("class") == "chart"]) >= 2
        assert not any(tag == "script" and not one.get("src") for tag, one in found.elements)


def test_header_names_a_change_only_if_it_is_one(stored):
    rise, warm_up = np.r_[np.full(101, 1.9), np.geomspace(1.9, 37.0, 99)], np.linspace(0.0, 0.1, 161)
    cases = {
        "spike": ("loss", np.where(np.arange(200) == 150, 113.0, 2.0), ""),
        "noise": ("loss", np.random.default_rng(2).normal(2.0, 0.2, 200), ""),
        "rise": ("loss", rise, "median of 5 rows: 1.958 to 34.82 in 100 rows"),
        "warm-up": ("learning_rate", np.r_[warm_up, np.full(39, 0.1)], "constant in 40 rows"),
        "constant": ("learning_rate", np.full(200, 0.1), "constant"),
        "speed": ("step_seconds", np.random.default_rng(8).uniform(1.9, 3.9, 200), "median, newest 20 steps"),
    }
    tables = [
        scalars(run, name, np.arange(200), values, incarnation=f"{run}-0", ts=START + np.arange(200))
        for run, (name, values, _) in cases.items()
    ]
    states = [run_row(run, "running", last_step=199) for run in ("warm-up", "constant", "speed")]
    site = Site(stored(scalars=pa.concat_tables(tables), runs=pa.concat_tables(states)))
    for run, (name, _, line) in cases.items():
        page = site.respond(("runs", run), {}).body.decode()
        found = re.findall(f'data-value="{name}".*?</b>.*?<span[^>]*>([^<]*)</span>', page, re.DOTALL)

        assert [line] == found, run


def test_page_of_ranks_names_a_rank_that_was_slow_and_its_own_age(stored):
    message = "rank 1 is slow in data wait: the others wait 0.6 s a step, 74 % of the time, since step 45"
    known = {"rule": "SlowRank", "rank": 1, "op": "data_wait", "message": message, "ts_origin": "service"}
    states = [
        event("r", "incident", 57, START + at, **known, details={"key": "k", "state": state, "last_step": last})
        for at, (state, last) in enumerate((("opened", 57), ("resolved", 77)))
    ]
    size = Size(ranks=2, layers=1, steps=60)
    rows = {"scalars": rank_scalars("r", size, trajectory(size)), "runs": run_row("r", "running", last_step=59)}
    body = Site(stored(**rows, events=events(states))).respond(("runs", "r", "ranks"), {}).body.decode()
    page, past = Reader(body), "Rank 1 was slow in data wait: the others waited 0.6 s a step, 74 % of the time"

    assert f"{past}, since step 45 until about step 77 In attempt 0. Incident 1" in page.text
    assert "/runs/r/incidents/k" in [one.get("href") for _, one in page.elements]
    assert float(re.findall(r'data-seen="([0-9.]+)"', body)[0]) >= START / 1e6


def test_only_a_live_run_states_since_which_step_it_is_slower(stored):
    steps = np.arange(200)
    batches = [
        {"runs": run_row(run, state, last_step=199), "scalars": scalars(run, "step_seconds", steps, times)}
        for times in (np.where(steps < 160, 1.0, 0.89),)
        for run, state in (("ended", "completed"), ("live", "running"))
    ]
    site = Site(stored(*batches))
    ended, live = (read(site, "runs", run).text for run in ("ended", "live"))

    assert "since step" not in ended
    assert "median, newest 20 steps, −11 % since step 160" in live
    assert "0.8900 s/step median, newest 20 steps" in ended


def test_events_are_events_and_restarts_are_counted(site):
    """Each logged step is a line only if steps are chosen. A launch and an exit are no restart."""
    run, log, steps = read(site, "runs", MAIN), read(site, "runs", MAIN, "events"), ("runs", MAIN, "events")

    assert "loss 2.809, grad 0.5963" not in run.text
    assert "loss 2.809, grad 0.5963" not in log.text
    assert "loss 2.809, grad 0.5963" in read(site, *steps, group="step").text
    assert "Restart 2 " in log.text
    assert "Restart" not in read(site, "runs", "mamba2-370m-32k-ctx", "events").text


def test_list_shows_the_numbers_of_its_rows(site, connection):
    found = read(site)

    for row in run_list(connection, RunQuery()).rows:
        assert measure(row.loss) in found.text
        assert ("–" if row.step is None else count(row.step)) in found.text


def test_stalled_run_has_neither_a_speed_nor_a_time_that_is_left(site):
    text = read(site, q="qwen-moe").text

    assert "Stalled 299 / 6,000 5 %" in text
    assert not {"left", "tok/s"} & set(text.split())


def test_texts_of_the_store_are_escaped_on_every_page(stored):
    mark = '"><b id=pwn>'
    details = {"key": "k", "state": "opened", "where": [mark]}
    rule = {"rule": mark, "kind": mark, "tensor": f"{mark}.7.w", "message": mark, "severity": "critical", "rank": 0}
    listed = [event(mark, "anomaly", 8, START, op="norm", value=9.0, baseline=1.0, **rule)]
    listed += [event(mark, "incident", 8, START, details=details, **rule), event(mark, "note", 8, START, message=mark)]
    names = [scalars(mark, name, np.arange(9), 2.0, labels=json.dumps({mark: mark})) for name in ("loss", mark)]
    config = json.dumps({mark: mark, "serve": {}, "argv": [mark]})
    texts = {"reason": mark, "note": f"{mark}\r\n2", "tags": json.dumps({mark: mark}), "config": config}
    norms = {"run": mark, "tensor": [f"{mark}.7.w"], "kind": mark, "rank": 0, "step": 8, "norm": 9.0, "attempt": 0}
    tables = {
        "scalars": pa.concat_tables(names),
        "events": events(listed),
        "tensor_stats": training.rows("tensor_stats", **norms),
    }
    others = {"runs": run_row("b", mark, last_step=8), "scalars": scalars("b", "loss", np.arange(9), 2.0)}
    site = Site(stored({"runs": run_row(mark, mark, last_step=8, planned_steps=9, **texts), **tables}, others))
    pages = ((), ("ranks",), ("incidents",), ("incidents", "k"), ("events",), ("tensors",), ("report",))
    found = [read(site, q=mark), read(site, "compare", a=mark, b="b"), read(site, "compare", run=mark)]
    found += [read(site, "runs", mark, *page, kind=mark, tensor=f"{mark}.7.w", q=mark) for page in pages]
    found += [Reader(site.respond((), {}, (mark,)).body.decode())]

    for one in found:
        assert mark in one.text
        assert "\\r" not in one.text
        assert not any(attributes.get("id", "").startswith("pwn") for _, attributes in one.elements)


def test_only_own_svg_and_the_files_of_a_report_are_marked_as_safe():
    """Texts of a store cannot reach these places."""
    folder = Path(rankscope_view.__file__).parent
    marked = {
        f"{path.relative_to(folder)}: {found}"
        for path in folder.rglob("*.*")
        if path.suffix in {".py", ".html"}
        for found in re.findall(r"\{\{[^}]*\|safe[^}]*\}\}|autoescape[^a-z]false|Markup\(", path.read_text())
    }

    report = {f"templates/report.html: {{{{ {name}|safe }}}}" for name in ("sheet", "document", "script")}
    own = {"templates/macros.html: {{ shapes.get(name, shapes.other)|safe }}", "pages/rendering.py: Markup("}
    assert own | report | {"templates/report.html: {{ scripts[0]|safe }}"} == marked


def test_pages_request_nothing_from_elsewhere_and_have_no_inline_style(site):
    from rankscope_view.site import HEADERS

    policy = HEADERS["Content-Security-Policy"]
    pages = ("events", "tensors", "ranks", "incidents", "incidents/a1")
    assert "default-src 'none'" in policy
    assert not re.search("unsafe|https?:", policy)
    for segments in ((), ("runs", MAIN), *(("runs", MAIN, *page.split("/")) for page in pages)):
        for _, attributes in read(site, *segments).elements:
            assert "style" not in attributes
            assert not any(name.startswith("on") for name in attributes)
            assert all((attributes.get(name) or "/").startswith(("/", "#")) for name in ("src", "href"))


def test_prefix_is_in_every_address(store_path):
    addresses = [one.get("href") for _, one in read(Site(store_path, base="/prefix"), "runs", MAIN).elements]

    assert any(addresses)
    assert all(address.startswith("/prefix/") for address in addresses if address)


def test_curve_is_json_without_nan_or_csv_with_every_stored_row(site):
    found = site.respond(("data", "curve"), {"run": MAIN, "name": "loss", "axis": "arrival", "markers": "1"})
    curve = json.loads(found.body, parse_constant=pytest.fail)

    assert "application/json" == found.type
    assert [[47.0, 49.0, "NaN 47–49"]] == curve["nonfinite"]
    assert {"restart", "checkpoint", "evaluation", "incident"} == {marker[0] for marker in curve["markers"]}
    lines = site.respond(("data", "curve.csv"), {"run": MAIN, "name": "loss"}).body.decode().splitlines()
    assert 139 == len(lines)
    assert lines[0].startswith("attempt,step,cumulative_step,time,loss")


def test_incident_page_has_its_first_cause_its_growth_and_the_sql_behind_it(site, connection):
    text = read(site, "runs", MAIN, "incidents", "a1").text
    (statement,) = re.findall(r"SELECT step, rank.*?, rank(?= )", f"{text} ".replace(chr(10), " "))
    rows = connection.query(statement).to_pylist()
    steps = connection.query(
        "SELECT max(step) FILTER (step < (SELECT min(step) FROM events WHERE type = 'anomaly' AND run = $run "
        "AND attempt = 0)) AS safe FROM events WHERE run = $run AND type = 'checkpoint' AND attempt = 0",
        {"run": MAIN},
    )["safe"].to_pylist()

    for words in ("became NaN", f"of {len(rows)} anomalies", "NaN in 112 elements · first cause", "It grew before:"):
        assert words in text
    for words in ("incident opened", "attempt 1 was started", f"Resume from the checkpoint of step {steps[0]}."):
        assert words in text
    assert "layers.1.mlp.down_proj.weight" in {row["tensor"] for row in rows}
    assert "× baseline" in text.partition("Causal order")[2]  # the first sign
    assert 404 == site.respond(("runs", MAIN, "incidents", "unknown"), {}).status


def test_incident_lists_no_anomalies_of_an_incident_that_is_over(connection):
    """The resolved incident of step 186 is within the steps that the page of step 216 shows."""
    (one,) = [each for each in incidents(connection, [MAIN])[MAIN] if each.key == "a1"]
    over = replace(one, key="b", step=186, last_step=188, tensor="1.bias", states=((0.0, "opened"), (1.0, "resolved")))
    later = replace(one, key="c", step=216, last_step=216, tensor="5.bias")
    row = AnomalyRow(**{each.name: getattr(one, each.name, None) for each in fields(AnomalyRow)})
    rows = [replace(row, step=step, tensor=tensor) for step in (186, 188) for tensor in ("1.bias", "2.bias")]
    rows += [replace(row, step=step, tensor="5.bias") for step in (216, 217, 240)]

    shares = shared_anomalies(rows, (over, later))

    assert [216, 217, 240] == [each.step for each in shares[later.key]]
    assert [186, 186, 188, 188] == [each.step for each in shares[over.key]]


def test_incident_page_has_the_anomalies_after_its_last_report(stored):
    """A service reports when it announces an incident, not at later firings. A person has closed it then."""
    nan = {"rule": "AnomalyNan", "severity": "critical", "rank": 1, "tensor": "h.1.up.weight", "op": "nans"}
    listed = [event("r", "anomaly", step, step, kind="grad_reduced", value=4.0, **nan) for step in range(90, 161)]
    for at, state in ((91, "opened"), (94, "notified"), (200, "closed")):
        known = {"key": "n", "last_step": min(at, 93), "events": 4, "state": state}
        listed.append(event("r", "incident", 90, at, details=known, **nan))
    listed.append(event("r", "phase", 80, 80, rank=0, message="checkpoint", details={"phase": "checkpoint"}))
    site = Site(stored(events=events(listed), scalars=scalars("r", "loss", np.arange(161), 2.0, ts=START)))
    found = read(site, "runs", "r", "incidents", "n")

    assert "Resume from the checkpoint of step 80." in found.text
    assert "First of 71 anomalies in steps 90 to 160." in found.text
    assert "AND step BETWEEN 90 AND 160" in found.text
    assert "rankscope anomalies r --steps 90:160" in found.text
    assert {("30", "160")} == {(one["data-from"], one["data-to"]) for _, one in found.elements if "data-from" in one}
    assert "at step 90 90 0 71 1970" in read(site, "runs", "r", "incidents").text
    assert " 71 anomalies · " in read(site, "runs", "r", "report").text


def test_figures_of_a_run_equal_sql(site, connection):
    found = read(site, "runs", MAIN)
    values = {one["data-value"] for tag, one in found.elements if one.get("data-value")}
    of_run = "scalars WHERE run = $run AND attempt = 2"
    newest = f"SELECT max(step) FROM {of_run} AND name = "
    by_step = f"SELECT name, step, avg(value) AS mean FROM {of_run} GROUP BY ALL"
    since = f"({newest} 'tokens_per_second') - 20"
    queries = (
        f"SELECT name, avg(value) AS found FROM {of_run} AND step = ({newest} 'loss') GROUP BY name",
        f"SELECT name, median(mean) AS found FROM ({by_step}) WHERE step > {since} GROUP BY name",
        f"SELECT 'ranks' AS name, count(DISTINCT rank) AS found FROM {of_run} AND name = 'tokens_per_second'",
    )
    means, speeds, ranks = (
        {row["name"]: row["found"] for row in connection.query(query, {"run": MAIN}).to_pylist()} for query in queries
    )

    assert {"step", "loss", "perplexity", "grad_norm", "tokens_per_second", "step_seconds"} <= values
    for name in ("loss", "grad_norm"):
        assert measure(means[name]) in found.text
    assert measure(speeds["step_seconds"]) in found.text
    assert "Peaks at checkpoints are normal." in found.text.partition("Step time")[2]
    assert "Dips at checkpoints are normal." not in found.text.partition("Step time")[2]
    assert measure(float(np.exp(means["loss"]))) in found.text
    assert short(ranks["ranks"] * speeds["tokens_per_second"]) in found.text


def test_ranks_have_the_order_of_the_address_and_silent_ones_are_named(site, connection):
    slow = SlowRank(row=1, seconds=0.9, share=0.2, phase="forward", steps=20, pauses=0)
    rows = [RankRow(rank=0, host="h0", against_median=0.0), RankRow(rank=1, host="h1", against_median=0.2, slow=slow)]
    table = replace(rank_table(connection, MAIN), rows=tuple(rows))

    firsts = {order: table.ordered(RankOrder(order)).rows[0].rank for order in ("rank", "worst", "host")}
    assert {"rank": 0, "worst": 1, "host": 0} == firsts
    assert "Rank 1 is silent" in read(site, "runs", MAIN, "ranks").text


@pytest.mark.parametrize("others", ["no-loss", HOSTILE, MAIN])
def test_any_two_runs_can_be_compared(site, others):
    found = read(site, "compare", a=MAIN, b=others)

    assert "Summary" in found.text
    assert "no-loss" in read(site, "compare", run=MAIN).text, "without a second run, the others are offered"
    assert 404 == site.respond(("compare",), {"a": MAIN, "b": "no such run"}).status
    assert ("The runs are equal" in found.text) is (others == MAIN)


def test_comparison_shows_a_ruined_run_and_digits_that_differ(stored):
    opened = {"rule": "LossNan", "severity": "critical", "op": "loss", "details": {"key": "k", "state": "opened"}}
    batches = []
    for run, rate in (("a", 0.0099986), ("b", 0.0099991)):
        tables = [scalars(run, name, np.arange(9), value) for name, value in (("loss", 2.0), ("learning_rate", rate))]
        listed = events([event(run, "incident", 8, START, **opened)] if run == "b" else [])
        row = run_row(run, "completed", last_step=8)
        batches.append({"scalars": pa.concat_tables(tables), "runs": row, "events": listed})
    site = Site(stored(*batches))
    found = read(site, "compare", a="a", b="b")
    (state,) = [one["title"] for _, one in found.elements if one.get("class") == "bad" and "title" in one]

    assert "Completed, 1 open incident" == state
    assert " 1 anomaly. " in read(site, "runs", "b", "incidents", "k").text
    assert "Completed Completed, 1 open incident" in found.text
    assert "Learning rate: 0.0099986 against 0.0099991, a difference of 5e-05 of the value." in found.text


def test_comparison_has_a_named_line_for_each_key_of_a_metric(stored):
    lines = [
        scalars(run, "queue", np.arange(9), at, labels=f'{{"key":"{key}"}}')
        for run in "ab"
        for at, key in enumerate("xy")
    ]
    rows = [run_row(run, "completed", last_step=8) for run in "ab"]
    site = Site(stored(scalars=pa.concat_tables(lines), runs=pa.concat_tables(rows)))
    answer = site.respond(("data", "compare"), {"a": "a", "b": "b", "name": "queue"}).body
    named = {line["label"]: line["value"][-1] for line in json.loads(answer)["lines"]}

    assert {"A, key x": 0, "A, key y": 1, "B, key x": 0, "B, key y": 1} == named


def grid(site, **query):
    body = site.respond(("data", "grid"), {"run": MAIN, "kind": "grad_unreduced"} | query).body
    (length,) = struct.unpack("<I", body[:4])
    header = json.loads(body[4 : 4 + length])
    return header, np.frombuffer(body[4 + length :], np.uint8).reshape(len(header["rows"]), len(header["steps"]))


def test_grid_marks_the_first_nan_and_its_tensor(site, course):
    header, cells = grid(site)
    row, column = header["firstBad"]

    assert (14, 138) == cells.shape
    assert "layers.1.mlp.down_proj.weight" == header["names"][header["rows"][row][2]]
    assert course.nan_from == header["steps"][column]
    assert 255 == cells[row, column]


def test_cell_value_equals_sql(site, connection):
    query = {"run": MAIN, "kind": "grad_unreduced", "op": "norm", "tensors": '["lm_head.weight"]'}
    found = json.loads(site.respond(("data", "cell"), query | {"column": "118"}).body)
    expected = connection.query(
        "SELECT norm AS value FROM tensor_stats WHERE run = $run AND tensor = $tensor AND attempt = $attempt "
        "AND step = $step AND rank = $rank",
        {"run": MAIN} | {name: found[name] for name in ("tensor", "attempt", "step", "rank")},
    )

    assert (2, 100) == (found["attempt"], found["step"])
    assert expected["value"].to_pylist()[0] == pytest.approx(found["value"])


def test_grid_follows_the_choices_of_the_reader(site):
    heights = {
        "q=down": 2,
        "q=x": 0,
        "order=worst": 14,
        "order=part": 14,
        "rank=1": 14,
        "op=nans": 14,
        "absolute=1": 14,
    }
    assert b'"rank 0"' in site.respond(("data", "ranks"), {"run": MAIN}).body
    assert 200 == site.respond(("data", "ranks"), {"run": "no-times", "whole": "1"}).status
    for choice, height in (heights | {"height=5": 5, "columns=5-40": 14, "rows=2-9": 7}).items():
        header, cells = grid(site, **dict([choice.split("=")]))

        assert height == len(header["rows"]) == len(cells), choice


def test_unknown_page_is_not_found(site):
    for segments in (("runs", "no such run"), ("unknown",), ("runs", MAIN, "unknown")):
        answer = site.respond(segments, {})

        assert 404 == answer.status
        assert (segments[-1] == "no such run") == ("Refresh" in answer.headers)


def test_query_with_bad_numbers_is_answered(site):
    for query in ({"from": "x", "to": "nan", "points": "-1"}, {"tail": "1e99"}, {"from": "9", "to": "3"}):
        assert 200 == site.respond(("data", "curve"), {"run": MAIN, "name": "loss"} | query).status


def test_answer_is_kept_until_the_store_changes_and_may_be_prepared(store_path, site):
    prepared = Site(store_path, clock=lambda: NOW)
    prepared.prepare()

    assert site.respond(("runs", MAIN), {}) is site.respond(("runs", MAIN), {})
    assert site.respond((), {}).body == prepared.respond((), {}).body


def test_run_named_like_a_folder_is_in_the_query_of_its_address(site):
    from rankscope_view.pages.rendering import Place

    assert "/runs/-/ranks?run=.." == Place().url("runs", "..", "ranks")
    assert 404 == site.respond(("runs", "-"), {"run": ".."}).status


def test_uplot_is_the_file_that_was_checked_and_assets_may_be_kept(site):
    found = site.respond(("assets", "0", "app.js"), {})

    assert UPLOT == {name: hashlib.sha256(ASSETS[name].read()).hexdigest() for name in UPLOT}
    assert b"MIT Licensed" in ASSETS["uPlot.iife.js"].read()[:300]
    assert (200, "text/javascript; charset=utf-8") == (found.status, found.type)
    assert "immutable" in found.headers["Cache-Control"]
    assert 404 == site.respond(("assets", "0", "../style.css"), {}).status
