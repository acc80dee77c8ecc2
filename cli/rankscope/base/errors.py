"""The exception that ends a command with a one-line message and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

FAILED: Final = 1
"""The command line is valid, but the command could not do the work."""

USAGE: Final = 2
"""The command line or a configuration file is wrong."""

TAKEN_OVER: Final = 3
"""Another service took over the shard. Do not restart this service: it would take the shard back, and so on."""


class CommandError(Exception):
    """Ends the command. The message is printed on standard error, without a traceback."""

    def __init__(self, message: str, *, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean …?` with the entry of `known` closest to `name`, or an empty string if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
