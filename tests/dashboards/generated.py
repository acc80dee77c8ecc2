"""The generated files of dashboards and rules. Several test modules read them while tests are collected."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.generate import generated_files

FILES = MappingProxyType(generated_files())
"""The text of each file by its path. It is generated once in a process, which takes a second."""

BOARDS = {Path(name).stem: json.loads(text) for name, text in FILES.items() if name.endswith(".json")}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in all_panels(board) if panel["type"] != "row"]
"""The name of its board, and the panel."""
