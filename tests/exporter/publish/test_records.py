"""The record channel over real HTTP: every status, and the rules of `committed`."""

import json

import pytest

from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_contract.wire.channel import ARROW_STREAM
from rankscope_exporter.records.record import StepRecord

ENTRIES = (PlanEntry(kind="grad_reduced", tensor="a"), PlanEntry(kind="grad_reduced", tensor="学习 \"'"))
NUMBERS = ({"norm": 1.0, "numel": 4}, None)


def _publish(rank, record, steps):
    for step in range(steps):
        rank.channel.publish(record(step, ENTRIES, NUMBERS))


def test_answer_has_all_records_after_the_cursor_and_describes_its_body(rank, record):
    _publish(rank, record, 5)
    got = rank.records(1)

    assert (200, ARROW_STREAM) == (got.status, got.headers["Content-Type"])
    assert [(2, 2), (3, 3), (4, 4)] == [(row["seq"], row["step"]) for row in got.rows]
    assert len(got.body) == int(got.headers["Content-Length"])
    assert "Transfer-Encoding" not in got.headers
    shown = {"Rows": "3", "First": "2", "Last": "4", "Head": "4", "Schema": "1", "Incarnation": "feedc0de"}
    shown |= {"State": "running", "Ring-Fill": "0.005", "Lost": None}
    assert shown == {name: got.headers[f"Rankscope-{name}"] for name in shown}


def test_no_new_record_is_204_with_state_headers(rank):
    empty = rank.records(-1)
    rank.fill(2)
    got = rank.records(1)

    assert (204, "-1") == (empty.status, empty.headers["Rankscope-Head"])
    assert (204, b"", None) == (got.status, got.body, got.headers["Content-Length"])
    assert ("1", "running") == (got.headers["Rankscope-Head"], got.headers["Rankscope-State"])


def test_unknown_incarnation_is_409_and_cursor_above_the_head_is_416(leased, service):
    leased.fill(2)
    gone = leased.get("/records?incarnation=gone&after=-1")
    above = leased.records(2)
    committed = leased.records(1, committed=7, Rankscope_Lease=service.lease)

    assert (409, "feedc0de") == (gone.status, gone.headers["Rankscope-Incarnation"])
    assert "feedc0de" in gone.text
    assert (416, "1") == (above.status, above.headers["Rankscope-Head"])
    assert "after=2 is above the sequence number of the newest record: 1" in above.text
    assert (416, -1) == (committed.status, leased.channel.ring.committed)


def test_only_this_type_and_schema_version_are_served(rank):
    for headers in ({"Rankscope_Schema": "2"}, {"Rankscope_Schema": "x"}, {"Accept": "text/html"}):
        got = rank.records(-1, **headers)
        assert 406 == got.status
        assert "supported: 1" in got.text or ARROW_STREAM in got.text
    for headers in ({"Rankscope_Schema": "1"}, {"Rankscope_Schema": "2, 1"}, {"Accept": ARROW_STREAM}):
        assert 204 == rank.records(-1, **headers).status


AFTER = ("x", "-2", "", "1e3", "9" * 30, "%D9%A1")


def test_invalid_parameter_is_400_and_named(rank):
    for query in ("max_bytes=0", "committed=-9", *(f"after={cursor}" for cursor in AFTER)):
        got = rank.get(f"/records?{query}")
        assert 400 == got.status
        assert query.partition("=")[0] in got.text


def test_each_page_except_healthz_needs_the_right_token(new_rank):
    rank = new_rank(token="open-sesame")
    for token in (None, "Bearer wrong", "Basic open-sesame", "open-sesame", "Bearer öpen"):
        assert 401 == rank.records(-1, **({} if token is None else {"Authorization": token})).status
    for path in ("/metrics", "/config", "/plan/x", "/nothing"):
        assert 401 == rank.get(path).status

    assert 204 == rank.records(-1, Authorization="Bearer open-sesame").status
    assert 200 == rank.get("/healthz").status


def test_plan_is_served_under_its_hash_and_cacheable(rank, record):
    _publish(rank, record, 1)
    (row,) = rank.records(-1).rows
    got = rank.get(f"/plan/{row['plan']}")

    assert Plan(ENTRIES) == Plan.from_json(got.text)
    assert row["plan"] == Plan.from_json(got.text).hash
    assert "immutable" in got.headers["Cache-Control"]
    assert 404 == rank.get("/plan/0123").status


