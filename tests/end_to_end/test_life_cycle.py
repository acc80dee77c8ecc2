"""Life cycles of runs with real processes: restarts by the agent of torchrun, requeued jobs, and each kind of end."""

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from tests.end_to_end.lives import until
from tests.programs import run_command, run_program

from rankscope_storage.connection import connect
from rankscope_view.data.incidents import incidents

TRAINING = Path(__file__).with_name("restarting_training.py")

# torch 2.13 keeps one store across restarts of the workers, in which Gloo finds the addresses of dead peers.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def launch(start_job):
    return partial(start_job, TRAINING)


def run_of(service, run):
    return next((known for known in service.runs() if known["run"] == run), {})


def shows(service, run, **expected):
    found = run_of(service, run)
    return bool(found) and expected == {name: found[name] for name in expected}


def stored(service, query):
    with connect(service.store) as connection:
        return connection.query(query).to_pylist()


def attempts(service, run):
    return stored(service, f"SELECT * FROM attempts WHERE run = '{run}' ORDER BY attempt")


def wait_for_step(service, attempt, step):
    """Wait until the step duration of rank 0 is stored."""
    query = f"FROM scalars WHERE name = 'step_seconds' AND (rank, attempt, step) = (0, {attempt}, {step})"
    service.wait_for(lambda: bool(stored(service, query)), seconds=120)


