"""What a Monitor may be given as its configuration: an object, a mapping, or the path of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankscope_exporter.config import MonitorConfig

Given = MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def config_of(given: Given) -> MonitorConfig:
    """Return the configuration that is meant, following its file where DYNAMIC_MONITOR asks. Raises ConfigError."""
    if given is None:
        return MonitorConfig()
    if isinstance(given, MonitorConfig):
        return given
    if isinstance(given, Mapping):
        return MonitorConfig.from_mapping(given)
    path = os.fspath(given)
    config = MonitorConfig.from_file(path)
    is_watched = config.switch_file is None and os.environ.get("DYNAMIC_MONITOR", "").lower() == "true"
    return replace(config, switch_file=path) if is_watched else config
