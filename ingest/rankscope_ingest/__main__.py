"""`python -m rankscope_ingest rankscope.toml`: the service without the comfort of the command line."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.base.memory import share_allocator
from rankscope_storage.base.errors import ShardLostError, StoreError


def _say(url: str) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def main() -> int:
    """Serve as the file named by the only argument says; return the exit status: 3 where another has taken over."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m rankscope_ingest CONFIG.toml\n")
        return 2
    share_allocator()
    from rankscope_ingest.service.main import run  # noqa: PLC0415 - it loads Arrow

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(run(load_config(sys.argv[1], environment=os.environ), on_ready=_say))
    except (IngestError, StoreError) as error:
        sys.stderr.write(f"{error}\n")
        return 3 if isinstance(error, ShardLostError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
