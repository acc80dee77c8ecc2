"""Identity of a process: run, launch, rank, host, incarnation."""

from __future__ import annotations

import os
import socket
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


def check_run_name(run: str) -> str:
    """Return `run` with secrets masked. Raises ValueError with the reason if the service would reject the name."""
    if len(run) > LONGEST_NAME:
        raise ValueError(f"the name of the run has {len(run):,} characters; the maximum is {LONGEST_NAME:,}")
    try:
        run.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name of the run, {run!a}, is not valid Unicode") from error
    return redacted_name(run, LONGEST_NAME)


def host_name() -> str:
    """Return the name of this host: HOSTNAME if set, else the system's host name."""
    return redacted_name(os.environ.get("HOSTNAME") or socket.gethostname())
