"""Records on disk that outlive their process.

A rank writes them. The service, or a process of a rank that starts later on the same host, reads them.

    <folder>/<incarnation>/lock                  locked with flock while the process is alive
                           identity.json         identity of the process: its registration
                           plan-<hash>.json      a plan of the records
                           <first seq>.arrows    an Arrow IPC stream, one record per message, without gaps in seq

A file is readable up to its last complete message, whenever its writer was killed. Record i of a file has sequence
number `first + i`, because the writer starts a new file wherever a record is missing. The reader therefore finds a
record without decompression. The module does not import Arrow: the caller of a reader passes the module `pyarrow`, and
the function `needed_plans`, which checks the content: it returns the hashes of the plans that a stream uses, or None if
the stream cannot be read.

A held lock shows that the process is alive; the system releases it when the process ends. The process that then holds
the lock of the spool reads all records and then removes the spool.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, Self
from urllib.parse import urlsplit

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.schema import plan_hash
from rankscope_contract.wire.channel import NOTHING, Registration

log = logging.getLogger(__name__)

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
    """Return the name of the record file that begins with sequence number `first`; names sort as the numbers do."""
    return f"{first:012d}.arrows"


def plan_name(plan_hash: str) -> str:
    """Return the name of the spool file that contains the plan with the hash `plan_hash`."""
    return f"plan-{plan_hash}.json"


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Return (first sequence number, path) of each record file in `folder`, in ascending order; ignore other files."""
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
    """Return the creation time by the file system's clock: the identity file is written only once."""
    try:
        return (folder / IDENTITY_NAME).stat().st_mtime
    except OSError:
        return 0.0


def is_spool(path: Path) -> bool:
    """Return whether `path` is a spool folder, complete or damaged, or a folder that this user may not read."""
    return not path.name.startswith(UNFINISHED_PREFIX) and _may_exist(path / LOCK_NAME)


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
    return [folder for folder in found if _may_exist(folder / IDENTITY_NAME)]


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
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
    """Return the address `url` without credentials and with its port. Host names are not resolved."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def write_identity(folder: Path, registration: Registration, *, service: str | None = None, sync: bool = False) -> None:
    """Write the identity of the process and the service (from `service_name`) that is to receive the records."""
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
        if found != _READABLE:
            raise SpoolError(
                f"{folder} has format {found[0]} and schema version {found[1]}; this release reads {FORMAT} and "
                f"{SCHEMA_VERSION}. Import it with the release that wrote it"
            )
        registration = Registration.from_json(json.dumps(facts))
    except OSError as error:
        raise SpoolError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpoolError(
            f"{path} is incomplete or no spool file ({error!r}): the process that wrote these records is unknown"
        ) from error
    for name, kind in _REQUIRED.items():
        if not isinstance(getattr(registration, name), kind):
            raise SpoolError(f"{path} is incomplete or no spool file: {name} is {getattr(registration, name)!r}")
    if registration.incarnation != folder.name:
        raise SpoolError(
            f"{folder} contains records of process {registration.incarnation!r}: the folder was renamed or copied"
        )
    return registration


END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MAX_FILE_BYTES: Final = 1 << 29
"""Maximum size in bytes of a file that is read.

No rank writes larger files, and reading one could exhaust the memory of the rank or service.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolRecords:
    """Consecutive records of a spool as a complete Arrow IPC stream."""

    data: bytes
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first + 1


_CONTINUES: Final = 0xFFFFFFFF
_BODY_LENGTH_SLOT: Final = 4 + 2 * 3  # bodyLength is the fourth field of Message (Arrow format, Message.fbs)


def message_ends(data: bytes) -> list[int]:
    """Return the end offset in bytes of each complete message in `data`. The first message is the schema."""
    ends: list[int] = []
    position = 0
    while position + 8 <= len(data):
        mark, length = struct.unpack_from("<Ii", data, position)
        if mark != _CONTINUES or length <= 0 or position + 8 + length > len(data):
            break
        position += 8 + length + _body_length(data, position + 8, length)
        if position > len(data):
            break
        ends.append(position)
    return ends