def test_only_the_holder_of_the_lease_moves_committed(leased, rank, service, until):
    """A replaced service may still poll, but its `committed` is ignored."""
    ring = leased.channel.ring
    for one in (leased, rank):
        one.fill(5)
    leased.records(-1, committed=3)
    for lease in ("lease-0", ""):
        leased.records(-1, committed=3, Rankscope_Lease=lease)
    rank.records(1, committed=1, Rankscope_Lease="None")  # it has no lease yet

    assert (-1, -1) == (ring.committed, rank.channel.ring.committed)

    leased.records(3, committed=3, Rankscope_Lease=service.lease)

    assert (3, 1) == (ring.committed, ring.uncommitted)

    service.lease = "lease-2"
    leased.channel.set_phase("evaluation")
    until(lambda: leased.channel.lease == "lease-2")
    leased.records(-1, committed=4, Rankscope_Lease="lease-1")

    assert 3 == ring.committed


def test_draining_rank_serves_its_records_and_then_answers_503(leased, service):
    leased.fill(2)
    left = leased.channel.drain(0)
    rest = leased.records(-1, Rankscope_Lease=service.lease)
    waiting = leased.records(1, committed=0, Rankscope_Lease=service.lease)
    done = leased.records(1, committed=1, Rankscope_Lease=service.lease)

    assert 2 == left
    assert (200, "draining", [0, 1]) == (rest.status, rest.headers["Rankscope-State"], rest.seqs)
    assert (204, "draining") == (waiting.status, waiting.headers["Rankscope-State"])
    assert (503, "1") == (done.status, done.headers["Rankscope-Head"])


def test_row_that_does_not_fit_its_columns_is_counted_on_the_page(rank):
    """One invalid row must not block the records after it."""
    good = {"kind": "act_out", "module": "a", "value": 1.0}
    wrong = [{**good, **one} for one in ({"index": 1 << 40}, {"value": "much"}, {"module": "\ud800"})]
    for rows in ((wrong[0], good, wrong[1]), (wrong[2], {"kind": "act_out", "value": 1.0}, good)):
        rank.channel.publish(StepRecord(ts=0, features=rows))
    found = [[{name: row[name] for name in good} for row in record["features"]] for record in rank.records(-1).rows]

    assert [[good], [good]] == found
    assert 4.0 == rank.dropped("unencodable")


def test_healthz_and_config_show_state_and_settings(new_rank):
    rank = new_rank(settings={"rules": ["AnomalyNan"], "odd": float("nan"), "path": object()})
    rank.fill(2)
    health = json.loads(rank.get("/healthz").body)
    config = json.loads(rank.get("/config").body)

    assert {"status": "ok", "state": "running", "incarnation": "feedc0de", "head": 1, "readers": []} == health
    assert ("NaN", ["AnomalyNan"]) == (config["odd"], config["rules"])


ALLOWED = dict.fromkeys(("/healthz", "/records", "/plan/0123", "/metrics"), "GET, HEAD")
ALLOWED |= {"/config": "GET, PUT, POST, HEAD", "/stacks": "POST"}


def test_head_has_the_headers_of_get_and_no_body(rank):
    for path in ("/metrics", "/healthz"):
        head, whole = rank.get(path, "HEAD"), rank.get(path)

        assert (200, b"", whole.headers["Content-Type"]) == (head.status, head.body, head.headers["Content-Type"])
        assert len(whole.body) == pytest.approx(int(head.headers["Content-Length"]), abs=100)  # the page has CPU times


def test_405_answer_lists_the_methods_and_404_answer_the_pages(rank):
    unknown = rank.get("/")
    assert 404 == unknown.status
    assert "/records" in unknown.text
    assert "/metrics" in unknown.text

    methods = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
    for path, allowed in ALLOWED.items():
        refused = [method for method in methods if method not in allowed.split(", ")]
        got = {method: rank.get(path, method, b"{}") for method in methods}

        assert refused == [method for method, answer in got.items() if answer.status == 405]
        assert refused == [method for method, answer in got.items() if answer.headers["Allow"] == allowed]
        assert refused == [method for method, answer in got.items() if answer.headers["Allow"] is not None]
