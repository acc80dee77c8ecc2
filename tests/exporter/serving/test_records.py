"""The record channel over real HTTP: every status, and the rules of `committed`."""

from __future__ import annotations

import contextlib
import json

import pyarrow as pa
import pytest

from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_contract.protocol.channel import ARROW_STREAM
from rankscope_exporter.records.step_record import StepRecord

ENTRIES = (PlanEntry(kind="grad_reduced", tensor="a"), PlanEntry(kind="grad_reduced", tensor="学习 \"'"))
NUMBERS = ({"norm": 1.0, "numel": 4}, None)


@pytest.fixture
def leased(new_rank, service, until):
    """Return a rank that the service double has registered."""
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.state.lease)
    return rank


def _publish(rank, record, steps):
    for step in range(steps):
        rank.channel.publish(record(step, ENTRIES, NUMBERS))


def test_answer_contains_all_records_after_the_cursor(rank, record):
    _publish(rank, record, 5)
    got = rank.records(1)

    assert 200 == got.status
    assert [2, 3, 4] == got.seqs
    assert [2, 3, 4] == [row["step"] for row in got.rows]


def test_headers_describe_the_body(rank, record):
    _publish(rank, record, 5)
    got = rank.records(1)
    table = pa.ipc.open_stream(got.body).read_all()

    assert ARROW_STREAM == got.headers["Content-Type"]
    assert len(got.body) == int(got.headers["Content-Length"])
    assert "Transfer-Encoding" not in got.headers
    assert table.num_rows == int(got.headers["Rankscope-Rows"])
    assert ["2", "4", "4"] == [got.headers[f"Rankscope-{name}"] for name in ("First", "Last", "Head")]
    assert table["seq"].to_pylist() == list(range(2, 5))
    assert ["1", "feedc0de", "running", "0.005"] == [
        got.headers[f"Rankscope-{name}"] for name in ("Schema", "Incarnation", "State", "Ring-Fill")
    ]
    assert got.headers["Rankscope-Lost"] is None


def test_truncated_stream_is_detectable(rank, record):
    """Any truncation contradicts Content-Length; between messages, the end mark and rows are missing as well."""
    _publish(rank, record, 3)
    got = rank.records(-1)
    end_of_stream = b"\xff\xff\xff\xff\x00\x00\x00\x00"

    assert end_of_stream == got.body[-8:]
    for cut in range(len(got.body) - 1, 0, -97):
        rows = -1
        with contextlib.suppress(pa.ArrowInvalid, OSError):
            rows = pa.ipc.open_stream(got.body[:cut]).read_all().num_rows
        whole = rows == int(got.headers["Rankscope-Rows"]) and got.body[:cut].endswith(end_of_stream)
        assert not whole


def test_no_new_record_is_204_with_state_headers(rank, record):
    _publish(rank, record, 2)
    got = rank.records(1)

    assert (204, b"") == (got.status, got.body)
    assert ("1", "running") == (got.headers["Rankscope-Head"], got.headers["Rankscope-State"])
    assert got.headers["Content-Length"] is None


def test_rank_without_records_answers_204(rank):
    got = rank.records(-1)

    assert (204, "-1") == (got.status, got.headers["Rankscope-Head"])


def test_answer_has_at_least_one_record(rank, record):
    _publish(rank, record, 3)

    assert [0] == rank.records(-1, max_bytes=1).seqs


def test_unknown_incarnation_is_409_and_names_this_one(rank):
    got = rank.get("/records?incarnation=gone&after=-1")

    assert (409, "feedc0de") == (got.status, got.headers["Rankscope-Incarnation"])
    assert "feedc0de" in got.text


def test_cursor_above_the_head_is_416(rank, record):
    _publish(rank, record, 2)
    got = rank.records(2)

    assert (416, "1") == (got.status, got.headers["Rankscope-Head"])
    assert "after=2 is above the sequence number of the newest record: 1" in got.text


@pytest.mark.parametrize("headers", [{"Rankscope_Schema": "2"}, {"Rankscope_Schema": "x"}, {"Accept": "text/html"}])
def test_unsupported_type_or_schema_is_406(rank, headers):
    got = rank.records(-1, **headers)

    assert 406 == got.status
    assert "supported: 1" in got.text or ARROW_STREAM in got.text


@pytest.mark.parametrize("headers", [{"Rankscope_Schema": "1"}, {"Rankscope_Schema": "2, 1"}, {"Accept": ARROW_STREAM}])
def test_client_of_this_schema_version_is_served(rank, headers):
    assert 204 == rank.records(-1, **headers).status


@pytest.mark.parametrize(
    "query",
    ["after=x", "after=-2", "after=", "after=1e3", "max_bytes=0", "committed=-9", "after=" + "9" * 30, "after=%D9%A1"],
)
def test_invalid_parameter_is_400_and_named(rank, query):
    got = rank.get(f"/records?{query}")

    assert 400 == got.status
    assert query.partition("=")[0] in got.text


def test_overwritten_records_are_reported_as_lost(new_rank, record):
    rank = new_rank(ring_records=256)
    _publish(rank, record, 300)
    got = rank.records(9, max_bytes=1)

    assert "10-43" == got.headers["Rankscope-Lost"]
    assert [44] == got.seqs
    assert 'rankscope_dropped_total{rank="0",reason="ring_overrun",run="run-1"} 44.0' in rank.get("/metrics").text


