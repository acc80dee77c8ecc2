"""The `rankscope` command with a slow disk: the environment sets the duration of each fsync."""

import os
import time

from rankscope.__main__ import main

SECONDS = float(os.environ["SLOW_FSYNC_SECONDS"])
_fsync = os.fsync


def fsync(descriptor: int) -> None:
    time.sleep(SECONDS)
    _fsync(descriptor)


if __name__ == "__main__":
    os.fsync = fsync  # type: ignore[assignment]  # only the arguments of the calls here
    main()
