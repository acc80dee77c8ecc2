"""The file by which measuring is switched: noticed when edited, and told when measuring has ended.

Looked at from a background thread. An edit counts once it has stood from one look to the next, so that a file is not
read while an editor writes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.config.loader import parse_settings, without_comments

_SWITCHED_ON: Final = re.compile(r"""(["']?\bdynamic_on["']?\s*[:=]\s*)[Tt]rue\b""")


@dataclass(frozen=True, slots=True)
class Edit:
    """What the file says since `stamp`, the time of its last change in nanoseconds."""

    document: Mapping[str, Any]
    stamp: int


class SwitchFile:
    """One file, which need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.stamp = 0
        """When the text that was told last was written, in nanoseconds."""
        self._known: str | None = None  # that text
        self._seen: tuple[int, str] | None = None  # what stood there at the last look

    def read(self) -> Edit | None:
        """Return what stands there now; None where nothing does. Raises ConfigError."""
        found = self._seen = self._content()
        if found is None:
            return None
        return self._told(*found)

    def poll(self) -> Edit | None:
        """Return an edit that has stood since the last look. Raises ConfigError, once for each text that is wrong."""
        found, before = self._content(), self._seen
        self._seen = found
        if found is None or found != before or found[1] == self._known:
            return None
        return self._told(*found)

    def switch_off(self) -> bool:
        """Write `dynamic_on: false`, all else as it was; False when the file was edited since or does not say it."""
        found = self._content()
        if found is None or found[1] != self._known:
            return False
        text = found[1]
        # Looked for where comments are blank: an example in one of them is not what is switched.
        on = _SWITCHED_ON.search(text if self.path.suffix == ".toml" else without_comments(text))
        if on is None:
            return False
        text = f"{text[: on.end(1)]}false{text[on.end() :]}"
        _replace(self.path.resolve(), text)
        self._known = text  # our own edit is none
        return True

    def _told(self, stamp: int, text: str) -> Edit:
        self.stamp, self._known = stamp, text
        return Edit(parse_settings(self.path, text), stamp)

    def _content(self) -> tuple[int, str] | None:
        with contextlib.suppress(FileNotFoundError):
            # Read every time: an edit within the resolution of the file system's clock keeps the time.
            data = self.path.read_bytes()
            try:
                return self.path.stat().st_mtime_ns, data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self.path}: {error}") from error
        return None


def _replace(path: Path, text: str) -> None:
    """Put a file with `text` in the place of `path` at once: whoever reads sees the old or the new, whole."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(path.stat().st_mode & 0o777)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
