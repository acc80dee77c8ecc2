"""Two real ranks: the page, an event and a message name the rank that makes the other wait, with share and phase."""

import json
from pathlib import Path

import pytest
from tests.programs import run_command

from rankscope.demo.receiver import AlertReceiver

SCRIPT = Path(__file__).with_name("slow_rank_training.py")


@pytest.mark.parametrize(
    ("seconds", "phase", "is_slow"),
    [
        pytest.param((0.08, 0, 0), "data wait", True, id="slow loader"),
        pytest.param((0, 0.08, 0), "forward", True, id="slow compute", marks=pytest.mark.thorough),
        pytest.param((0, 0, 0.6), "data wait", True, id="pauses", marks=pytest.mark.thorough),
        pytest.param((0, 0, 0), "", False, id="no slow rank", marks=pytest.mark.thorough),
    ],
)
def test_rank_that_makes_the_other_wait_is_named(service, start_ranks, seconds, phase, is_slow):
    steps = 120 if seconds[2] or not is_slow else 64
    with AlertReceiver() as receiver:
        service.urls = (receiver.notify_url,)
        service.start()
        ranks = start_ranks(SCRIPT, steps, *seconds, run="two")
        assert [0, 0] == [rank.wait(300) for rank in ranks], (service.folder / "training.log").read_text()
        if is_slow:
            service.wait_for(lambda: receiver.alerts)
        page = service.get("/runs/two/ranks")
        assert 0 == service.stop(), service.log()
        messages = [f"{alert.title} {alert.text}" for alert in receiver.alerts]
    found = run_command("anomalies", "two", "--store", service.store, "--format", "json").stdout

    counted = "SELECT max((details->>'$.events')::INT) AS events FROM events WHERE type = 'incident'"
    incidents = json.loads(run_command("sql", counted, "--store", service.store, "--format", "json").stdout)

    if not is_slow:
        assert ([], True) == (messages, "No rank of 2 is slow or silent" in page)
        return
    (event,) = json.loads(found)
    assert [{"events": 1}] == incidents  # as many as `anomalies` lists
    assert ("SlowRank", 1, phase.replace(" ", "_")) == (event["rule"], event["rank"], event["op"])
    assert ("Rank 1 pauses in " if seconds[2] else f"Rank 1 is slow in {phase}: the others wait 0.0") in page
    assert "rank 1" in messages[0]
    assert phase in messages[0]
    assert 1 == len(messages)
