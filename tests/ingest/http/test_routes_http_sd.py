"""HTTP service discovery: one target per live rank, or one per node."""

from __future__ import annotations

import pytest
from tests.ingest import builders

from rankscope_ingest.http.routes import per_node, per_rank
from rankscope_ingest.runs.models import Health


def target(rank=0, health=Health.UP, **changes):
    fields = {"world_size": 8, "host": "h0", "launch_id": "l0", "url": f"http://h0:940{rank}", "node": "n0"}
    return builders.target(builders.registration(rank=rank, **(fields | changes)), health=health)


def test_per_rank_lists_each_live_rank_with_its_scheme():
    found = per_rank([target(0), target(1, url="https://[::1]:9401"), target(2, Health.GONE), target(3, served_by="x")])

    plain, secure = found
    assert {"targets": ["h0:9400"], "labels": {"job": "rankscope", "instance": "r/0"}} == plain
    labels = {"job": "rankscope", "instance": "r/1", "__scheme__": "https"}
    assert {"targets": ["[::1]:9401"], "labels": labels} == secure


def test_per_node_lists_the_page_of_the_lowest_rank():
    (found,) = per_node([target(2), target(1), target(3, Health.GONE)])

    labels = {"job": "rankscope", "instance": "r@h0", "__metrics_path__": "/node/metrics"}
    assert {"targets": ["h0:9401"], "labels": labels} == found


FAILING = [target(1, Health.FAILING), target(0, Health.FAILING)]
OLD = [target(rank, Health.FAILING) for rank in range(2)]
NEW = [target(rank, launch_id="l1", url=f"http://h0:950{rank}") for rank in range(2)]
LISTED = {
    "lowest rank is failing": ([target(0, Health.FAILING), target(1), target(2)], {"r@h0": "h0:9401"}),
    "lowest rank is gone": ([target(0, Health.GONE), target(1), target(2)], {"r@h0": "h0:9401"}),
    "lowest rank is pending": ([target(0, Health.PENDING), target(1), target(2)], {"r@h0": "h0:9401"}),
    "no healthy rank": (FAILING, {"r@h0": "h0:9400"}),
    "runs and hosts": (
        [target(0), target(0, run="s", url="http://h0:1"), target(1, host="h1", url="http://h1:2")],
        {"r@h0": "h0:9400", "s@h0": "h0:1", "r@h1": "h1:2"},
    ),
    "failed earlier launch": ([*OLD, *NEW], {"r@h0": "h0:9500"}),
    "containers with one host name": (
        [target(0), target(1), target(2, node="n1"), target(3, node="n1")],
        {"r@h0": "h0:9400", "r@h0/1": "h0:9402"},
    ),
    "rank without a node page": ([target(0, node=""), target(1)], {"r/0": "h0:9400", "r@h0": "h0:9401"}),
}


@pytest.mark.parametrize("name", LISTED)
def test_each_node_of_a_run_has_one_page(name):
    targets, expected = LISTED[name]

    assert expected == {entry["labels"]["instance"]: entry["targets"][0] for entry in per_node(targets)}
