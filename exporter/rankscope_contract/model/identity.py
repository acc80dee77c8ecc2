"""Who a process is: run, launch, rank, host, incarnation — read from the environment, without any collective."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

IDENTITY_LABELS: Final = ("run", "rank")
"""Labels that every series of a rank's page carries; host, attempt and GPU are on rankscope_run_info alone."""

RUN_VARIABLE: Final = "RANKSCOPE_RUN"

# Tried in order; torchrun, Slurm, Open MPI.
_RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANK_VARIABLES: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_WORLD_SIZE_VARIABLES: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")

_UNSET_ELASTIC_ID: Final = "none"  # what torchrun sets when no --rdzv-id was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One exporter process. `run` and `launch_id` are equal on all ranks of a launch."""

    run: str
    launch_id: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    host: str = ""
    incarnation: str = ""


def run_from_environment(environment: Mapping[str, str]) -> str | None:
    """Return the run named by the environment: RANKSCOPE_RUN, SLURM_JOB_ID, TORCHELASTIC_RUN_ID, else None."""
    for variable in (RUN_VARIABLE, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        value = environment.get(variable, "")
        if value and not (variable == "TORCHELASTIC_RUN_ID" and value == _UNSET_ELASTIC_ID):
            return value
    return None


def rank_from_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return (rank, local rank, world size); (0, 0, 1) for a process that no launcher started."""
    rank = _first_integer(environment, _RANK_VARIABLES, 0)
    world_size = _first_integer(environment, _WORLD_SIZE_VARIABLES, 1)
    return rank, _first_integer(environment, _LOCAL_RANK_VARIABLES, 0), max(world_size, rank + 1)


def new_incarnation() -> str:
    """Return a fresh id for one exporter process."""
    return uuid.uuid4().hex


def new_launch_id(environment: Mapping[str, str]) -> str:
    """Return a launch id to be made on rank 0 and shared: readable where the launcher has a name, always unique.

    A requeued job repeats its job id, and torchrun counts its restarts anew in it, so these alone would not tell two
    launches apart.
    """
    job = environment.get("SLURM_JOB_ID") or environment.get("TORCHELASTIC_RUN_ID", _UNSET_ELASTIC_ID)
    requeued = environment.get("SLURM_RESTART_COUNT", "")
    job = f"{job}-r{requeued}" if requeued.isdecimal() and int(requeued) else job
    return f"{job}.{restart_count(environment)}.{uuid.uuid4().hex[:12]}"


def restart_count(environment: Mapping[str, str]) -> str:
    """Return how often torchrun's elastic agent has started the workers again; "0" without it."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def host_name() -> str:
    """Return the name under which this machine knows itself."""
    return os.environ.get("HOSTNAME") or socket.gethostname()


def _first_integer(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        text = environment.get(name, "")
        if text.isdecimal():
            return int(text)
    return default
