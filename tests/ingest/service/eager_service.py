"""`python -m rankscope_ingest` that compacts after each third commit and vacuums each second, for kill tests."""

import sys

from rankscope_ingest import __main__
from rankscope_ingest.pipeline import maintenance_schedule
from rankscope_storage.maintenance import compaction as merges

merges.SMALL_FILES = 1
maintenance_schedule.COMPACT_EVERY_COMMITS = 3
maintenance_schedule.MAINTAIN_SECONDS = 1.0

sys.exit(__main__.main())
