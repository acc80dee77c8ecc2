"""Names that boards, alert rules and data sources share. This module does not import Grafana's SDK."""

from __future__ import annotations

from typing import Final

TAG: Final = "rankscope"
"""Tag of all boards. Each board has a menu with links to all boards that have the tag."""

LIVE_SOURCE: Final = "rankscope-live"
"""Uid and name of the provisioned data source. Boards select it by default, and alert rules always use it."""

PAGES: Final = "pages"
"""Name of the hidden variable that contains the address of the pages of runs."""
