"""The exception that ends a command with a one-line message and an exit code."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import Final

from rankscope_contract.model.redaction import MAX_DOCUMENT, redacted_text

FAILED: Final = 1
"""Exit code: the command line is valid, but the command could not do its work."""

USAGE: Final = 2
"""Exit code: the command line or a configuration file is wrong."""

TAKEN_OVER: Final = 3
"""Exit code of a service whose shard another service took over.

Do not restart such a service automatically: it would take the shard back, and both services would restart forever."""


class CommandError(Exception):
    """Exception that ends the command with exit code `code`.

    Its message is printed on standard error, without a traceback. Secrets in it, such as the password of an address,
    are masked.
    """

    def __init__(self, message: str, *, code: int = FAILED) -> None:
        super().__init__(redacted_text(message, MAX_DOCUMENT))
        self.code = code


@contextlib.contextmanager
def command_errors(*failed: type[Exception], usage: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise CommandError for each exception of the given types, with the exit code USAGE for those in `usage`."""
    try:
        yield
    except (*failed, *usage) as error:
        raise CommandError(str(error), code=USAGE if isinstance(error, usage) else FAILED) from error


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the text ` Did you mean …?` with the entry of `known` that is most similar to `name`.

    The result is an empty text if no entry is similar.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
