"""Open the run that a command shows: of a store, of a folder with records of ranks, or of a log of another tool.

A log is imported into a temporary store, so that one command shows it. Its faults are printed on standard error.
Errors of the store and of DuckDB become one-line messages.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from rankscope.access.log_import import SHOWN_FAULTS, TIME_ZONE, Log, import_logs, plan_logs
from rankscope.access.service import service_errors
from rankscope.shell.errors import USAGE, CommandError, suggestion
from rankscope.shell.options import Store
from rankscope.shell.streams import progress_bar
from rankscope_contract.model.redaction import MAX_LABEL, redacted_name

if TYPE_CHECKING:
    from rankscope_ingest.service.main import OfflineSpool
    from rankscope_storage.base.location import Location
    from rankscope_storage.connection import Connection

SHOWN_RUNS: Final = 10

_FULL: Final = (
    "The disk is full: delete files outside of the store, or move the store to a larger disk. Then run the command "
    "again. The removal of a run needs space, too: it deletes the old files two hours later"
)


@contextlib.contextmanager
def open_store(store: Location, *, locked: bool = True) -> Iterator[Connection]:
    """Yield a connection to `store`, which is a store or a folder with spools of ranks.

    See `store_errors` for its errors.
    """
    from rankscope_storage.connection import connect

    with store_errors(), readable_store(store) as folder, connect(folder, locked=locked) as connection:
        yield connection


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise CommandError for each error of a store, with the exit code USAGE if there is no store."""
    import duckdb
    import pyarrow as pa

    from rankscope_storage.base.errors import NotAStoreError, StoreError, damage

    try:
        yield
    except NotAStoreError as error:
        raise CommandError(str(error), code=USAGE) from error
    except (StoreError, duckdb.Error, pa.ArrowInvalid) as error:
        # DuckDB appends a copy of the statement, which has several lines.
        text = damage(error) or " ".join(str(error).partition("\n\nLINE")[0].split())
        raise CommandError(f"{text}. {_FULL}" if re.search("No space left|quota exceeded", text) else text) from error


def resolve_run(connection: Connection, run: str | None) -> str:
    """Return `run` if the store contains it; if `run` is None, return the run that started last.

    Raises CommandError if the store has no such run; the message suggests the run with the most similar name.
    """
    query = "select run from runs order by started_at desc nulls last, ordinal desc"
    rows, damaged = connection.undamaged(lambda: connection.query(query))
    known: list[str] = rows["run"].to_pylist()
    if damaged and run not in known:
        raise CommandError("\nrankscope: ".join(damaged))
    run = run if run is None or run in known else redacted_name(run, MAX_LABEL)
    if run is None:
        if not known:
            raise CommandError(f"{connection.path} contains no run yet")
        return known[0]
    if run not in known:
        more = f", and {len(known) - SHOWN_RUNS:,} more: see rankscope runs" if len(known) > SHOWN_RUNS else ""
        hint = (
            suggestion(run, known)
            or f" Runs in the store: {', '.join(sorted(known)[:SHOWN_RUNS]) or 'none yet'}{more}."
        )
        raise CommandError(f"run {run!r} not found.{hint}", code=USAGE)
    return run


T = TypeVar("T")

OUTPUTS: Final = Path("outputs")
"""Folder in which training scripts of Hugging Face usually keep their checkpoints."""

STATE_FILE: Final = "trainer_state.json"
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")

