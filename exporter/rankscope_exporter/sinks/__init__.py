"""Where a rank's numbers go beside the record channel, while training runs. A sink is added by adding a file.

`MonitorConfig.sinks` names them, each with its settings: `{"csv": {"folder": "out"}, "api": {}}`. The publisher thread
feeds every record that it has published to every sink, in order; the training thread never does. `Monitor.sink("api")`
returns the sink itself, whose `rows(*kinds, step=None)` and `features(*kinds, step=None)` any thread may call.
"""

from __future__ import annotations

import importlib
import pkgutil

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.base.validation import did_you_mean
from rankscope_exporter.sinks.base import Sink

__all__ = ["Sink", "sink_class", "sink_classes"]


def sink_classes() -> dict[str, type[Sink]]:
    """Return every sink class by its name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {cls.name: cls for cls in sorted(Sink.__subclasses__(), key=lambda cls: cls.name)}


def sink_class(name: str) -> type[Sink]:
    """Return the class of the sink `name`; a name that is none is answered with the nearest one."""
    classes = sink_classes()
    if name not in classes:
        hint = did_you_mean(name, classes)
        raise ConfigError(f"sinks: {name!r} is unknown; there are {', '.join(classes)}.{hint}")
    return classes[name]
