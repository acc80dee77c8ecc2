"""A Prometheus file_sd entry for a rank that has no service to register with. Written by rename, removed at the end."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Final

from rankscope_contract.escaping import path_segment
from rankscope_contract.identity import Identity
from rankscope_exporter.errors import ServeError

JOB: Final = "rankscope"
_LONGEST_NAME: Final = 120  # leaves room for suffixes below the 255 bytes of a file name


class DiscoveryFile:
    """One JSON file in a folder that Prometheus watches with `file_sd_configs: [{files: ["<folder>/*.json"]}]`."""

    def __init__(self, folder: str, identity: Identity) -> None:
        self._identity = identity
        self._text = ""
        self.path = Path(folder) / f"{_file_name(identity)}.json"

    def write(self, target: str, scheme: str = "http") -> None:
        """Announce `target` (host:port), which speaks `scheme`. Raises ServeError when the folder cannot be written."""
        labels = {"job": JOB, "instance": f"{self._identity.run}/{self._identity.rank}"}
        labels |= {"__scheme__": scheme} if scheme != "http" else {}
        self._text = json.dumps([{"targets": [target], "labels": labels}], indent=2) + "\n"
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self._text, encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            raise ServeError(
                f"cannot write the discovery file {self.path}: {error.strerror or error};"
                " set RANKSCOPE_DISCOVERY_DIR to a folder that this process may write"
            ) from error

    def remove(self) -> None:
        """Take the entry back, unless a newer process of the same rank has replaced it."""
        try:
            if self._text and self.path.read_text(encoding="utf-8") == self._text:
                self.path.unlink()
        except OSError:
            return  # gone already, or the folder is: nothing is announced any more


def _file_name(identity: Identity) -> str:
    # The name holds no incarnation: a restarted rank replaces the entry that a killed one left behind.
    run = path_segment(identity.run)
    if len(run) > _LONGEST_NAME:
        run = f"{run[:_LONGEST_NAME]}-{hashlib.sha256(identity.run.encode()).hexdigest()[:12]}"
    return f"rankscope-{run}-{identity.rank}"
