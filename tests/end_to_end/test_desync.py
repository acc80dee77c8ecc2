"""Two real ranks under DDP with one changed bit: the notification contains step, tensor and ranks."""

import json

import pytest
from tests.programs import run_program

from rankscope.demo.receiver import AlertReceiver
from rankscope_storage.connection import connect

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
from tests.exporter.measure.quantities import hash_runs
hash_runs.main(Path({folder!r}), {cases!r})
"""


def trained(folder, service, run, *cases):
    settings = {"RANKSCOPE_INGEST_URL": service, "RANKSCOPE_RUN": run}
    folder.mkdir()
    done = run_program(PROGRAM.format(folder=str(folder), cases=cases), seconds=200, **settings)

    assert 0 == done.returncode, done.stderr[-4000:]


def test_changed_bit_is_reported_and_equal_ranks_are_not(service, tmp_path):
    with AlertReceiver() as receiver:
        service.urls = (receiver.notify_url,)
        service.start()
        trained(tmp_path / "good", service.url, "good", "equal, accumulated and scaled")
        trained(tmp_path / "bad", service.url, "bad", "disturbed")
        service.wait_for(lambda: [alert for alert in receiver.alerts if "ReplicaDesync" in alert.title])
        assert 0 == service.stop()
    with connect(service.store) as connection:
        events = connection.query(
            "SELECT run, type, step, kind, tensor, details FROM events WHERE rule = 'ReplicaDesync' ORDER BY ordinal"
        ).to_pylist()
        stored = connection.query("SELECT DISTINCT run FROM hashes ORDER BY run")["run"].to_pylist()

    truth = [json.loads((tmp_path / "bad" / f"{rank}.json").read_text())["disturbed"]["truth"] for rank in range(2)]
    parted = next(step for step in (1, 3, 5) if truth[0][str(step)] != truth[1][str(step)])
    differing = {name for name, bits in truth[0][str(parted)].items() if bits != truth[1][str(parted)][name]}
    first = [event for event in events if event["type"] == "anomaly" and event["step"] == parted]
    assert ["bad", "good"] == stored
    assert {"bad"} == {event["run"] for event in events}
    assert (3, {"leave.weight"}) == (parted, differing)
    assert differing == {event["tensor"] for event in first}
    assert [[0, 1]] == [json.loads(event["details"])["ranks"] for event in first]
    alerts = [alert for alert in receiver.alerts if "ReplicaDesync" in alert.title]
    assert 1 == len(alerts), receiver.alerts
    assert "ReplicaDesync in param_after of leave.weight" in alerts[0].title
    assert "step: 3" in alerts[0].text
    assert "rank 0 and rank 1 differ from each other" in alerts[0].text
