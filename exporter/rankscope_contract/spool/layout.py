"""File names and JSON documents of a spool folder.

This module neither reads records nor locks folders.
"""

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

DEFAULT_SPOOL_DIR: Final = "rankscope-records"
"""Folder in the working directory of a training where each rank writes its records until a store has committed them."""

FORMAT: Final = 1
IDENTITY_NAME: Final = "identity.json"
LOCK_NAME: Final = "lock"
UNFINISHED_PREFIX: Final = "."
"""Prefix of the name of a new spool folder.

When the folder is complete and locked, it is renamed to a name without the prefix.
"""

_SEGMENT: Final = re.compile(r"(\d{12,18})\.arrows")
_PLAN: Final = re.compile(r"plan-[0-9a-f]{8,64}\.json")


_READABLE: Final = (FORMAT, SCHEMA_VERSION)
_REQUIRED: Final = {"run": str, "launch_id": str, "host": str, "rank": int, "world_size": int, "started_at": int}


class SpoolError(Exception):
    """Error: a folder is not a readable spool. The text names the folder and the reason."""


def segment_name(first: int) -> str:
    """Return the name of the record file in which the first record has sequence number `first`.

    The names sort in the order of the sequence numbers.
    """
    return f"{first:012d}.arrows"


def plan_name(plan_hash: str) -> str:
    """Return the name of the spool file that contains the plan with the hash `plan_hash`."""
    return f"plan-{plan_hash}.json"


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Return (first sequence number, path) of each record file in `folder`, in ascending order.

    Other files are ignored.
    """
    named = ((_SEGMENT.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match is not None)


def is_ours(name: str) -> bool:
    """Return whether a file with this name belongs to a spool and is therefore deleted together with the spool."""
    known = name in (IDENTITY_NAME, LOCK_NAME) or _SEGMENT.fullmatch(name) or _PLAN.fullmatch(name)
    return bool(known) or name.endswith(".tmp")


def folders(root: Path) -> list[Path]:
    """Return the spool folders below `root`, the oldest first. Raises OSError if `root` cannot be read."""
    return sorted((path for path in root.iterdir() if is_spool(path)), key=lambda path: (_began(path), path))


def _began(folder: Path) -> float:
    """Return the creation time of a spool, by the clock of the file system.

    It is the modification time of the identity file, which is written only once.
    """
    try:
        return (folder / IDENTITY_NAME).stat().st_mtime
    except OSError:
        return 0.0


def is_spool(path: Path) -> bool:
    """Return whether `path` is a spool folder, complete or damaged, or a folder that this user may not read."""
    if path.name.startswith(UNFINISHED_PREFIX):
        return False
    try:
        return (path / LOCK_NAME).is_file()
    except OSError:
        return True  # not readable: the caller that opens the spool reports the error


def spool_folders(path: Path) -> list[Path]:
    """Return the spool folders at `path`, which is a spool folder or contains spool folders; the oldest first.

    The list is empty if `path` is another kind of folder, a file, or missing.
    """
    if not path.is_dir():
        return []
    try:
        found = [path] if is_spool(path) else folders(path)
    except OSError:
        return []
    return [folder for folder in found if _may_have_identity(folder)]


def _may_have_identity(folder: Path) -> bool:
    try:
        return (folder / IDENTITY_NAME).exists()
    except OSError:
        return True  # not readable: the caller that opens the spool reports the error


def write_whole(path: Path, text: str, *, sync: bool = False) -> None:
    """Write `text` to `path` atomically: after a crash, `path` contains the whole text or does not exist.

    Only the owner can read the file. With `sync`, the content survives a power failure, provided that `sync_folder` is
    called afterwards.
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
    """Call fsync on `folder`.

    Without this call, a power failure can remove the names of files whose content is on disk.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def service_name(url: str) -> str:
    """Return the normal form of the service address `url` for spool folders: scheme, host, port and path.

    Credentials are removed. Host names are not resolved: localhost and 127.0.0.1 are considered different services.
    """
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def write_identity(folder: Path, registration: Registration, *, service: str | None = None, sync: bool = False) -> None:
    """Write the identity of the process, and the service that is to receive the records, to the spool folder.

    The service is given in the form that `service_name` returns.
    """
    text = json.dumps({"format": FORMAT, "service": service, "registration": asdict(registration)})
    write_whole(folder / IDENTITY_NAME, text, sync=sync)


def read_service(folder: Path) -> str | None:
    """Return the service that is to receive the records of a spool.

    Return None if the identity file names no service or cannot be read.
    """
    try:
        service = json.loads((folder / IDENTITY_NAME).read_bytes())["service"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return service if isinstance(service, str) else None


def read_identity(folder: Path) -> Registration:
    """Return the identity of the process that wrote a spool.

    Raises SpoolError if the identity cannot be read or has a newer format.
    """
    path = folder / IDENTITY_NAME
    try:
        document = json.loads(path.read_bytes())
        facts = document["registration"]
        found = document["format"], facts["schema_version"]
        registration = Registration.from_json(json.dumps(facts)) if found == _READABLE else None
    except OSError as error:
        raise SpoolError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpoolError(
            f"{path} is incomplete or no spool file ({error!r}): the process that wrote these records is unknown"
        ) from error
    if registration is None:
        raise SpoolError(
            f"{folder} has format {found[0]} and schema version {found[1]}; this release reads {FORMAT} and "
            f"{SCHEMA_VERSION}. Import it with the release that wrote it"
        )
    for name, kind in _REQUIRED.items():
        if not isinstance(getattr(registration, name), kind):
            raise SpoolError(f"{path} is incomplete or no spool file: {name} is {getattr(registration, name)!r}")
    if registration.incarnation != folder.name:
        raise SpoolError(
            f"{folder} contains records of process {registration.incarnation!r}: the folder was renamed or copied"
        )
    return registration
