"""Addresses of logs: a path on this machine, or `ssh://user@host:port/path`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote

from rankscope_ingest.base.errors import ConfigError
from rankscope_storage.base.escaping import path_segment
from rankscope_storage.files.sorting import own_part

SCHEME: Final = "ssh://"
FOLDER: Final = "_watch"
"""Name of the folder with copies of logs of other machines, which is inside the folder of the store.

Readers of Delta tables, vacuum and retention ignore names that start with an underscore.
"""

_EXAMPLE: Final = "ssh://user@host/data/train.log"
_MACHINE: Final = re.compile(r"(?:\[(?P<ip>[^\[\]]+)\]|(?P<host>(?!-)[^:\[\]]+))(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAddress:
    """The address of a log. `host` is None for a log on this machine.

    A path of another machine that is relative belongs to the home folder of the user.
    """

    path: str
    host: str | None = None
    user: str | None = None
    port: int | None = None

    @staticmethod
    def parse(text: str) -> LogAddress:
        """Return the address in `text`. Raises ConfigError, whose message shows the expected form, for a wrong one."""
        if not text.startswith(SCHEME):
            if "://" in text:
                raise ConfigError(f"{text}: a log is a path or an address such as {_EXAMPLE}")
            return LogAddress(path=str(Path(text).expanduser().absolute()))
        place, _, path = text.removeprefix(SCHEME).partition("/")
        user, _, machine = place.rpartition("@")
        if ":" in user:
            raise ConfigError(
                f"{SCHEME}…@{machine}: a password in the address is not accepted, because other users can read it: "
                "use a key, or enter the password when the command asks for it"
            )
        found = _MACHINE.fullmatch(machine)
        if found is None or not 0 < int(found["port"] or 1) < 65536:
            raise ConfigError(f"{text}: {machine!r} is not a host or host:port: write an address such as {_EXAMPLE}")
        path = unquote(path)
        path = path[2:] if path.startswith("~/") else f"/{path}"
        if path.endswith("/") or not path.strip("/"):
            raise ConfigError(f"{text} has no path of a file: write an address such as {_EXAMPLE}")
        port = int(found["port"]) if found["port"] else None
        return LogAddress(path=path, host=found["ip"] or found["host"], user=unquote(user) or None, port=port)

    def __str__(self) -> str:
        """Return the text of the address, as `parse` accepts it."""
        if self.host is None:
            return self.path
        return f"{SCHEME}{self.machine}{self.path if self.path.startswith('/') else f'/~/{self.path}'}"

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return PurePosixPath(self.path).name

    @property
    def machine(self) -> str:
        """Return user, host and port as text, such as `user@host:22`; `this machine` for a log on this machine."""
        if self.host is None:
            return "this machine"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{f'{self.user}@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    def copy_in(self, store: Path) -> Path:
        """Return the path of the copy of a log of another machine. The name of the file does not change."""
        folder = own_part(str(PurePosixPath(self.path).parent))
        return store.absolute() / FOLDER / path_segment(self.machine) / folder / self.name
