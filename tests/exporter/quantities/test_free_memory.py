"""Free memory of a host and of the control groups of a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankscope_exporter.quantities.gradients import free_bytes, host_bytes

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    500 kB\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_control_groups_the_free_memory_of_the_system_counts(tmp_path):
    write(tmp_path / "meminfo", MEMINFO)

    assert 500 * 1024 == host_bytes(tmp_path, tmp_path / "groups")


def test_nested_control_group_with_least_free_memory_counts(tmp_path):
    write(tmp_path / "meminfo", MEMINFO)
    write(tmp_path / "self/cgroup", "0::/job/step\n")
    write(tmp_path / "groups/job/memory.max", "300000")
    write(tmp_path / "groups/job/memory.current", "100000")
    write(tmp_path / "groups/job/step/memory.max", "max")
    write(tmp_path / "groups/job/step/memory.current", "90000")

    assert 200_000 == host_bytes(tmp_path, tmp_path / "groups")


def test_control_groups_of_version_1_are_read(tmp_path):
    write(tmp_path / "meminfo", MEMINFO)
    write(tmp_path / "self/cgroup", "5:cpu:/job\n4:memory:/job\n")
    write(tmp_path / "groups/memory/job/memory.limit_in_bytes", "1000")
    write(tmp_path / "groups/memory/job/memory.usage_in_bytes", "1200")

    assert 0 == host_bytes(tmp_path, tmp_path / "groups")


@pytest.mark.parametrize("text", [None, "", "MemAvailable:\n", "MemAvailable: much kB\n"])
def test_unknown_free_memory_is_zero(text, tmp_path):
    if text is not None:
        write(tmp_path / "meminfo", text)

    assert 0 == host_bytes(tmp_path, tmp_path)


def test_ranks_of_one_host_share_the_free_memory(monkeypatch):
    monkeypatch.setattr("rankscope_exporter.quantities.gradients.host_bytes", lambda: 1000)
    found = []
    for ranks in ("1", "4", "0", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(free_bytes(torch.device("cpu")))

    assert [1000, 250, 1000, 1000] == found
    assert 0 == free_bytes(torch.device("meta"))
