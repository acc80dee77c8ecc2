"""Identity of a process: run, launch, rank, host, incarnation.

The identity is read from the environment, without a collective.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.redaction import redacted_name

IDENTITY_LABELS: Final = ("run", "rank")
"""Labels of every series that a rank exports.

The host and the other properties of the process are labels of rankscope_run_info only.
"""

RUN_VARIABLE: Final = "RANKSCOPE_RUN"

LONGEST_NAME: Final = 1000
"""Maximum number of characters of each text of a registration. Each row of a rank repeats some of them."""

# In order of precedence: torchrun, Slurm, Open MPI.
_RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANK_VARIABLES: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_WORLD_SIZE_VARIABLES: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")

_LONGEST_JOB: Final = 200
"""Number of characters of a job id that are part of the launch id. torchrun accepts a text of any length."""

_UNSET_ELASTIC_ID: Final = "none"  # torchrun's value without --rdzv-id


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of one exporter process. `run` and `launch_id` are equal on all ranks of a launch."""

    run: str
    launch_id: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    host: str = ""
    incarnation: str = ""


def run_from_environment(environment: Mapping[str, str]) -> str | None:
    """Return the run name from the environment, or None. A name that the service would reject is not used.

    The variables are RANKSCOPE_RUN, SLURM_JOB_ID and TORCHELASTIC_RUN_ID, in this order.
    """
    for variable in (RUN_VARIABLE, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        value = environment.get(variable, "")
        if value and not (variable == "TORCHELASTIC_RUN_ID" and value == _UNSET_ELASTIC_ID):
            with contextlib.suppress(ValueError):
                return check_run_name(value)
    return None


def check_run_name(run: str) -> str:
    """Return `run` with secrets masked. Raises ValueError with the reason if the service would reject the name."""
    if len(run) > LONGEST_NAME:
        raise ValueError(f"the name of the run has {len(run):,} characters; the maximum is {LONGEST_NAME:,}")
    try:
        run.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name of the run, {run!a}, is not valid Unicode") from error
    return redacted_name(run, LONGEST_NAME)


def rank_from_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return (rank, local rank, world size) from the environment; (0, 0, 1) without a launcher."""
    rank = _first_integer(environment, _RANK_VARIABLES, 0)
    world_size = _first_integer(environment, _WORLD_SIZE_VARIABLES, 1)
    return rank, _first_integer(environment, _LOCAL_RANK_VARIABLES, 0), max(world_size, rank + 1)


def new_incarnation() -> str:
    """Return a new unique incarnation id for one exporter process."""
    return uuid.uuid4().hex


def new_launch_id(environment: Mapping[str, str]) -> str:
    """Return a new unique launch id, which rank 0 shares with all ranks. It starts with the launcher's job id, if any.

    The job id and the restart count are not unique: a requeued job keeps its id, and torchrun then counts from 0.
    """
    job = environment.get("SLURM_JOB_ID") or environment.get("TORCHELASTIC_RUN_ID", _UNSET_ELASTIC_ID)
    requeued = environment.get("SLURM_RESTART_COUNT", "")
    job = f"{job}-r{requeued}" if requeued.isdecimal() and int(requeued) else job
    job = job[:_LONGEST_JOB].encode(errors="replace").decode()
    return f"{job}.{restart_count(environment)}.{uuid.uuid4().hex[:12]}"


def restart_count(environment: Mapping[str, str]) -> str:
    """Return how often torchrun's elastic agent has restarted the workers, as text; "0" without the agent."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def host_name() -> str:
    """Return the name of this host: HOSTNAME if set, else the system's host name."""
    return redacted_name(os.environ.get("HOSTNAME") or socket.gethostname())


def _first_integer(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        text = environment.get(name, "")
        if text.isdecimal():
            return int(text)
    return default
