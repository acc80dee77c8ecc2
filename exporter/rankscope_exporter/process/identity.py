"""Determines the run, launch and rank of this process, and the git commit of the script. No collective is needed.

The commit is read from git's files. No program is started.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import logging
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope_contract.model.identity import RUN_VARIABLE, Identity, check_run_name, host_name
from rankscope_contract.model.redaction import MAX_LABEL, redacted_name

log = logging.getLogger("rankscope")

LAUNCH_KEY: Final = "rankscope/launch"
"""Prefix of the key of a launch in the key-value store, followed by restart count and world size.

torchrun's agent uses one store for all restarts of workers, so each restart needs a separate key.
"""

WAIT_FOR_RANK_0: Final = dt.timedelta(seconds=20)

# In order of precedence: torchrun, Slurm, Open MPI.
_RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANK_VARIABLES: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_WORLD_SIZE_VARIABLES: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")

_LONGEST_JOB: Final = 200
"""Number of characters of a job id that are part of the launch id. torchrun accepts a text of any length."""

_UNSET_ELASTIC_ID: Final = "none"  # torchrun's value without --rdzv-id


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The group of all ranks of a launch, as the framework knows it, and the place of this rank in it."""

    rank: int
    world_size: int
    store: Callable[[], Any]
    """Function that returns the key-value store that all ranks of the group use."""


def resolve_identity(environment: Mapping[str, str], run: str | None, group: RankGroup | None = None) -> Identity:
    """Return the identity of this process.

    The name of the run is the environment variable RANKSCOPE_RUN, else the argument `run`, else the scheduler's job id.

    With `group`, rank 0 creates run and launch id. The other ranks read them from the group's key-value store, without
    a collective and with a bounded wait. Without a group, run and launch id are derived from the launcher's environment
    variables.
    """
    rank, local_rank, world_size = rank_from_environment(environment)
    if group is not None:
        rank, world_size = group.rank, group.world_size
    launch = _launch(environment, run, world_size, group)
    return Identity(
        run=redacted_name(launch["run"], MAX_LABEL),
        launch_id=launch["launch_id"],
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        host=host_name(),
        incarnation=uuid.uuid4().hex,
    )


def rank_from_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return (rank, local rank, world size) from the environment; (0, 0, 1) without a launcher."""
    rank = _first_integer(environment, _RANK_VARIABLES, 0)
    world_size = _first_integer(environment, _WORLD_SIZE_VARIABLES, 1)
    return rank, _first_integer(environment, _LOCAL_RANK_VARIABLES, 0), max(world_size, rank + 1)


def _first_integer(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        text = environment.get(name, "")
        if text.isdecimal():
            return int(text)
    return default


def _launch(environment: Mapping[str, str], run: str | None, size: int, group: RankGroup | None) -> dict[str, str]:
    # Most specific first: RANKSCOPE_RUN applies to this launch, `run` to the script; the job id is only a fallback.
    own = {RUN_VARIABLE: environment.get(RUN_VARIABLE, "")}
    named = run_from_environment(own) or run or run_from_environment(environment)
    fresh = {"run": named or _generated_run(), "launch_id": new_launch_id(environment)}
    if size == 1:
        return fresh
    if group is None:
        return _derived_launch(environment, named, "torch.distributed has no process group at attach()")
    store = group.store()
    key = f"{LAUNCH_KEY}/{_restart_count(environment)}/{size}"
    if group.rank == 0:  # a second monitor in the same launch gets the launch id of the first
        text = store.compare_set(key, "", json.dumps(fresh))
    else:
        try:
            store.wait([key], WAIT_FOR_RANK_0)
        except (RuntimeError, ValueError) as error:  # DistStoreError is a RuntimeError; a closed store: ValueError
            return _derived_launch(environment, named, f"rank 0 has not attached a monitor: {error}")
        text = store.get(key)
    launch: dict[str, str] = json.loads(text)
    return launch


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


def new_launch_id(environment: Mapping[str, str]) -> str:
    """Return a new unique launch id, which rank 0 shares with all ranks. It starts with the launcher's job id, if any.

    The job id and the restart count are not unique: a requeued job keeps its id, and torchrun then counts from 0.
    """
    job = environment.get("SLURM_JOB_ID") or environment.get("TORCHELASTIC_RUN_ID", _UNSET_ELASTIC_ID)
    requeued = environment.get("SLURM_RESTART_COUNT", "")
    job = f"{job}-r{requeued}" if requeued.isdecimal() and int(requeued) else job
    job = job[:_LONGEST_JOB].encode(errors="replace").decode()
    return f"{job}.{_restart_count(environment)}.{uuid.uuid4().hex[:12]}"


def _restart_count(environment: Mapping[str, str]) -> str:
    """Return how often torchrun's elastic agent has restarted the workers, as text; "0" without the agent."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def _derived_launch(environment: Mapping[str, str], run: str | None, why: str) -> dict[str, str]:
    """Return the run and launch id, computed from the launcher's environment variables without communication.

    Launches with the same values of these variables, such as master address and port, have the same launch id.
    """
    variables = (
        *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *("MASTER_ADDR", "MASTER_PORT"),
    )
    text = "|".join(environment.get(name, "") for name in variables)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    name = run or f"run-{digest}"
    hint = "" if run else f" Set {RUN_VARIABLE} to name the run, now {name!r}."
    log.warning(
        "%s: the launch id is derived from the launcher's environment variables; a second launch with the same master "
        "address and port would have the same id. Initialise torch.distributed before attach().%s",
        why,
        hint,
    )
    return {"run": name, "launch_id": f"derived.{digest}"}


def _generated_run() -> str:
    script = Path(sys.argv[0]).stem or "python"
    now = dt.datetime.now(tz=dt.UTC)
    return f"{script}-{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"


_SHA: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def git_commit(place: Path) -> str | None:
    """Return the git commit that is checked out at `place`, a file or folder.

    Return None outside of a repository, or if git's files cannot be read.
    """
    try:
        start = place.resolve()
        for folder in (start, *start.parents):
            if (folder / ".git").exists():
                return _head(_git_folder(folder / ".git"))
    except (OSError, ValueError, RuntimeError):  # unreadable, removed in the meantime, not text, circular links
        return None
    return None


def script_commit(script: str) -> str | None:
    """Return the git commit at the path `script`, else (an installed launcher) that of the working directory."""
    return git_commit(Path(script)) or git_commit(Path())


def _git_folder(dot_git: Path) -> Path:
    """Return the folder to which `.git` refers."""
    # In worktrees and submodules, `.git` is a file that contains the path.
    if dot_git.is_dir():
        return dot_git
    return (dot_git.parent / dot_git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()


def _head(git: Path) -> str | None:
    common = git / "commondir"
    shared = (git / common.read_text(encoding="utf-8").strip()).resolve() if common.exists() else git
    text = _line(git / "HEAD")
    if text is not None and text.startswith("ref:"):
        name = text.removeprefix("ref:").strip()
        text = _line(git / name) or _line(shared / name) or _packed(shared, name)
    return text if text is not None and _SHA.fullmatch(text) else None


def _line(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _packed(shared: Path, name: str) -> str | None:
    for line in (_line(shared / "packed-refs") or "").splitlines():
        sha, _, reference = line.partition(" ")
        if reference == name:
            return sha
    return None
