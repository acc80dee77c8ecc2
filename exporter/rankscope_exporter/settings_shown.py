"""A configuration as others may see it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rankscope_contract.redaction import redacted
from rankscope_exporter.config import MonitorConfig
from rankscope_exporter.revision import script_commit


def public_settings(config: MonitorConfig) -> dict[str, Any]:
    """Return the configuration as /config and the store show it: without secrets."""
    settings = asdict(config)
    settings["rules"] = [{"rule_name": type(rule).__name__, "args": asdict(rule)} for rule in config.rules]
    shown: dict[str, Any] = redacted({**settings, "argv": sys.argv})
    return shown | {"git_commit": script_commit(sys.argv[0])}
