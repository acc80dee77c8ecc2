"""The folder in which `rankscope up` keeps what it makes: configuration, data of Prometheus, logs, and its ports.

What it holds is readable by its owner alone, since tokens and people's addresses stand in it. One `up` at a time works
in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope.base.errors import CommandError

DEFAULT: Final = "rankscope-live"
_NOTES: Final = "live.json"
_LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class Folder:
    """Paths under one state folder."""

    path: Path

    def __post_init__(self) -> None:
        # Prometheus takes a relative path for one beside its configuration.
        object.__setattr__(self, "path", self.path.absolute())

    @classmethod
    def beside(cls, store: str | Path) -> Folder:
        """Return the folder that goes with a store: beside it, or here when the store is on object storage."""
        local = "://" not in str(store)
        return cls((Path(store).parent if local else Path()) / DEFAULT)

    def log(self, name: str) -> Path:
        """Return the log file of a program."""
        return self.path / "logs" / f"{name}.log"

    def data(self, name: str) -> Path:
        """Return where a program keeps its own data."""
        return self.path / "data" / name

    def config(self, name: str) -> Path:
        """Return where a generated file lies."""
        return self.path / "config" / name

    def make(self) -> None:
        """Make the folder, for its owner alone. Raises CommandError when that cannot be, or it is somebody else's."""
        try:
            if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / _LOCK).exists():
                raise CommandError(f"{self.path} was not made by us: name an empty folder with --state")
            self.path.mkdir(parents=True, exist_ok=True)
            for part in ("logs", "data", "config"):
                (self.path / part).mkdir(mode=0o700, exist_ok=True)
            (self.path / _LOCK).touch(0o600)
        except OSError as error:
            raise CommandError(f"cannot write to {self.path}: {error.strerror}; name another with --state") from error

    def write(self, files: Mapping[str, str]) -> None:
        """Write generated files, each whole or not at all, readable by us alone."""
        for name, text in files.items():
            _replace(self.config(name), text)

    def remember(self, notes: Mapping[str, Any]) -> None:
        """Keep what another command, or the next start, wants to know."""
        _replace(self.path / _NOTES, json.dumps(notes, indent=2) + "\n")

    def notes(self) -> dict[str, Any]:
        """Return what was kept; nothing when there is no such file, or somebody wrote something else into it."""
        try:
            notes = json.loads((self.path / _NOTES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return notes if isinstance(notes, dict) else {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for ourselves. Raises CommandError naming who has it."""
        with (self.path / _LOCK).open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
                raise CommandError(f"{self.path} is in use by {holder}: end it, or name another --state") from error
            lock.truncate(0)
            lock.write(f"process {os.getpid()}")
            lock.flush()
            yield


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)
