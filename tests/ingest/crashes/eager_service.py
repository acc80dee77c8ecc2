"""`python -m rankscope_ingest` that compacts after every third commit and cleans up every second, to be killed."""

from __future__ import annotations

import sys

from rankscope_ingest import __main__, maintenance
from rankscope_storage.maintenance import compaction_plan

compaction_plan.SMALL_FILES = 1
maintenance.COMPACT_EVERY_COMMITS = 3
maintenance.MAINTAIN_SECONDS = 1.0

sys.exit(__main__.main())
