"""The identity of a rank: the source of the run name, equal values on all ranks, and the commit of the script."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.exporter.ranks import RANKS, outcomes_of

from rankscope_exporter.adapters.process_group import default_group
from rankscope_exporter.config.monitor_config import MonitorConfig, public_settings
from rankscope_exporter.process.identity import git_commit, resolve_identity
from rankscope_exporter.publish.serving_config import ServeConfig


def test_single_process_names_its_run_after_the_script() -> None:
    identity, other = resolve_identity({}, None), resolve_identity({"TORCHELASTIC_RUN_ID": "none"}, None)

    assert (0, 0, 1) == (identity.rank, identity.local_rank, identity.world_size)
    assert identity.run
    assert identity.run != other.run != "none"  # the default id of torchrun
    assert identity.incarnation != other.incarnation


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


def _in_group(_rank: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    group = default_group()
    same = [resolve_identity({}, None, group) for _ in range(2)]
    launches = [resolve_identity({"TORCHELASTIC_RESTART_COUNT": count}, None, group).launch_id for count in "011"]
    yield "", (same[0].run, same[0].incarnation, [one.launch_id for one in same], launches)


def test_ranks_of_a_group_share_run_and_launch_until_a_restart(tmp_path: Path) -> None:
    """The agent of torchrun keeps its store when it restarts its workers. Values of the earlier launch are not used."""
    found = outcomes_of(_in_group, tmp_path)
    runs, incarnations, launches, restarts = zip(*(found["", rank] for rank in RANKS), strict=True)

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


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "deep").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "deep" / "train.py").touch()
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def head_of(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD")


def test_commit_equals_git_for_branch_packed_detached_and_worktree(repository: Path, tmp_path: Path) -> None:
    script = repository / "deep" / "train.py"

    assert head_of(repository) == git_commit(script)
    git(repository, "commit", "-q", "--allow-empty", "-m", "two")
    git(repository, "pack-refs", "--all")
    assert head_of(repository) == git_commit(script)
    git(repository, "worktree", "add", "-q", "-b", "feature/x", str(tmp_path / "tree"), "HEAD~1")
    assert head_of(tmp_path / "tree") == git_commit(tmp_path / "tree" / "deep")
    git(repository, "checkout", "-q", "--detach", "HEAD~1")
    assert head_of(repository) == git_commit(script)


@pytest.mark.parametrize("head", [None, b"", b"ref: refs/heads/gone\n", b"\xff\xfe", b"ref: HEAD\n"])
def test_invalid_repository_has_no_commit(tmp_path: Path, head: bytes | None) -> None:
    (tmp_path / ".git").mkdir()
    if head is not None:
        (tmp_path / ".git" / "HEAD").write_bytes(head)

    assert None is git_commit(tmp_path)
    assert None is git_commit(tmp_path.parent / "missing" / "train.py")


@pytest.mark.parametrize("script", ["deep/train.py", "/usr/bin/launcher"])
def test_public_settings_have_the_commit_of_script_or_working_folder(
    repository: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.chdir(repository)
    monkeypatch.setattr("sys.argv", [script, "--lr", "3"])

    assert head_of(repository) == public_settings(MonitorConfig())["git_commit"]


def test_public_settings_contain_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["--hf-token", "correct-horse", "--data", "s3://me:correct-horse@host/x"]
    monkeypatch.setattr("sys.argv", ["train.py", *secrets])
    shown = public_settings(MonitorConfig(serve=ServeConfig(token="correct-horse")))

    assert ["train.py", "--hf-token", "***", "--data", "s3://***@host/x"] == shown["argv"]
    assert "***" == shown["serve"]["token"]
    assert "correct-horse" not in json.dumps(shown)
