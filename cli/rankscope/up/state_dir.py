"""The state folder of `rankscope up`: generated configuration, data of Prometheus and Alertmanager, logs and ports.

Only the owner can read its subfolders, because they contain tokens and notification addresses. A lock file ensures that
only one `rankscope up` process uses the folder at a time.
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

from rankscope.shell.errors import CommandError
from rankscope_contract.wire.spool import write_whole

DEFAULT: Final = "rankscope-live"
_NOTES: Final = "live.json"
_LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class StateDir:
    """A state folder of `rankscope up`, and the paths in it."""

    path: Path

    def __post_init__(self) -> None:
        # Prometheus resolves relative paths against the folder of its configuration file.
        object.__setattr__(self, "path", self.path.absolute())

    @classmethod
    def next_to(cls, store: str | Path) -> StateDir:
        """Return the default state folder, which is next to the store."""
        return cls(Path(store).parent / DEFAULT)

    def log(self, name: str) -> Path:
        """Return the path of the log file of a program."""
        return self.path / "logs" / f"{name}.log"

    def data(self, name: str) -> Path:
        """Return the path of the data folder of a program."""
        return self.path / "data" / name

    def config(self, name: str) -> Path:
        """Return the path of a generated configuration file."""
        return self.path / "config" / name

    def create(self) -> None:
        """Create the folder, with subfolders that only the owner can read.

        Raises CommandError if the folder cannot be created, or if it contains files but no lock file of `rankscope up`.
        """
        try:
            if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / _LOCK).exists():
                raise CommandError(f"{self.path} was not created by rankscope up: name an empty folder with --state")
            self.path.mkdir(parents=True, exist_ok=True)
            for part in ("logs", "data", "config"):
                (self.path / part).mkdir(mode=0o700, exist_ok=True)
            (self.path / _LOCK).touch(0o600)
        except OSError as error:
            raise CommandError(
                f"cannot write to {self.path}: {error.strerror}; name another folder with --state"
            ) from error

    def write(self, files: Mapping[str, str]) -> None:
        """Write generated configuration files atomically; only the owner can read them."""
        for name, text in files.items():
            write_whole(self.config(name), text)

    def save_notes(self, notes: Mapping[str, Any]) -> None:
        """Save ports and URLs for the next start and for `rankscope doctor`."""
        write_whole(self.path / _NOTES, json.dumps(notes, indent=2) + "\n")

    def load_notes(self) -> dict[str, Any]:
        """Return the saved ports and URLs; an empty dict if the file that contains them is missing or invalid."""
        try:
            notes = json.loads((self.path / _NOTES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return notes if isinstance(notes, dict) else {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this folder in the context.

        Raises CommandError if another process holds the lock; the message names that process.
        """
        with (self.path / _LOCK).open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
                raise CommandError(
                    f"{self.path} is in use by {holder}: stop it, or name another folder with --state"
                ) from error
            lock.truncate(0)
            lock.write(f"process {os.getpid()}")
            lock.flush()
            yield
