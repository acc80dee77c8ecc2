"""Names and documents of a spool folder. Reads and writes small texts; knows nothing of records or locks."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.protocol.channel import Registration

FORMAT: Final = 1
IDENTITY_NAME: Final = "identity.json"
LOCK_NAME: Final = "lock"
UNFINISHED_PREFIX: Final = "."
"""A folder is built under such a name and renamed once it is locked and complete."""

_SEGMENT: Final = re.compile(r"(\d{12,18})\.arrows")
_PLAN: Final = re.compile(r"plan-[0-9a-f]{8,64}\.json")


_SPOKEN: Final = (FORMAT, SCHEMA_VERSION)
_NEEDED: Final = {"run": str, "launch_id": str, "host": str, "rank": int, "world_size": int, "started_at": int}


class SpoolError(Exception):
    """A folder is no spool that can be read here; the text says which and why."""


def segment_name(first: int) -> str:
    """Return the name of the file whose first record is `first`; names sort as their numbers do."""
    return f"{first:012d}.arrows"


def plan_name(plan_hash: str) -> str:
    """Return the name of a plan's file."""
    return f"plan-{plan_hash}.json"


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Return (first seq, path) of each file of records, in order; files of any other name are not ours."""
    named = ((_SEGMENT.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match is not None)


def is_ours(name: str) -> bool:
    """Return whether a file of this name belongs to a spool, and goes with it."""
    known = name in (IDENTITY_NAME, LOCK_NAME) or _SEGMENT.fullmatch(name) or _PLAN.fullmatch(name)
    return bool(known) or name.endswith(".tmp")


def folders(root: Path) -> list[Path]:
    """Return the spools below `root`, the oldest first. Raises OSError when `root` cannot be read."""
    return sorted((path for path in root.iterdir() if _is_spool(path)), key=lambda path: (_began(path), path))


def _began(folder: Path) -> float:
    """Return when it was made, by the clock of the disk: the identity is written once."""
    try:
        return (folder / IDENTITY_NAME).stat().st_mtime
    except OSError:
        return 0.0


def _is_spool(path: Path) -> bool:
    if path.name.startswith(UNFINISHED_PREFIX):
        return False
    try:
        return (path / LOCK_NAME).is_file()
    except OSError:
        return True  # it cannot be looked into: whoever opens it says so


def write_whole(path: Path, text: str, *, sync: bool = False) -> None:
    """Write `text` so that `path` holds all of it or does not exist; only its owner can read it.

    With `sync` it outlives a power cut, once its folder was synced too.
    """
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode("utf-8", "replace"))
        if sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the device: what is in a file is of no use without its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def service_name(url: str) -> str:
    """Return how a spool names the service at `url`: as it is dialled, in one spelling and without secrets.

    Names are not resolved: localhost and 127.0.0.1 are two.
    """
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def write_identity(folder: Path, registration: Registration, *, service: str | None = None, sync: bool = False) -> None:
    """Write down who the process is, and which service, by `service_name`, its records are for."""
    text = json.dumps({"format": FORMAT, "service": service, "registration": asdict(registration)})
    write_whole(folder / IDENTITY_NAME, text, sync=sync)


def read_service(folder: Path) -> str | None:
    """Return which service the records are for; None where that is not said, or cannot be read."""
    try:
        service = json.loads((folder / IDENTITY_NAME).read_bytes())["service"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return service if isinstance(service, str) else None


def read_identity(folder: Path) -> Registration:
    """Return who the process was. Raises SpoolError when that cannot be told, or was told in a later format."""
    path = folder / IDENTITY_NAME
    try:
        document = json.loads(path.read_bytes())
        facts = document["registration"]
        spoken = document["format"], facts["schema_version"]
        registration = Registration.from_json(json.dumps(facts)) if spoken == _SPOKEN else None
    except OSError as error:
        raise SpoolError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpoolError(f"{path} is torn or foreign ({error!r}): whose records these are cannot be told") from error
    if registration is None:
        raise SpoolError(
            f"{folder} has format {spoken[0]} and schema version {spoken[1]}, this release reads {FORMAT} and "
            f"{SCHEMA_VERSION}: drain it with the release that wrote it"
        )
    for name, kind in _NEEDED.items():
        if not isinstance(getattr(registration, name), kind):
            raise SpoolError(f"{path} is torn or foreign: {name} is {getattr(registration, name)!r}")
    if registration.incarnation != folder.name:
        raise SpoolError(f"{folder} says that it belongs to {registration.incarnation!r}: it was renamed or copied")
    return registration