RunOrPath = Annotated[
    str | None,
    typer.Argument(
        help="Run of the store; or a store, log, checkpoint or folder of records. Default: the latest run.",
        show_default=False,
        metavar="RUN|PATH",
    ),
]
RunOption = Annotated[str | None, typer.Option("--run", help="Run of the store or log at PATH.", show_default=False)]


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run and the connection to its store. Runs of one store have the same connection."""

    connection: Connection
    run: str

    def stored(self, found: T | None) -> T:
        """Return `found`, which was read of the run. Raises CommandError if it is None: the run has no rows."""
        if found is None:
            raise CommandError(f"{self.run} has no rows in the store")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSelection:
    """The run that the options of a command name."""

    source: RunOrPath = None
    store: Store = Path("history")
    run: RunOption = None
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", "-c", help="Checkpoint folder with a trainer_state.json.", show_default=False),
    ] = None
    outputs: Annotated[
        Path | None,
        typer.Option("--outputs", help="Folder with checkpoint-N folders; implies --latest.", show_default="./outputs"),
    ] = None
    latest: Annotated[
        bool, typer.Option("--latest", "-l", help="Show the checkpoint with the largest number in --outputs.")
    ] = False

    def path(self) -> Path | None:
        """Return the path that the options name, or None for a run of the store.

        The name of a run in the store has priority over a file with the same name. Raises CommandError if options
        contradict, or if a checkpoint is missing; the message names the remedy.
        """
        is_latest = self.latest or self.outputs is not None
        if sum((self.source is not None, self.checkpoint is not None, is_latest)) > 1:
            raise CommandError("name one of RUN|PATH, --checkpoint, and --latest with --outputs", code=USAGE)
        if self.checkpoint is not None:
            return _with_state(self.checkpoint)
        if is_latest:
            return latest_checkpoint(self.outputs or OUTPUTS)
        if self.source is None:
            return self._default()
        path = Path(self.source)
        if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises OSError for the long name of a run
            if self.run is not None:
                raise CommandError(f"{path} does not exist: name a store or a log, or only the run", code=USAGE)
            if not _has_store(self.store):
                raise CommandError(
                    f"{self.source} is no file or folder, and {self.store} is not a Rankscope store: name "
                    "a log, or the store of the run with --store",
                    code=USAGE,
                )
            return None
        return None if self.run is None and _is_run(self.source, self.store) else path

    def _default(self) -> Path | None:
        """Return the newest checkpoint of ./outputs if there is no store; otherwise None."""
        if _has_store(self.store) or not _checkpoints(OUTPUTS):
            return None
        found = latest_checkpoint(OUTPUTS)
        print(f"{self.store} is no store: showing {found}", file=sys.stderr)
        return found


def with_selection(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the options of RunSelection in place of its first parameter, a RunSelection."""
    options = inspect.signature(RunSelection, eval_str=True).parameters
    _, *others = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [*options.values(), *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in others)]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        selection = RunSelection(**{name: given.pop(name) for name in options if name in given})
        command(selection, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


@contextlib.contextmanager
def open_run(selection: RunSelection) -> Iterator[OpenRun]:
    """Yield the run that `selection` names, or the latest one. Raises CommandError if there is none."""
    path = selection.path()
    if path is not None and not _has_store(path):
        with _imported([(path, None)]) as connection:
            run = resolve_run(connection, selection.run)
            known: list[str] = connection.query("SELECT run FROM runs ORDER BY run")["run"].to_pylist()
            if selection.run is None and len(known) > 1:
                print(f"{path} contains the runs {', '.join(known)}: showing {run}; --run selects one", file=sys.stderr)
            yield OpenRun(connection, run)
        return
    with open_store(path or selection.store) as connection:
        run = resolve_run(connection, selection.run or (selection.source if path is None else None))
        connection.restrict([run])  # a damaged file of other runs is not read
        yield OpenRun(connection, run)


@contextlib.contextmanager
def open_runs(sources: Sequence[str], store: Location) -> Iterator[list[OpenRun]]:
    """Yield the runs or logs that `sources` name. All logs are imported into one temporary store.

    A log that cannot be read is reported on standard error and left out.
    """
    paths = {source: RunSelection(source=source, store=store).path() for source in sources}
    logs = {source: path for source, path in paths.items() if path is not None and not _has_store(path)}
    with contextlib.ExitStack() as stack:
        found: dict[str, OpenRun] = {}
        if logs:
            labels = _labels(logs)
            connection = stack.enter_context(_imported([(logs[source], labels[source]) for source in logs]))
            rows = "SELECT DISTINCT run FROM scalars UNION SELECT DISTINCT run FROM tensor_stats"
            known = connection.query(rows)["run"].to_pylist()
            found |= {source: OpenRun(connection, label) for source, label in labels.items() if label in known}
        opened: dict[Location, Connection] = {}
        for source, path in paths.items():
            if source in logs:
                continue
            folder = path or store
            if folder not in opened:
                opened[folder] = stack.enter_context(open_store(folder))
            found[source] = OpenRun(opened[folder], resolve_run(opened[folder], source if path is None else None))
        for connection in opened.values():
            connection.restrict([one.run for one in found.values() if one.connection is connection])
        yield [found[source] for source in sources if source in found]


def _labels(logs: Mapping[str, Path]) -> dict[str, str]:
    """Return the run name of each log: that of an import, or of checkpoints of one run the names of their folders."""
    from rankscope_ingest.importers import run_name

    folders = {source: path.parent if path.name == STATE_FILE else path for source, path in logs.items()}
    for labels in (
        {source: run_name(path) for source, path in logs.items()},
        {source: path.name for source, path in folders.items()},
    ):
        if len(set(labels.values())) == len(labels):
            return labels
    return {source: source for source in logs}


def latest_checkpoint(outputs: Path) -> Path:
    """Return the folder `checkpoint-N` in `outputs` with the largest number; other folders are ignored.

    Raises CommandError if there is none.
    """
    found = _checkpoints(outputs)
    if found:
        return _with_state(max(found, key=lambda checkpoint: int(checkpoint.name.rpartition("-")[2])))
    nested = sorted({str(path.parent) for path in outputs.glob("*/checkpoint-*") if _CHECKPOINT.fullmatch(path.name)})
    remedy = f"name one of {', '.join(nested[:5])} with --outputs" if nested else "name another folder with --outputs"
    raise CommandError(f"{outputs} contains no folder checkpoint-N: {remedy}, or a checkpoint with --checkpoint")


def _checkpoints(outputs: Path) -> list[Path]:
    return [path for path in outputs.glob("checkpoint-*") if path.is_dir() and _CHECKPOINT.fullmatch(path.name)]


def _with_state(checkpoint: Path) -> Path:
    if not checkpoint.exists():
        raise CommandError(f"{checkpoint} does not exist: name a checkpoint folder with a {STATE_FILE}")
    if checkpoint.is_dir() and not any(checkpoint.glob(f"**/{STATE_FILE}")):
        raise CommandError(f"{checkpoint} contains no {STATE_FILE}: name a checkpoint folder that the Trainer wrote")
    return checkpoint


def _is_run(name: str, store: Location) -> bool:
    from rankscope_storage.api.store import is_store

    with store_errors():
        is_readable = is_store(store)
    if not is_readable:
        return False
    with open_store(store) as connection:
        return bool(connection.query("SELECT 1 AS found FROM runs WHERE run = $run", {"run": name}).num_rows)


def _has_store(path: Location) -> bool:
    from rankscope_contract.wire.spool import spool_folders
    from rankscope_storage.api.store import is_store

    with store_errors():
        return is_store(path) or (isinstance(path, Path) and bool(spool_folders(path)))


@contextlib.contextmanager
def _imported(logs: Sequence[tuple[Path, str | None]]) -> Iterator[Connection]:
    """Yield a connection to a temporary store with the `logs`, which are paths with the names of their runs."""
    from rankscope_ingest.importers import IMPORT_RULES, Options

    with tempfile.TemporaryDirectory(prefix="rankscope-") as temporary:
        store = Path(temporary) / "store"
        plan: list[Log] = []
        failures: list[str] = []
        for path, run in logs:
            found, failed = plan_logs([path], None, run, TIME_ZONE)
            plan += found
            failures += failed
        if plan:
            with service_errors():
                failures += import_logs(
                    plan, store, "0/1", rules=IMPORT_RULES, shown=SHOWN_FAULTS, options=Options(), out=None
                )
        if len(failures) >= len(plan) and failures:
            raise CommandError("\nrankscope: ".join(failures))
        for failure in failures:
            print(f"not shown: {failure}", file=sys.stderr)
        with open_store(store) as connection:
            yield connection


@contextlib.contextmanager
def readable_store(folder: Location) -> Iterator[Location]:
    """Yield `folder`, or if it contains spools, a temporary store with their records.

    Raises CommandError if the records cannot be read.
    """
    from rankscope_contract.wire.spool import spool_folders

    if not isinstance(folder, Path) or not spool_folders(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rankscope-") as temporary:
        store = Path(temporary) / "store"
        store_spools(folder, store, with_running=True)
        yield store


def processes(count: int) -> str:
    """Return a number of processes as text, such as "1 process" or "2 processes"."""
    return f"{count} process{'' if count == 1 else 'es'}"


def store_spools(
    folder: Path, store: Location, *, shard: str = "0/1", with_running: bool
) -> tuple[tuple[OfflineSpool, ...], int]:
    """Store the records of the spools in `folder`; return the stored spools, and the number of new rows.

    Spools of running processes are left out unless `with_running`. Standard error names the spools that are left out.
    Raises CommandError if the records cannot be read or stored.
    """
    from rankscope_ingest.service.main import import_spools, inspect

    found = inspect(folder)
    chosen = tuple(spool for spool in found.spools if with_running or not spool.is_running)
    for problem in found.unreadable:
        print(f"not read: {problem}", file=sys.stderr)
    if running := sum(spool.is_running for spool in found.spools):
        fate = "read up to now" if with_running else "not imported; import the folder again after they have ended"
        print(f"{folder}: {processes(running)} still running; the records are {fate}", file=sys.stderr)
    with service_errors(), progress_bar("processes", f"reading {folder}") as show:
        rows = import_spools(chosen, store, shard=shard, progress=lambda done: show(done, len(chosen)))
    return chosen, rows
