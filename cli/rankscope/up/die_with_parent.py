"""Run a command that stops when its parent exits: `python die_with_parent.py PARENT COMMAND…`.

The kernel sends SIGTERM to COMMAND when the process PARENT exits. This is needed because a parent killed by SIGKILL
cannot stop its children itself. This script uses only the standard library and runs with `python -I -S`, so that it
starts within milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request that the kernel sends SIGTERM when the parent exits, and replace this process with the command.

    The process exits if the parent has already exited.
    """
    parent, *command = sys.argv[1:]
    # SIGTERM and not SIGKILL: the service must still store the records that it has received.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(f"parent process {parent} has already exited")
    os.execvp(command[0], command)  # noqa: S606 - replacing the process is the purpose


if __name__ == "__main__":
    main()
