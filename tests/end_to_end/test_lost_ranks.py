"""Ranks that vanish: polled records are stored, lost ones are counted, and the run fails."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.programs import Started, start_script

from rankscope_storage.connection import connect

RANK = """
import itertools, pathlib, sys, time, torch, rankscope
from torch import nn
pause, stop = float(sys.argv[1]), pathlib.Path(sys.argv[2])
torch.manual_seed(0)
net = nn.Linear(16, 4)
optimizer = torch.optim.Adam(net.parameters())
config = rankscope.MonitorConfig(console=False, statistics="torch")  # no kernel to compile
with rankscope.Monitor(config).attach(net, optimizer) as monitor:
    for step in itertools.takewhile(lambda _: not stop.exists(), itertools.count(1)):
        loss = net(torch.ones(2, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        print(step, flush=True)
        time.sleep(pause)
"""

StartRank = Callable[..., Started]


@pytest.fixture
def start_rank(tmp_path: Path) -> Iterator[StartRank]:
    """Return a function that starts one rank of two. The rank writes its steps to rank-<n>.log until it is stopped."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    started: list[Started] = []

    def start(service: Any, rank: int, *, pause: float, stop: str = "stop") -> Started:
        environment = {
            "RANKSCOPE_INGEST_URL": service.url,
            "RANKSCOPE_RUN": "lost",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(service.port),
            "OMP_NUM_THREADS": "1",
        }
        log = tmp_path / f"rank-{rank}.log"
        process = start_script(script, pause, tmp_path / stop, log=log, **environment)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def last_printed(tmp_path: Path, rank: int) -> int:
    lines = [line for line in (tmp_path / f"rank-{rank}.log").read_text().split() if line.isdecimal()]
    return int(lines[-1]) if lines else 0


def test_killed_rank_fails_the_run_and_lost_records_are_counted(
    service: Any, start_rank: StartRank, tmp_path: Path
) -> None:
    service.start()
    ranks = [start_rank(service, rank, pause=0.05) for rank in range(2)]
    service.wait_for(lambda: all(last_printed(tmp_path, rank) > 30 for rank in range(2)))
    ranks[1].kill()
    killed_at = time.monotonic()
    ranks[1].wait(10)
    died_after = last_printed(tmp_path, 1)
    service.wait_for(lambda: service.runs()[0]["state"] == "failed")
    seconds = time.monotonic() - killed_at
    (tmp_path / "stop").touch()

    assert 0 == ranks[0].wait(90), (tmp_path / "rank-0.log").read_text()
    assert 0 == service.stop(), service.log()
    with connect(service.store) as connection:
        stored = dict(
            connection.sql("select rank, count(distinct seq) from scalars where name = 'loss' group by rank").fetchall()
        )
        whole = connection.sql(
            "select rank, count(distinct seq) = max(seq) - min(seq) + 1, min(seq) from "
            "(select rank, seq from scalars union select rank, seq from events where seq is not null) group by rank"
        ).fetchall()
        gaps = connection.sql("select rank, details from events where type = 'gap'").fetchall()
        states = connection.sql("select state, reason from runs").fetchall()

    assert seconds < 60
    assert last_printed(tmp_path, 0) == stored[0]
    assert died_after - 30 < stored[1] <= died_after  # polls every 0.3 s read all but the last few steps
    assert {(0, True, 0), (1, True, 0)} == set(whole)
    assert "failed" == states[0][0]
    assert "1" in states[0][1]
    for rank, details in gaps:
        assert 1 == rank, details
    lost = lost_of(gaps)
    assert 0 <= lost <= died_after - stored[1] + 1


@pytest.mark.thorough
def test_killed_training_with_a_spool_loses_no_published_step(
    service: Any, start_rank: StartRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complete monitor publishes a step while the next one starts, so that at most the last two are missing."""
    monkeypatch.setenv("RANKSCOPE_SPOOL_DIR", str(tmp_path / "spool"))
    service.spools = (tmp_path / "spool",)
    service.start()
    rank = start_rank(service, 0, pause=0.02)
    service.wait_for(lambda: last_printed(tmp_path, 0) > 100)
    rank.kill()
    rank.wait(10)
    died_after = last_printed(tmp_path, 0)
    service.wait_for(lambda: service.runs()[0]["state"] == "failed")
    service.wait_for(lambda: not any((tmp_path / "spool").iterdir()))
    lost = service.runs()[0]["records_lost"]

    assert 0 == service.stop(), service.log()
    with connect(service.store) as connection:
        steps = [step for (step,) in connection.sql("select distinct step from tensor_stats order by step").fetchall()]
        seqs = connection.sql("select count(distinct seq), max(seq) + 1 from scalars").fetchall()
        gaps = connection.sql("select count(*) from events where type = 'gap'").fetchall()
    assert list(range(1, len(steps) + 1)) == steps
    assert died_after - 2 <= len(steps) <= died_after + 1
    assert seqs[0][0] == seqs[0][1]
    assert (0, [(0,)]) == (lost, gaps)


def lost_of(gaps: list[tuple[int, str]]) -> int:
    documents = [json.loads(details) for _, details in gaps]
    return sum(document["last"] - document["first"] + 1 for document in documents)


def test_second_process_of_one_rank_is_rejected(service: Any, start_rank: StartRank, tmp_path: Path) -> None:
    """The second process still trains. The rows contain nothing of it."""
    service.start()
    first = start_rank(service, 0, pause=0.05)
    service.wait_for(lambda: service.runs() and service.runs()[0]["step"])
    log = tmp_path / "rank-0.log"
    known = len(log.read_text())
    second = start_rank(service, 0, pause=0.05, stop="stop-second")
    service.wait_for(lambda: any(word in log.read_text()[known:] for word in ("409", "identity")))
    (tmp_path / "stop-second").touch()

    assert 0 == second.wait(60)
    (tmp_path / "stop").touch()
    assert 0 == first.wait(60)
    assert 0 == service.stop(), service.log()
    with connect(service.store) as connection:
        ((incarnations, steps),) = connection.sql(
            "select count(distinct incarnation), count(distinct step) from scalars where name = 'loss'"
        ).fetchall()
    assert (1, last_printed(tmp_path, 0)) == (incarnations, steps)


def test_service_that_starts_late_stores_all_steps(service: Any, start_rank: StartRank, tmp_path: Path) -> None:
    ranks = [start_rank(service, rank, pause=0.05) for rank in range(2)]
    deadline = time.monotonic() + 60
    while min(last_printed(tmp_path, rank) for rank in range(2)) < 10:
        assert time.monotonic() < deadline, "the ranks never trained"
        time.sleep(0.05)
    service.start()
    service.wait_for(lambda: service.runs() and service.runs()[0]["ranks_alive"] == 2)
    (tmp_path / "stop").touch()

    assert [0, 0] == [rank.wait(90) for rank in ranks]
    assert 0 == service.stop(), service.log()
    with connect(service.store) as connection:
        rows = connection.sql(
            "select rank, min(step), max(step), count(*) from scalars where name = 'loss' group by rank order by rank"
        ).fetchall()
    ends = [last_printed(tmp_path, rank) for rank in range(2)]
    assert [(rank, 1, end, end) for rank, end in enumerate(ends)] == rows
