"""Processes killed with SIGKILL: a spool keeps each published record, and without one the lost records are counted."""

import json

import pytest
from tests.end_to_end.lives import attempts, gaps, stored, targets, until


def test_killed_rank_with_a_live_service_loses_no_record(service, host):
    service.spools = (host.spool,)
    service.start()
    life = host.start(service, 0, "first", steps=10_000, pause=0.002, end="linger")
    until(lambda: life.published > 300)
    life.kill()
    service.wait_for(lambda: service.runs()[0]["state"] == "failed")
    service.wait_for(lambda: host.left() == [])
    run = service.runs()[0]
    page = service.get("/metrics")

    assert 0 == service.stop(), service.log()
    published = list(range(life.published))
    assert published == stored(service.store)["first-0"][: len(published)]
    # The rank may be killed before it writes the number of the last record to the file.
    assert len(stored(service.store)["first-0"]) - len(published) in {0, 1}
    assert [] == gaps(service.store)
    assert 0 == run["records_lost"]
    assert 'rankscope_ingest_lost_records_total{run="r"} 0.0' in page
    assert "stopped responding" in run["reason"]


@pytest.mark.thorough
def test_rank_killed_together_with_the_service_is_stored_by_the_next_one(service, host):
    service.spools = (host.spool,)
    service.start()
    lives = [host.start(service, rank, "first", steps=10_000, pause=0.002, end="linger") for rank in range(2)]
    until(lambda: all(life.published > 200 for life in lives))
    service.kill()
    lives[1].kill()
    lost = lives[1].published
    service.start()
    service.wait_for(lambda: host.left() == ["first-0"])
    lives[0].kill()
    service.wait_for(lambda: host.left() == [])

    assert 0 == service.stop(), service.log()
    rows = stored(service.store)
    assert list(range(lost)) == rows["first-1"][:lost]
    assert list(range(lives[0].published)) == rows["first-0"][: lives[0].published]
    assert all(seqs == list(range(len(seqs))) for seqs in rows.values())
    assert [] == gaps(service.store)
    assert {"first": (0, "failed")} == attempts(service.store)


def test_service_killed_before_the_commit_of_an_exited_rank_loses_nothing(service, host):
    """The exit report is in the spool too: the run has completed, although no service received the report."""
    service.spools = (host.spool,)
    service.flush_after_seconds = 600.0
    service.start()
    lives = [host.start(service, rank, "first", steps=60, end="0.1", is_held=True) for rank in range(2)]
    service.wait_for(
        lambda: [t["cursor"] > 10 and t["committed"] == -1 for t in targets(service).values()] == [True] * 2
    )
    service.kill()
    for life in lives:
        life.release()
    until(lambda: not any(life.is_alive for life in lives))
    service.flush_after_seconds = 1.0
    service.start()
    service.wait_for(lambda: host.left() == [])
    service.wait_for(lambda: service.runs()[0]["state"] == "completed")

    assert 0 == service.stop(), service.log()
    assert {f"first-{rank}": list(range(61)) for rank in range(2)} == stored(service.store)
    assert [] == gaps(service.store)
    assert {"first": (0, "completed")} == attempts(service.store)


@pytest.mark.thorough
def test_next_ranks_of_the_host_serve_the_spools_of_killed_ranks(service, host):
    """The new service has no spool folder. The new ranks serve the spools under the identity of the dead ranks."""
    service.flush_after_seconds = 600.0
    service.start()
    lives = [host.start(service, rank, "first", steps=10_000, pause=0.002, end="linger") for rank in range(2)]
    service.wait_for(lambda: len(targets(service)) == 2)
    until(lambda: all(life.published > 300 for life in lives))
    service.kill()
    for life in lives:
        life.kill()
    service.flush_after_seconds = 1.0
    successors = [host.start(service, rank, "second", steps=50, pause=0.02, end="linger") for rank in range(2)]
    service.start()
    service.wait_for(lambda: host.left() == ["second-0", "second-1"])
    service.wait_for(lambda: len(json.loads(service.get("/sd"))) == 2)
    service.wait_for(lambda: service.runs()[0]["state"] != "pending")  # until the first record of the new ranks
    states = service.runs()
    discovered = sorted(entry["labels"]["instance"] for entry in json.loads(service.get("/sd")))
    until(lambda: all(successor.published == 50 for successor in successors))
    service.wait_for(lambda: all(targets(service)[f"second-{rank}"]["committed"] == 49 for rank in range(2)))

    assert 0 == service.stop(), service.log()
    rows = stored(service.store)
    for rank, life in enumerate(lives):
        assert list(range(life.published)) == rows[f"first-{rank}"][: life.published]
        assert list(range(50)) == rows[f"second-{rank}"]
    assert all(seqs == list(range(len(seqs))) for seqs in rows.values())
    assert [] == gaps(service.store)
    assert ["r/0", "r/1"] == discovered
    assert "failed" == attempts(service.store)["first"][1]
    assert {"r": "running"} == {run["run"]: run["state"] for run in states}


def test_without_a_spool_lost_records_of_a_killed_rank_are_counted(service, host):
    service.start()
    life = host.start(service, 0, "first", steps=10_000, pause=0.002, end="linger", spool=False)
    until(lambda: life.published > 300)
    service.wait_for(lambda: targets(service)["first-0"]["head"] > 100)
    life.kill()
    service.wait_for(lambda: service.runs()[0]["state"] == "failed", seconds=60)
    target = targets(service)["first-0"]
    page = service.get("/metrics")

    assert 0 == service.stop(), service.log()
    seqs = stored(service.store)["first-0"]
    lost = sum(gap["records"] for gap in gaps(service.store))
    assert list(range(len(seqs))) == seqs
    assert target["head"] + 1 == len(seqs) + lost  # all records that were reported to the service
    assert lost == target["records_lost"]
    assert f'rankscope_ingest_lost_records_total{{run="r"}} {lost}.0' in page


def test_without_a_spool_an_exiting_rank_reports_its_lost_records(service, host):
    service.flush_after_seconds = 600.0
    service.start()
    life = host.start(service, 0, "first", steps=40, end="0.1", spool=False, is_held=True)
    service.wait_for(lambda: (target := targets(service).get("first-0")) and target["cursor"] > 10)
    service.kill()
    life.release()
    until(lambda: not life.is_alive)

    assert 41 == life.left + len(stored(service.store).get("first-0", []))
