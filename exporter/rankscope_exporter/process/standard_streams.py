"""Keep the descriptors of closed standard streams free of other files.

The kernel gives a new file the lowest free descriptor. In a process that starts with a closed standard output, a record
file or a socket would get its number, and output of native code would be written into it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

_LAST_STANDARD: Final = 2


def occupy_standard_descriptors() -> None:
    """Open the null device for closed descriptors from 0 to 2, until the process exits; children do not inherit it."""
    with contextlib.suppress(OSError):  # no null device, or the limit of open files: nothing else depends on it
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
            pass
        os.close(descriptor)