def test_wrong_or_missing_token_is_401(new_rank):
    rank = new_rank(token="open-sesame")
    statuses = [
        rank.records(-1, **headers).status
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic open-sesame"},
            {"Authorization": "open-sesame"},
            {"Authorization": "Bearer öpen"},
            {"Authorization": "Bearer open-sesame"},
        )
    ]

    assert [401, 401, 401, 401, 401, 204] == statuses


@pytest.mark.parametrize("path", ["/metrics", "/config", "/plan/x", "/nothing"])
def test_each_page_except_healthz_needs_the_token(new_rank, path):
    rank = new_rank(token="open-sesame")

    assert 401 == rank.get(path).status
    assert 200 == rank.get("/healthz").status


def test_plan_is_served_under_its_hash_and_cacheable(rank, record):
    made = record(0, ENTRIES, NUMBERS)
    rank.channel.publish(made)
    (row,) = rank.records(-1).rows
    got = rank.get(f"/plan/{row['plan']}")

    assert Plan(ENTRIES) == Plan.from_json(got.text)
    assert row["plan"] == Plan.from_json(got.text).hash
    assert "immutable" in got.headers["Cache-Control"]


def test_unknown_plan_is_404(rank):
    assert 404 == rank.get("/plan/0123").status


def test_only_the_holder_of_the_lease_moves_committed(leased, service, record):
    _publish(leased, record, 5)
    ring = leased.channel.ring
    leased.records(-1, committed=3)
    leased.records(-1, committed=3, Rankscope_Lease="lease-0")
    leased.records(-1, committed=3, Rankscope_Lease="")

    assert -1 == ring.committed

    leased.records(3, committed=3, Rankscope_Lease=service.lease)

    assert (3, 1) == (ring.committed, ring.uncommitted)


def test_replaced_lease_does_not_move_committed(leased, service, record, until):
    """A replaced service may still poll, but its `committed` is ignored."""
    _publish(leased, record, 2)
    service.lease = "lease-2"
    leased.channel.set_phase("evaluation")
    until(lambda: leased.channel.state.lease == "lease-2")
    leased.records(-1, committed=1, Rankscope_Lease="lease-1")

    assert -1 == leased.channel.ring.committed


def test_committed_above_the_head_is_416(leased, service, record):
    _publish(leased, record, 2)
    got = leased.records(1, committed=7, Rankscope_Lease=service.lease)

    assert 416 == got.status
    assert -1 == leased.channel.ring.committed


def test_committed_is_ignored_before_the_first_lease(rank, record):
    _publish(rank, record, 2)
    rank.records(1, committed=1, Rankscope_Lease="None")

    assert -1 == rank.channel.ring.committed


def test_two_readers_are_independent(leased, service, record):
    _publish(leased, record, 4)
    first = leased.records(-1, committed=-1, Rankscope_Lease=service.lease).seqs
    leased.records(3, committed=3, Rankscope_Lease=service.lease)
    second = [leased.records(seq - 1, max_bytes=1).seqs for seq in range(4)]

    assert [0, 1, 2, 3] == first
    assert [[0], [1], [2], [3]] == second


def test_draining_rank_serves_its_records_and_then_answers_503(leased, service, record):
    _publish(leased, record, 2)
    left = leased.channel.drain(0)
    rest = leased.records(-1, Rankscope_Lease=service.lease)
    waiting = leased.records(1, committed=0, Rankscope_Lease=service.lease)
    done = leased.records(1, committed=1, Rankscope_Lease=service.lease)

    assert 2 == left
    assert (200, "draining", [0, 1]) == (rest.status, rest.headers["Rankscope-State"], rest.seqs)
    assert (204, "draining") == (waiting.status, waiting.headers["Rankscope-State"])
    assert (503, "1") == (done.status, done.headers["Rankscope-Head"])


def test_unencodable_rows_are_counted_on_the_page(rank):
    rank.channel.publish(StepRecord(ts=0, features=({"kind": "act_out", "module": "a", "value": "much"},)))
    rank.records(-1)

    assert 'reason="unencodable",run="run-1"} 1.0' in rank.get("/metrics").text


def test_healthz_and_config_show_state_and_settings(new_rank, record):
    rank = new_rank(settings={"rules": ["AnomalyNan"], "odd": float("nan"), "path": object()})
    _publish(rank, record, 2)
    health = json.loads(rank.get("/healthz").body)
    config = json.loads(rank.get("/config").body)

    assert {"status": "ok", "state": "running", "incarnation": "feedc0de", "head": 1, "readers": []} == health
    assert ("NaN", ["AnomalyNan"]) == (config["odd"], config["rules"])


def test_unknown_page_is_404_and_names_the_known_ones(rank):
    got = rank.get("/")

    assert 404 == got.status
    assert "/records" in got.text
    assert "/metrics" in got.text


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/healthz", "GET"),
        ("/records", "GET"),
        ("/plan/0123", "GET"),
        ("/metrics", "GET"),
        ("/node/metrics", "GET"),
        ("/config", "GET, PUT, POST"),
        ("/stacks", "POST"),
    ],
)
def test_405_answer_lists_the_methods_of_the_path(rank, method, path, allowed):
    got = rank.get(path, method, b"{}")
    is_allowed = method in allowed.split(", ")

    assert (got.status != 405) == is_allowed
    assert (None if is_allowed else allowed) == got.headers["Allow"]