def assert_goodput_is_that_of_its_steps(service, launches, *, pause):
    """Computed by hand: the steps of rank 0 that no later launch repeated, without the first step of each launch."""
    (spent,) = stored(service, "FROM goodput")
    made = [
        (row["attempt"], row["step"])
        for row in stored(
            service, "SELECT attempt, step FROM scalars WHERE name = 'step_seconds' AND rank = 0 ORDER BY attempt, step"
        )
    ]
    firsts = {attempt: min(step for other, step in made if other == attempt) for attempt, _ in made}
    lost = [(attempt, step) for attempt, step in made if any(firsts[a] <= step for a in firsts if a > attempt)]
    useful = [(attempt, step) for attempt, step in made if (attempt, step) not in lost and step > firsts[attempt]]
    wall = (launches[-1]["ended_at"] - launches[0]["started_at"]).total_seconds()
    parts = [value for name, value in spent.items() if name.endswith("_seconds") and name != "wall_seconds"]

    assert (len(made), len(lost)) == (spent["steps"], spent["lost_steps"])
    assert lost
    assert len(useful) * pause <= spent["useful_seconds"] < wall
    assert wall == pytest.approx(spent["wall_seconds"], abs=1e-3) == pytest.approx(sum(parts), abs=1e-3)
    assert 0 < spent["downtime_seconds"]
    assert spent["goodput"] == pytest.approx(spent["useful_seconds"] / wall, abs=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("endings", [("kill:17",), ("exception:8", "kill:17")], ids=["one restart", "two"])
def test_run_continues_from_its_checkpoint_after_restarts_by_torchrun(service, launch, tmp_path, endings):
    """Rank 0 loses its peer and reports this first. The cause is still rank 1."""
    last = len(endings)
    service.start()
    agent = launch(
        *(tmp_path, 40, 0.02, *endings, "--hold"),
        # By default, torchrun checks ten times per second and may end rank 0 before its exit report.
        torchrun=("--standalone", "--nproc-per-node", "2", "--max-restarts", str(last), "--monitor-interval", "2"),
        RANKSCOPE_RUN="elastic",
        **FRESH_STORE,
    )

    for attempt, ending in enumerate(endings):
        wait_for_step(service, attempt, int(ending.partition(":")[2]) - 1)
        (tmp_path / f"end-{attempt}").touch()
    service.wait_for(lambda: run_of(service, "elastic").get("attempt") == last, seconds=120)
    (tmp_path / "finish").touch()

    assert 0 == agent.wait(60), (tmp_path / "training.log").read_text()
    service.wait_for(
        lambda: ["failed"] * last + ["completed"] == [found["state"] for found in attempts(service, "elastic")]
    )
    service.wait_for(lambda: 'rankscope_run_goodput_ratio{run="elastic"} 0.' in service.get("/metrics"))
    shown = run_of(service, "elastic")
    assert ("completed", last, 40, None) == (shown["state"], shown["attempt"], shown["step"], shown["reason"])
    assert 0 == service.stop(), service.log()
    launches = attempts(service, "elastic")
    (host,) = {
        row["host"] for row in stored(service, "SELECT details->>'$.host' AS host FROM events WHERE type = 'launch'")
    }
    reasons = {
        "exception": "rank 1: ValueError: planted",
        "kill": f"rank 1 on {host} stopped responding without an exit report",
    }
    assert [*(reasons[ending.partition(":")[0]] for ending in endings), None] == [found["reason"] for found in launches]
    assert ["0", "1", "2"][: last + 1] == [found["launch_id"].split(".")[-2] for found in launches]  # count of torchrun
    ends = [found["ended_at"] for found in launches]
    assert sorted(ends) == ends
    assert all(found["started_at"] < found["ended_at"] for found in launches)
    assert_goodput_is_that_of_its_steps(service, launches, pause=0.02)
    (run,) = stored(service, "SELECT * FROM runs")
    assert ("completed", last, 2, 40) == (run["state"], run["attempt"], run["world_size"], run["last_step"])
    assert launches[0]["started_at"] == run["started_at"]
    reach = stored(
        service,
        "SELECT attempt, min(step) AS first, max(step) AS last FROM scalars WHERE name = 'loss' "
        "GROUP BY attempt ORDER BY attempt",
    )
    begun = [1, *({"exception:8": 6, "kill:17": 16}[ending] for ending in endings)]  # after the last checkpoint
    assert begun == [row["first"] for row in reach]
    assert 40 == reach[-1]["last"]
    # A repeated step counts with its latest attempt: no step is missing, and none occurs twice.
    assert [(step, sum(first <= step for first in begun) - 1) for step in range(1, 41)] == [
        (row["step"], row["attempt"])
        for row in stored(
            service,
            "SELECT step, attempt FROM scalars WHERE run = 'elastic' AND name = 'loss' AND rank = 0 "
            "QUALIFY attempt = max(attempt) OVER (PARTITION BY step) ORDER BY step",
        )
    ]


@pytest.mark.thorough
def test_requeued_job_joins_its_history_across_service_restarts(service, launch, tmp_path):
    """Simulated Slurm: its variables, its SIGTERM, a second start of one job, and another job with the same name."""
    checkpoint, work = tmp_path / "checkpoint", (tmp_path, 60, 0.02, "--hold")
    service.start()
    job = launch(*work, "--on-sigterm", RANKSCOPE_RUN="long", SLURM_JOB_ID="71")
    service.wait_for(lambda: (run_of(service, "long").get("step") or 0) >= 7)
    job.send_signal(signal.SIGTERM)

    assert 143 == job.wait(60), (tmp_path / "training.log").read_text()
    service.wait_for(lambda: run_of(service, "long")["state"] == "stopped")
    assert "rank 0: SIGTERM, SystemExit: 143" == run_of(service, "long")["reason"]
    assert 0 == service.stop(), service.log()
    checkpoint.write_text("10")  # at any step: many of the sixty steps remain
    service.start()
    requeued = launch(*work, RANKSCOPE_RUN="long", SLURM_JOB_ID="71", SLURM_RESTART_COUNT="1")
    service.wait_for(
        lambda: run_of(service, "long").get("attempt") == 1 and (run_of(service, "long")["step"] or 0) > 12
    )
    requeued.kill()
    service.wait_for(lambda: run_of(service, "long")["state"] == "failed")
    assert 0 == service.stop(), service.log()
    checkpoint.write_text("20")
    other_job = launch(*work, RANKSCOPE_RUN="long", SLURM_JOB_ID="72")
    until(lambda: int(checkpoint.read_text()) >= 30)  # it trains while no service runs
    service.start()
    service.wait_for(lambda: shows(service, "long", state="running", attempt=2))
    service.kill()
    service.start()
    service.wait_for(lambda: shows(service, "long", state="running", ranks_alive=1))
    (tmp_path / "finish").touch()

    assert 0 == other_job.wait(60), (tmp_path / "training.log").read_text()
    service.wait_for(lambda: run_of(service, "long").get("state") == "completed")
    assert 0 == service.stop(), service.log()
    known = attempts(service, "long")
    assert ["stopped", "failed", "completed"] == [attempt["state"] for attempt in known]
    assert ["71.0", "71-r1.0", "72.0"] == [attempt["launch_id"].rpartition(".")[0] for attempt in known]
    states = stored(service, "SELECT state FROM attempts_history WHERE run = 'long' AND attempt = 2 ORDER BY ordinal")
    assert ["pending", "running", "completed"] == list(dict.fromkeys(row["state"] for row in states))
    assert [60] == [row["last_step"] for row in stored(service, "SELECT last_step FROM runs")]
    reach = stored(
        service,
        "SELECT attempt, min(step) AS first, max(step) AS last, count(DISTINCT step) AS steps FROM scalars "
        "WHERE name = 'loss' GROUP BY attempt ORDER BY attempt",
    )
    assert [(0, 1), (1, 11), (2, 21)] == [(row["attempt"], row["first"]) for row in reach]
    assert 60 == reach[-1]["last"]
    assert all(row["steps"] == row["last"] - row["first"] + 1 for row in reach)


ENDINGS = {  # Kinds of end of a process: state and reason of its run, and the exit code that it has without Rankscope
    "exception": ("failed", "rank 0: ValueError: planted", 1),
    "exit-0": ("stopped", "rank 0: sys.exit(0) at step 5 of 4000 planned", 0),
    "SIGINT": ("stopped", "rank 0: KeyboardInterrupt", None),
    "SIGTERM": ("stopped", "rank 0: SIGTERM", -15),
    "SIGTERM-unhandled": ("failed", "stopped responding without an exit report", -15),
}


def test_each_kind_of_end_has_its_state_and_reason(service, launch, tmp_path):
    """Five runs on one host at the same time. The end of one run does not affect the others."""
    service.start()
    jobs = {}
    for ending in ENDINGS:
        (tmp_path / ending).mkdir()
        planted = () if ending.startswith("SIG") else (f"{ending}:5",)
        handled = {"RANKSCOPE_STOP_SIGNALS": "off"} if ending.endswith("-unhandled") else {}
        jobs[ending] = launch(tmp_path / ending, 4000, 0.02, *planted, RANKSCOPE_RUN=ending, **handled)
    for ending in ("SIGINT", "SIGTERM", "SIGTERM-unhandled"):
        service.wait_for(lambda ending=ending: run_of(service, ending).get("state") == "running")
        jobs[ending].send_signal(getattr(signal, ending.removesuffix("-unhandled")))
    for ending, (state, reason, code) in ENDINGS.items():
        assert jobs[ending].wait(60) == code or code is None, (tmp_path / "training.log").read_text()
        service.wait_for(lambda ending=ending, state=state: run_of(service, ending).get("state") == state)
        assert reason in run_of(service, ending)["reason"], ending
    assert 0 == service.stop(), service.log()
    rows = stored(service, "SELECT run, state, epoch(ended_at - started_at) AS seconds FROM runs")
    assert {ending: state for ending, (state, _, _) in ENDINGS.items()} == {row["run"]: row["state"] for row in rows}
    assert all(0 < row["seconds"] < 60 for row in rows)


RAISING = """
import torch
from rankscope_exporter import Monitor
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
with Monitor({"statistics": "torch"}).attach(model, optimizer) as monitor:
    for step in range(1, 9):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
    raise ValueError("planted")
"""


def test_run_that_raises_again_has_one_open_failure_and_warns_of_its_rules(service):
    service.start()
    done = []
    for attempt in range(2):
        done.append(run_program(RAISING, RANKSCOPE_RUN="again", RANKSCOPE_INGEST_URL=service.url))
        failures = service.wait_for(
            lambda attempt=attempt: (
                [one for one in failures_of(service) if one.attempt == attempt] and failures_of(service)
            )
        )
        # The failure of the later attempt is stored together with the end of the earlier one.
        assert [attempt] == [one.attempt for one in failures if one.is_open]
    assert 0 == service.stop(), service.log()
    _assert_other_store_is_independent(service)

    first, second = (one.stderr for one in done)
    assert f"rankscope: registered with service {service.url}\n" in first
    again = "AnomalyTurbulence from value 101, LossSpike from value 20, LearningRateJump from value 20"
    start = "as attempt 1, with steps from 1 on (first_step)"
    assert f"{service.url} {start}; rules begin again without earlier values: {again}\n" in second


def _assert_other_store_is_independent(service):
    """Close the incident of a copy of the store and serve the copy: the store of the service has not changed."""
    own, other = service.store, service.folder / "other"
    shutil.copytree(own, other)
    before = {path: path.stat().st_mtime_ns for path in own.rglob("*")}
    closed = run_command("incidents", "close", "again", "--store", other)
    service.place = other
    service.start()
    assert 0 == service.stop(), service.log()
    assert "closed: 2  Rank 0: ValueError: planted" in closed.stdout
    assert not any(one.is_open for one in failures_of(service))
    service.place = own
    assert [1] == [one.attempt for one in failures_of(service) if one.is_open]
    assert before == {path: path.stat().st_mtime_ns for path in own.rglob("*")}


def failures_of(service):
    with connect(service.store) as connection:
        return [one for one in incidents(connection, ["again"]).get("again", []) if one.rule == "RunFailed"]
