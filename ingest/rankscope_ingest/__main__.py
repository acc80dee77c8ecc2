"""Implement `python -m rankscope_ingest rankscope.toml`: run the service without the `rankscope` command."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from rankscope_contract.model.redaction import MAX_DOCUMENT, redacted_text
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.base.memory import share_allocator
from rankscope_storage.base.errors import ShardLostError, StoreError


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted_text(super().format(record), MAX_DOCUMENT)


def main() -> int:
    """Run the service with the configuration file that is the only command line argument.

    Return the exit status: 0 if the service was stopped, 1 after an error, 2 for a wrong command line, and 3 if another
    service has taken over the shard of this service.
    """
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m rankscope_ingest CONFIG.toml\n")
        return 2
    share_allocator()
    from rankscope_ingest.service.main import run  # noqa: PLC0415 - it loads Arrow

    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        config = load_config(sys.argv[1], environment=os.environ)
        asyncio.run(run(config, on_ready=lambda url: print(url, flush=True)))  # noqa: T201 - the output of this command
    except (IngestError, StoreError) as error:
        sys.stderr.write(f"{error}\n")
        return 3 if isinstance(error, ShardLostError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
