"""Tests of the identity: the source of the run name, and equal values on all ranks without a collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.programs import warm_processes

from rankscope_exporter.process.identity import resolve_identity


def test_single_process_names_its_run_after_the_script() -> None:
    identity, other = resolve_identity({}, None), resolve_identity({"TORCHELASTIC_RUN_ID": "none"}, None)

    assert (0, 0, 1) == (identity.rank, identity.local_rank, identity.world_size)
    assert identity.run
    assert identity.run != other.run != "none"  # the default id of torchrun


@pytest.mark.parametrize(
    ("environment", "configured", "run"),
    [
        ({"RANKSCOPE_RUN": "env", "SLURM_JOB_ID": "7"}, "config", "env"),
        ({"SLURM_JOB_ID": "7"}, "config", "config"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "elastic"}, None, "7"),
        ({"TORCHELASTIC_RUN_ID": "elastic"}, None, "elastic"),
    ],
)
def test_run_name_has_the_documented_precedence(environment: dict[str, str], configured: str | None, run: str) -> None:
    assert run == resolve_identity(environment, configured).run


def _in_group(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    same = [resolve_identity({}, None) for _ in range(2)]
    launches = [resolve_identity({"TORCHELASTIC_RESTART_COUNT": count}, None).launch_id for count in "011"]
    results.put((rank, same[0].run, same[0].incarnation, [one.launch_id for one in same], launches))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_of_a_group_share_run_and_launch_until_a_restart(tmp_path: Path) -> None:
    """The agent of torchrun keeps its store when it restarts its workers. Values of the earlier launch are not used."""
    context = warm_processes()
    results = context.Queue()
    workers = [context.Process(target=_in_group, args=(rank, str(tmp_path / "store"), results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = sorted(results.get(timeout=150) for _ in workers)
    for worker in workers:
        worker.join(30)
    ranks, runs, incarnations, launches, restarts = zip(*found, strict=True)

    assert (0, 1) == ranks
    assert 1 == len(set(runs))
    assert 2 == len(set(incarnations))
    assert launches[0] == launches[1]
    assert 1 == len({*launches[0]})
    assert restarts[0] == restarts[1]
    assert restarts[0][0] != restarts[0][1] == restarts[0][2]


def test_launch_is_common_to_its_ranks_and_new_for_a_requeued_or_second_job() -> None:
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    first, second = (resolve_identity({**launcher, "RANK": rank}, None) for rank in "01")
    job = launcher | {"SLURM_JOB_ID": "7"}
    again = job | {"SLURM_RESTART_COUNT": "1"}

    assert [(0, first.run, first.launch_id), (1, first.run, first.launch_id)] == [
        (one.rank, one.run, one.launch_id) for one in (first, second)
    ]
    for one, other in ((job, again), ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"})):
        assert resolve_identity(one, None).launch_id != resolve_identity(other, None).launch_id
