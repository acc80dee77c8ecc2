"""HTTP service discovery: one target per live rank, or one per node."""

from __future__ import annotations

import pytest

from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.http.routes import per_node, per_rank
from rankscope_ingest.runs.models import Health, Liveness, Target


def target(rank=0, health=Health.UP, **changes):
    fields = {
        "run": "r",
        "rank": rank,
        "world_size": 8,
        "local_rank": rank,
        "host": "h0",
        "pid": 1,
        "incarnation": f"i{rank}",
        "launch_id": "l0",
        "url": f"http://h0:940{rank}",
        "node": "n0",
    }
    who = Registration(**(fields | changes))
    return Target(registration=who, attempt=0, lease="", liveness=Liveness(last_sign=0.0), health=health)


def told(found):
    return {entry["labels"]["instance"]: entry["targets"][0] for entry in found}


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


@pytest.mark.parametrize("trouble", [Health.FAILING, Health.GONE, Health.PENDING])
def test_per_node_lists_the_next_rank_if_the_lowest_fails(trouble):
    assert {"r@h0": "h0:9401"} == told(per_node([target(0, trouble), target(1), target(2)]))


def test_node_without_a_healthy_rank_is_listed():
    assert {"r@h0": "h0:9400"} == told(per_node([target(1, Health.FAILING), target(0, Health.FAILING)]))


def test_runs_and_hosts_have_separate_pages():
    found = per_node([target(0), target(0, run="s", url="http://h0:1"), target(1, host="h1", url="http://h1:2")])

    assert {"r@h0": "h0:9400", "s@h0": "h0:1", "r@h1": "h1:2"} == told(found)


def test_failed_earlier_launch_is_not_listed_with_the_current_one():
    old = [target(rank, Health.FAILING) for rank in range(2)]
    new = [target(rank, launch_id="l1", url=f"http://h0:950{rank}") for rank in range(2)]

    assert {"r@h0": "h0:9500"} == told(per_node([*old, *new]))


def test_containers_with_one_host_name_have_separate_pages():
    found = per_node([target(0), target(1), target(2, node="n1"), target(3, node="n1")])

    assert {"r@h0": "h0:9400", "r@h0/1": "h0:9402"} == told(found)


def test_ranks_without_a_node_page_are_listed_individually():
    assert {"r/0": "h0:9400", "r@h0": "h0:9401"} == told(per_node([target(0, node=""), target(1)]))
