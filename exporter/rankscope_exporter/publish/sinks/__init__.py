"""Sinks: outputs of a rank's records in addition to the record channel. To add a sink, add a module to this package.

`MonitorConfig.sinks` contains the names and settings of the sinks to use: `{"csv": {"folder": "out"}, "api": {}}`. The
publisher thread passes each published record to every sink, in order; the training thread never calls a sink.

`Monitor.sink("api")` returns the sink with this name. Its methods `rows(*kinds, step=None)` and `features(*kinds,
step=None)` may be called in any thread.
"""

from __future__ import annotations

from rankscope_exporter.process.discovery import extension, import_folder
from rankscope_exporter.process.errors import ConfigError
from rankscope_exporter.process.validation import listed
from rankscope_exporter.publish.sinks.base import Sink

__all__ = ["Sink", "sink_class", "sink_classes"]


def sink_classes() -> dict[str, type[Sink]]:
    """Return all sink classes by name."""
    extension("sinks")
    return _imported()


def _imported() -> dict[str, type[Sink]]:
    import_folder(__name__)
    return {cls.name: cls for cls in sorted(Sink.__subclasses__(), key=lambda cls: cls.name)}


def sink_class(name: str) -> type[Sink]:
    """Return the class of the sink `name`.

    Raises ConfigError for an unknown name; the text suggests the most similar name.
    """
    classes = _imported()
    if name not in classes:
        classes = sink_classes()
    if name not in classes:
        raise ConfigError(f"sinks: {name!r} is unknown; valid names are {listed(classes, name)}")
    return classes[name]
