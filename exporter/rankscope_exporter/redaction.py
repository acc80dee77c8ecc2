"""Secrets are left out of what a rank shows of itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"

_SECRET_OPTION: Final = re.compile(r"^-{1,2}[\w.-]*(key|token|secret|passw|credential|auth)[\w.-]*", re.IGNORECASE)
_URL_LOGIN: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the values of options that sound secret, and logins in addresses, masked."""
    shown: list[str] = []
    masks_next = False
    for argument in arguments:
        if masks_next and not argument.startswith("-"):
            shown.append(MASK)
            masks_next = False
            continue
        name, equals, _ = argument.partition("=")
        secret = _SECRET_OPTION.match(name) is not None
        masks_next = secret and not equals
        shown.append(f"{name}={MASK}" if secret and equals else _URL_LOGIN.sub(MASK, argument))
    return shown
