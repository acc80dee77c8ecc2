"""Compile the modules that test processes import, each once, before several test processes start together."""

import os

from tests.programs import IMPORTED, OF_COMMANDS, OF_TRAINING, server_of


def main() -> None:
    """Import all modules in two processes in parallel, of which one has torch."""
    servers = [server_of(*names) for names in ((*IMPORTED, *OF_TRAINING), OF_COMMANDS)]
    for server in servers:
        assert 0 == server.run("pass", dict(os.environ), seconds=600.0).returncode


if __name__ == "__main__":
    main()
