"""The switch file: detects edits of the file, and sets `dynamic_on` to false in it when sampling has ended.

A background thread polls the file. An edit is read only when two polls in succession find the same content, because an
editor may still be writing the file at the first poll.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.config.loader import parse_settings, without_comments

_SWITCHED_ON: Final = re.compile(r"""(["']?\bdynamic_on["']?\s*[:=]\s*)[Tt]rue\b""")


@dataclass(frozen=True, slots=True)
class Edit:
    """The content of the switch file, and the time of its last change in nanoseconds, `stamp`."""

    document: Mapping[str, Any]
    stamp: int


class SwitchFile:
    """A switch file at a path. The file need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.stamp = 0
        """Modification time, in nanoseconds, of the file content that `read` or `poll` returned last. Initially 0."""
        self._known: str | None = None  # the text that was returned last
        self._seen: tuple[int, str] | None = None  # the content at the last poll

    def read(self) -> Edit | None:
        """Return the present content of the switch file; None if there is no file.

        Raises ConfigError if this content is not valid.
        """
        found = self._seen = self._content()
        if found is None:
            return None
        return self._edit(*found)

    def poll(self) -> Edit | None:
        """Return a new content of the switch file that is unchanged since the previous poll.

        Return None if there is no new content. Raises ConfigError for an invalid content, once for each such content.
        """
        found, before = self._content(), self._seen
        self._seen = found
        if found is None or found != before or found[1] == self._known:
            return None
        return self._edit(*found)

    def switch_off(self) -> bool:
        """Set `dynamic_on` to false in the switch file.

        Return False if the file was edited or deleted since this object last returned its content, or if the file does
        not set `dynamic_on` to true.
        """
        found = self._content()
        if found is None or found[1] != self._known:
            return False
        text = found[1]
        # Search the text without comments: a comment may contain an example of the setting.
        on = _SWITCHED_ON.search(text if self.path.suffix == ".toml" else without_comments(text))
        if on is None:
            return False
        text = f"{text[: on.end(1)]}false{text[on.end() :]}"
        _replace(self.path.resolve(), text)
        self._known = text  # the monitor's own edit is not an edit
        return True

    def _edit(self, stamp: int, text: str) -> Edit:
        self.stamp, self._known = stamp, text
        return Edit(parse_settings(self.path, text), stamp)

    def _content(self) -> tuple[int, str] | None:
        with contextlib.suppress(FileNotFoundError):
            # Read at each poll: an edit within the resolution of the file system's clock does not change the time.
            data = self.path.read_bytes()
            try:
                return self.path.stat().st_mtime_ns, data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self.path}: {error}") from error
        return None


class FollowedFile:
    """A switch file that reports errors to the user instead of raising them.

    The function `check` raises ConfigError for a document that is not a valid configuration. The function `tell`
    publishes the text of an error.
    """

    def __init__(
        self, path: str | os.PathLike[str], check: Callable[[Mapping[str, Any]], object], tell: Callable[[str], None]
    ) -> None:
        self._file = SwitchFile(path)
        self._check = check
        self._tell = tell
        self._reported: str | None = None

    @property
    def stamp(self) -> int:
        """Modification time, in nanoseconds, of the file content that `read` or `poll` returned last. Initially 0."""
        return self._file.stamp

    def read(self) -> Edit | None:
        """Return the present content of the switch file; None if there is no file or after reporting an error."""
        return self._checked(self._file.read)

    def poll(self) -> Edit | None:
        """Return a new content of the file that is unchanged since the previous poll.

        Return None if there is no new content, or after reporting an error.
        """
        return self._checked(self._file.poll)

    def switch_off(self) -> None:
        """Set `dynamic_on` to false in the switch file, or report why this is not possible."""
        try:
            self._file.switch_off()
        except OSError as error:
            self._tell(f"sampling has ended, but dynamic_on cannot be set to false in the switch file: {error}")

    def _checked(self, read: Callable[[], Edit | None]) -> Edit | None:
        try:
            edit = read()
            if edit is not None:
                self._check(edit.document)
                self._reported = None
        except (ConfigError, OSError) as error:
            text = f"the switch file cannot be used, sampling does not change: {error}"
            if text != self._reported:
                self._reported = text
                self._tell(text)
            return None
        return edit


def _replace(path: Path, text: str) -> None:
    """Replace the content of the file `path` by `text` atomically: a reader sees either the old or the new content."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(path.stat().st_mode & 0o777)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
