"""`python leash.py PARENT COMMAND…`: become COMMAND, and be ended by the kernel when process PARENT is no more.

A parent that is killed with -9 can end nobody itself. Standard library only, and no import of ours: it runs in a bare
interpreter, so that a start costs milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for the signal, make sure that it was not asked too late, and become the command."""
    parent, *command = sys.argv[1:]
    # SIGTERM: a service that loses its parent still stores what it has.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(f"process {parent} is gone already")
    os.execvp(command[0], command)  # noqa: S606 - becoming the command is the point


if __name__ == "__main__":
    main()
