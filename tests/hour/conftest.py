"""The person's hour runs under `make test-hour`, which is not part of `make test`."""

import os

collect_ignore_glob = [] if os.environ.get("RANKSCOPE_HOUR") else ["test_*"]
