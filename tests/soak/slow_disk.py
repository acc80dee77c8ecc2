"""The `rankscope` command on a disk that takes its time: each fsync of it takes as long as the environment says."""

from __future__ import annotations

import os
import time

from rankscope.__main__ import main

SECONDS = float(os.environ["SLOW_FSYNC_SECONDS"])
_fsync = os.fsync


def fsync(descriptor: int) -> None:
    time.sleep(SECONDS)
    _fsync(descriptor)


if __name__ == "__main__":
    os.fsync = fsync  # type: ignore[assignment]  # of all that is called here
    main()
