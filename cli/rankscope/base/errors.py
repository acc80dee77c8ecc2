"""What a command says when it cannot do what was asked: one line, and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

FAILED: Final = 1
"""The command understood what was asked, and it could not be done."""

USAGE: Final = 2
"""The command line or a configuration is wrong."""

TAKEN_OVER: Final = 3
"""Another service has what this one wrote to: started again, it would take that back, and so on for ever."""


class CommandError(Exception):
    """Ends the command: the message goes to standard error without a traceback."""

    def __init__(self, message: str, *, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean …?` when one of `known` is close to `name`, else the empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
