"""Tests of the identity of a process, which is read from the environment that a launcher sets."""

from __future__ import annotations

import pytest

from rankscope_contract.model.identity import (
    LONGEST_NAME,
    check_run_name,
    new_incarnation,
    new_launch_id,
    rank_from_environment,
    run_from_environment,
)

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "2", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 0, 1)),
        (TORCHRUN, (3, 1, 8)),
        (SLURM, (5, 2, 16)),
        (OPEN_MPI, (1, 1, 2)),
        ({**SLURM, **TORCHRUN}, (3, 1, 8)),
        ({"RANK": "four"}, (0, 0, 1)),
        ({"RANK": "7"}, (7, 0, 8)),
    ],
)
def test_rank_local_rank_and_world_size(environment, expected):
    assert expected == rank_from_environment(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, None),
        ({"TORCHELASTIC_RUN_ID": "exp7"}, "exp7"),
        (SLURM, "4711"),
        ({**SLURM, "TORCHELASTIC_RUN_ID": "exp7"}, "4711"),
        ({**SLURM, "RANKSCOPE_RUN": "a=b/../学习"}, "a=b/../学习"),
        ({"RANKSCOPE_RUN": "", "SLURM_JOB_ID": "1"}, "1"),
        ({"RANKSCOPE_RUN": "none"}, "none"),
    ],
)
def test_run_name_from_the_environment(environment, expected):
    assert expected == run_from_environment(environment)


def test_launch_ids_of_one_job_differ_and_begin_with_its_id():
    environment = {**SLURM, "TORCHELASTIC_RESTART_COUNT": "2"}
    first, second = new_launch_id(environment), new_launch_id(environment)

    assert first != second
    assert first.startswith("4711.2.")
    assert new_launch_id({}).startswith("none.0.")
    assert new_launch_id({**SLURM, "SLURM_RESTART_COUNT": "1"}).startswith("4711-r1.0.")
    assert new_launch_id({**SLURM, "SLURM_RESTART_COUNT": "0"}).startswith("4711.0.")
    assert new_incarnation() != new_incarnation()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x" * (LONGEST_NAME + 1), "1,001 characters"), ("a\udcff", r"'a\\udcff', is not valid Unicode")],
)
def test_only_names_that_the_service_would_reject_are_refused(name, reason):
    for odd in ("x" * LONGEST_NAME, "a/../b", "a\nb\x00\x1b", " ", "ü\U0001f600"):
        check_run_name(odd)
    with pytest.raises(ValueError, match=reason):
        check_run_name(name)


def test_launch_id_of_a_very_long_or_undecodable_job_id_is_valid():
    found = new_launch_id({"TORCHELASTIC_RUN_ID": "\udcff" * 5000})

    assert len(found) < LONGEST_NAME
    assert found.startswith("???")
