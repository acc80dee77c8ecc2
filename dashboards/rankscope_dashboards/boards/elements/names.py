"""Names that all boards share. This module does not import Grafana's SDK."""

from __future__ import annotations

from typing import Final

TAG: Final = "rankscope"
"""Tag of all boards. Each board has a menu with links to all boards that have the tag."""

PAGES: Final = "pages"
"""Name of the hidden variable that contains the address of the pages of runs."""