def _body_length(data: bytes, start: int, length: int) -> int:
    """Return the `bodyLength` in bytes of the message whose metadata starts at `start`.

    For invalid metadata, return len(data).
    """
    try:
        table = start + int(struct.unpack_from("<I", data, start)[0])
        vtable = table - int(struct.unpack_from("<i", data, table)[0])
        if not start <= vtable < start + length:
            return len(data)
        size = int(struct.unpack_from("<H", data, vtable)[0])
        slot = int(struct.unpack_from("<H", data, vtable + _BODY_LENGTH_SLOT)[0]) if size > _BODY_LENGTH_SLOT else 0
        body = int(struct.unpack_from("<q", data, table + slot)[0]) if slot else 0
    except struct.error:
        return len(data)
    return body if body >= 0 else len(data)


NeededPlans = Callable[[bytes], Iterable[str] | None]


class SpoolReader:
    """Reads the files of one spool folder.

    Each call reads the files again, because their writer may still be active.
    """

    def __init__(self, folder: Path, pa: Any, needed_plans: NeededPlans) -> None:
        self.folder = folder
        self._pa = pa
        self._needed_plans = needed_plans
        self._good_plans: set[str] = set()
        self._reported: set[tuple[str, int]] = set()

    def head(self) -> int:
        """Return the highest sequence number of a complete record, or -1 without records.

        Raises OSError if a file cannot be read.
        """
        for first, path in reversed(segments(self.folder)):
            records = len(message_ends(self._bytes(path))) - 1
            if records > 0:
                return first + records - 1
        return NOTHING

    def after(self, cursor: int, max_bytes: int) -> SpoolRecords | None:
        """Return the next records after sequence number `cursor` from one file, or None if there are no more.

        Together, the records have at most `max_bytes` bytes, unless the first record alone is larger.
        """
        files = segments(self.folder)
        for place, (first, path) in enumerate(files):
            if place + 1 < len(files) and files[place + 1][0] <= cursor + 1:
                continue
            try:
                data = self._bytes(path)
            except FileNotFoundError:  # its records were committed in the meantime
                continue
            records = self._records_from(path, data, first, max(cursor + 1, first), max_bytes)
            if records is not None:
                return records
        return None

    def plan(self, plan_id: str) -> str | None:
        """Return the JSON text of the plan with this hash, or None if the spool does not contain the plan."""
        if not plan_id.isalnum():
            return None
        try:
            text = (self.folder / plan_name(plan_id)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        return text if plan_hash(text) == plan_id else None

    def _bytes(self, path: Path) -> bytes:
        size = path.stat().st_size
        if size <= MAX_FILE_BYTES:
            return path.read_bytes()
        self._report(path, 0, size, f"has {size} bytes, more than a rank writes: the file is skipped")
        return b""

    def _is_sound(self, stream: bytes) -> bool:
        needed = self._needed_plans(stream)
        if needed is None:
            return False
        for plan_id in set(needed) - self._good_plans:
            if self.plan(plan_id) is None:
                return False
            self._good_plans.add(plan_id)
        return True

    def _records_from(self, path: Path, data: bytes, first: int, start: int, max_bytes: int) -> SpoolRecords | None:
        ends = message_ends(data)
        self._report(path, ends[-1] if ends else 0, len(data), "ends within a record: the records before it are read")
        index = start - first  # the message of `start` begins at ends[index]
        records = len(ends) - 1 - index
        if not ends or records <= 0:
            return None
        fitting = sum(end - ends[index] <= max_bytes for end in ends[index + 1 :])
        count = max(1, min(fitting, records))
        while count:
            stream = data[: ends[0]] + data[ends[index] : ends[index + count]] + END_OF_STREAM
            if self._is_sound(stream):
                return SpoolRecords(data=stream, first=start, last=start + count - 1)
            count //= 2
        self._report(path, start, -1, f"is damaged from seq {start} on: the rest of this file is skipped")
        return None

    def _report(self, path: Path, at: int, size: int, problem: str) -> None:
        """Log `problem` once for each file and position, but not at the file's end: the writer may still append."""
        if at != size and (path.name, at) not in self._reported:
            self._reported.add((path.name, at))
            log.warning("%s %s", path, problem)


def take_lock(folder: Path) -> BinaryIO | None:
    """Acquire the lock of a spool folder, and return its open file. Closing the file releases the lock.

    Return None if another process holds the lock or removed the folder. Raises OSError or SpoolError if the lock file
    cannot be opened or locked. A forked child must close its copy of the file; otherwise the lock would remain held
    after the parent has ended.
    """
    path = folder / LOCK_NAME
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
        file = undo.enter_context(path.open("r+b", buffering=0))
        # Another process may have removed the folder between the open and the lock.
        if _lock(file, folder) and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            undo.pop_all()
            return file
    return None


def _lock(file: BinaryIO, folder: Path) -> bool:
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows, where all except the spool works
    except ImportError as error:
        remedy = "remove spool_dir from the configuration"
        raise SpoolError(f"a spool needs flock, which this system does not have: {remedy}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # another process holds it
        return False
    except OSError as error:
        remedy = "choose a folder on a local disk, or mount with locks (for Lustre: -o flock)"
        raise SpoolError(f"{folder}: the file system does not support flock ({error.strerror}): {remedy}") from error
    return True


class Orphan:
    """The spool of a dead process, locked by this process.

    A file is deleted when all its records are committed.
    """

    def __init__(self, reader: SpoolReader, lock: BinaryIO) -> None:
        self.reader = reader
        self.folder = reader.folder
        self.registration = read_identity(reader.folder)
        self.incarnation = self.registration.incarnation
        self.head = self.reader.head()
        self.committed = NOTHING
        self.lease: str | None = None
        self._lock = lock

    @classmethod
    def take(cls, reader: SpoolReader) -> Self | None:
        """Lock and return the spool of `reader`.

        Return None if the process of the spool is alive or another process reads the spool. Raises SpoolError or
        OSError if the spool cannot be read.
        """
        folder = reader.folder
        lock = take_lock(folder)
        if lock is None:
            return None
        with contextlib.ExitStack() as undo:
            undo.enter_context(lock)
            if not (folder / IDENTITY_NAME).exists() and not segments(folder):
                remove_folder(folder)  # its reader was killed while it removed the folder
                return None
            orphan = cls(reader, lock)
            undo.pop_all()
        return orphan

    @property
    def is_done(self) -> bool:
        """Return whether a store has committed all records of the spool."""
        return self.committed >= self.head

    def after(self, cursor: int, max_bytes: int) -> SpoolRecords | None:
        """Return the next records after sequence number `cursor`, or None if there are no more. Raises OSError."""
        records = self.reader.after(cursor, max_bytes)
        if records is None and cursor < self.head:
            self.head = max(cursor, self.committed)  # the remaining records are damaged: no further record will come
        return records

    def commit(self, seq: int) -> None:
        """Record that a store has committed all records up to `seq`, and delete files that contain no later record."""
        if seq <= self.committed:
            return
        self.committed = seq
        for (_, path), (next_first, _) in pairwise(segments(self.folder)):
            if next_first <= seq + 1:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the spool folder and release its lock. Call this after a store has committed all records."""
        try:
            remove_folder(self.folder)
        finally:
            self._lock.close()

    def release(self) -> None:
        """Release the lock of the spool folder and keep its files, so that another process can read them."""
        self._lock.close()


def remove_folder(folder: Path) -> None:
    """Delete the folder of a spool, the files of records first.

    If this process is killed meanwhile, the remaining records are still readable. Raises OSError.
    """
    last = {IDENTITY_NAME: 1, LOCK_NAME: 2}
    ours = [path for path in folder.iterdir() if is_ours(path.name)]
    for path in sorted(ours, key=lambda path: (last.get(path.name, 0), not path.name.endswith(".arrows"), path.name)):
        path.unlink(missing_ok=True)
    if any(folder.iterdir()):
        log.warning("%s contains files that do not belong to a spool; the folder and these files are kept", folder)
        return
    folder.rmdir()
