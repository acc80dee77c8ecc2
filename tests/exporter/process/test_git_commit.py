"""Tests of the commit of the training script, compared with the output of git."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.config.resolve import public_settings
from rankscope_exporter.process.identity import git_commit
from rankscope_exporter.serving.config import ServeConfig


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
