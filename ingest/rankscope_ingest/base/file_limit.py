"""The limit of open files of the service process. Connections and files that the store reads count as open files."""

from __future__ import annotations

import logging
import resource
from typing import Final

log = logging.getLogger(__name__)

_MOST_FILES: Final = 65_536
"""Highest soft limit that the service sets. A container may have a hard limit of 1,000 million files."""


def file_limit() -> int:
    """Return the number of files that this process can have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, at most to 65,536. A higher soft limit remains."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # some sandboxes forbid it
        log.warning("the limit of open files remains %d, because it cannot be raised: %s", soft, error)
