"""Ends of a training whose publisher is behind: every step is stored or counted as lost, and the exit code is kept."""

import json
import signal
from pathlib import Path

import pytest
from tests.programs import run_command, run_program

STEPS = 20

TRAINING = """
import os, signal, sys, time, torch
from rankscope_exporter import Monitor
from rankscope_exporter.api import session
session.PUBLISH_SECONDS = LIMIT
session.STOP_PUBLISH_SECONDS = 0.4
session.PATIENCE_SECONDS = 0.1
write, spool = os.write, os.path.realpath(os.environ["RANKSCOPE_SPOOL_DIR"])
def slow_write(descriptor, data):
    if os.readlink(f"/proc/self/fd/{descriptor}").startswith(spool):
        time.sleep(0.1)
    return write(descriptor, data)
os.write = slow_write
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
settings = {"run": "slow", "statistics": "torch", "exit_wait_seconds": WAIT}
with Monitor(settings, total_steps=20).attach(model, optimizer) as monitor:
    for step in range(1, 21):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=float(step))
    END
"""


def trained(folder, end="pass", *, limit=60.0, wait=5.0, begin="model =", **environment):
    code = TRAINING.replace("END", end).replace("LIMIT", str(limit)).replace("WAIT", str(wait))
    code = code.replace("model =", begin, 1)
    code = code.replace('"run": "slow", ', "") if "RANKSCOPE_RUN" in environment else code
    return run_program(code, whole_exit=True, RANKSCOPE_SPOOL_DIR=str(folder), **environment)


QUERY = """
SELECT (SELECT count(DISTINCT step) FROM scalars WHERE name = 'loss') AS steps,
  (SELECT coalesce(sum(value), 0)::INT FROM events WHERE type = 'gap') AS lost,
  (SELECT string_agg(details->>'reason') FROM events WHERE type = 'exit') AS reason
"""


def found(folder):
    """Return the number of steps with a loss, the number of records counted as lost, and the exit reason."""
    done = run_command("sql", QUERY, "--store", folder, "--format", "json")
    (row,) = json.loads(done.stdout)
    return row["steps"], row["lost"], row["reason"]


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("pass", 0, "completed"),
        pytest.param("raise ValueError('own')", 1, "exception", marks=pytest.mark.thorough),
        pytest.param("sys.exit(3)", 3, "exception", marks=pytest.mark.thorough),
    ],
)
def test_slow_disk_delays_the_end_until_every_step_is_published(end, status, reason, tmp_path):
    done = trained(tmp_path, end)

    assert status == done.returncode, done.stderr
    assert (STEPS, 0, reason) == found(tmp_path)
    assert "records wait to be published; the end of training waits for them for at most 60 s" in done.stderr


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        pytest.param("pass", 0, "completed", marks=pytest.mark.thorough),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "signal"),
        pytest.param("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "signal", marks=pytest.mark.thorough),
    ],
)
def test_steps_that_are_not_published_in_time_count_as_lost(end, status, reason, tmp_path):
    done = trained(tmp_path, end, limit=0.4, wait=0.0)
    steps, lost, reported = found(tmp_path)

    assert status == done.returncode, done.stderr
    assert (STEPS, reason) == (steps + lost, reported)
    assert f"{lost} records of this rank are lost: the disk or this machine was too slow" in done.stderr
    assert lost > 0


def test_service_counts_the_steps_that_the_rank_did_not_publish(tmp_path, service):
    service.start()
    done = trained(tmp_path / "spool", limit=0.4, RANKSCOPE_INGEST_URL=service.url)
    (run,) = service.wait_for(lambda: [run for run in service.runs() if run["state"] == "completed"])
    assert 0 == service.stop()
    steps, lost, _ = found(service.store)

    assert 0 == done.returncode, done.stderr
    assert STEPS == steps + lost
    assert run["records_lost"] == lost > 0


SLOW_PUBLISH = """
from rankscope_exporter.publish.rank_server import RankServer
publish = RankServer.publish
RankServer.publish = lambda self, record: (time.sleep(0.3), publish(self, record))[1]
model ="""


@pytest.mark.thorough
def test_service_counts_the_steps_of_a_killed_rank_that_waited_in_its_queue(tmp_path, service):
    """With a spool and without: the rank ends by `os._exit`, after the service has polled it since its last step."""
    service.spools = (tmp_path / "spool",)
    service.start()
    environment = {"RANKSCOPE_INGEST_URL": service.url}
    committed = "[time.sleep(0.05) for _ in range(600) if monitor._session.channel.ring.committed < 0]"
    leave = f"{committed}; time.sleep(0.4); os._exit(7)"
    done = [
        trained(Path(spool), leave, begin=SLOW_PUBLISH, RANKSCOPE_RUN=run, **environment)
        for run, spool in [("spooled", str(tmp_path / "spool")), ("unspooled", "off")]
    ]
    service.wait_for(lambda: 2 == sum(run["state"] == "failed" for run in service.runs()))
    service.wait_for(lambda: not any((tmp_path / "spool").iterdir()))
    runs = service.runs()
    assert 0 == service.stop(), service.log()
    query = "SELECT run, count(DISTINCT step) AS steps FROM scalars WHERE name = 'loss' GROUP BY run ORDER BY run"
    rows = json.loads(run_command("sql", query, "--store", service.store, "--format", "json").stdout)
    lost = {run["run"]: run["records_lost"] for run in runs}

    assert [7, 7] == [one.returncode for one in done], done
    assert {"spooled": STEPS, "unspooled": STEPS} == {row["run"]: row["steps"] + lost[row["run"]] for row in rows}
    assert min(lost.values()) > 0
    for run, number in lost.items():
        assert f"lost: {number} records" in run_command("summary", run, "--store", service.store).stdout


@pytest.mark.thorough
def test_blocked_publisher_does_not_prevent_the_exit_report(tmp_path):
    """The device may not respond. The thread that waits for it can then publish nothing."""
    begin = "monitor.current(); monitor._session.steps.items.put(lambda: __import__('threading').Event().wait())"
    done = trained(tmp_path, begin, limit=0.4)
    steps, lost, reason = found(tmp_path)

    assert 0 == done.returncode, done.stderr
    assert (STEPS + 1, "completed") == (steps + lost, reason)  # the function counts as a record
