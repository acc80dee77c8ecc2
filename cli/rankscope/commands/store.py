"""`rankscope store`: check, measure, compact, repair and upgrade a store, and apply retention."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from rankscope.access.stores import store_errors
from rankscope.output.rows import Format, Output, OutputFormat, write_rows
from rankscope.shell.errors import USAGE, CommandError, command_errors
from rankscope.shell.options import STANDARD_OUTPUT, store_folder
from rankscope.shell.options import WrittenStore as Folder
from rankscope.shell.streams import progress_bar
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.location import Location, located
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import CompactionReport, compact
from rankscope_storage.maintenance.copying import copy_store
from rankscope_storage.maintenance.repair import repair
from rankscope_storage.maintenance.retention import retain
from rankscope_storage.maintenance.retention_policy import Retention
from rankscope_storage.maintenance.stats import store_stats
from rankscope_storage.maintenance.upgrade import upgrade

_SHOWN_ERRORS: Final = 3
"""Largest number of errors of merges in one message. On a full disk, all merges fail."""


Action = Literal["check", "stats", "compact", "retain", "repair", "upgrade", "copy"]
By = Literal["dataset", "part", "run", "tier"]
Places = Annotated[
    list[str] | None,
    typer.Argument(help="copy: the store to copy, and the place of the copy.", metavar="[FROM TO]", show_default=False),
]
Deep = Annotated[
    bool, typer.Option("--deep", help="check, repair: decode every value; check: search for duplicate rows.")
]
Force = Annotated[
    bool, typer.Option("--force", help="repair: also drop missing files from the log even if a disk may be offline.")
]
Rewrite = Annotated[
    bool, typer.Option("--rewrite", help="compact: also rewrite all files with an older encoding of integers.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="retain, repair: only print the actions.")]
Days = Annotated[
    float | None, typer.Option(min=0, help="retain: days to keep raw tensor statistics.", show_default=False)
]
ScalarsDays = Annotated[float | None, typer.Option(min=0, help="retain: days to keep raw scalars.", show_default=False)]
SamplesDays = Annotated[float | None, typer.Option(min=0, help="retain: days to keep samples.", show_default=False)]
RollupDays = Annotated[float | None, typer.Option(min=0, help="retain: days to keep rollups.", show_default=False)]


def store(
    action: Annotated[Action, typer.Argument(help="check, stats, compact, retain, repair, upgrade or copy.")],
    places: Places = None,
    store: Folder = Path("history"),
    deep: Deep = False,
    force: Force = False,
    rewrite: Rewrite = False,
    dry_run: DryRun = False,
    days: Days = None,
    scalars_days: ScalarsDays = None,
    samples_days: SamplesDays = None,
    rollup_days: RollupDays = None,
    by: Annotated[By, typer.Option(help="stats: column by which the rows are grouped.")] = "dataset",
    form: OutputFormat = "table",
    output: Output = STANDARD_OUTPUT,
) -> None:
    """Check, measure, compact, repair, copy or convert a store, or delete its old rows.

    check compares the log of the store with every file; exit code 1 means lost, duplicate or missing data. check and
    stats only read. compact merges small files, also while a service writes. With --rewrite, it also rewrites the files
    that check counts as older encoding. retain replaces tensor statistics older
    than --days, and scalars older than --scalars-days, by one row per 100 steps. It deletes features, histograms,
    hashes and collectives older than --days, samples older than --samples-days and rollups older than --rollup-days. If
    one of these options is missing, the rows that it limits are kept; events and runs are always kept. repair moves a
    torn log entry and unreadable files to _damaged/, reports lost rows, and deletes files that killed processes left.
    repair fails while a service writes. Without --force it also fails if a disk or mount may be offline. upgrade
    converts a store of an earlier release, once; a service and an import do so too. It fails while a service writes.
    copy copies the newest version to a place without a store, also from or to s3://bucket/prefix, and checks each file.
    The same command continues an interrupted copy. Services continue from the watermarks of the copy.

    [bold]Examples[/bold]

    rankscope store check --store history --deep

    rankscope store stats --by run --format csv

    rankscope store retain --days 30 --rollup-days 730 --dry-run

    rankscope store repair --dry-run

    rankscope store copy history s3://bucket/history
    """
    root = store.absolute()
    if (action == "copy") != (len(places or ()) == 2):
        raise CommandError("only copy has places, FROM and TO: rankscope store copy history s3://bucket/x", code=USAGE)
    with store_errors():
        if action == "check":
            _check(root, deep=deep)
        elif action == "stats":
            _stats(root, by, form, output)
        elif action == "compact":
            _compact(root, rewrite=rewrite)
        elif action == "retain":
            _retain(root, _policy(days, scalars_days, samples_days, rollup_days), form, output, dry_run=dry_run)
        elif action == "upgrade":
            _upgrade(root)
        elif action == "copy":
            _copy(*map(store_folder, places or ()))
        else:
            _repair(root, deep=deep, dry_run=dry_run, force=force)


def _check(root: Location, *, deep: bool) -> None:
    with progress_bar("files") as progress:
        report = check(root, deep=deep, progress=progress)
    for finding in report.findings:
        print(f"{'damage' if finding.kind.is_damage else 'note'}: {finding.kind}: {finding.path}: {finding.text}")
    if report.version is None:
        print("the log cannot be read: the data files were not checked")
        raise typer.Exit(1)
    damage = sum(finding.kind.is_damage for finding in report.findings)
    verdict = "no damage" if report.is_intact else f"damaged in {damage} place{'' if damage == 1 else 's'}"
    print(
        f"store version {report.version}: {report.files} files, {report.rows:,} rows, {report.size_bytes:,} bytes; "
        f"{verdict}"
    )
    if not report.is_intact:
        raise typer.Exit(1)


def _stats(root: Location, by: By, form: Format, output: Path) -> None:
    found = store_stats(Log.open(root, sync_to_disk), by=by)
    if form == "table" and output == STANDARD_OUTPUT:
        span = f", {found.oldest:%Y-%m-%d %H:%M} to {found.newest:%Y-%m-%d %H:%M} UTC" if found.oldest else ""
        print(
            f"store version {found.version}: {found.files} files, {found.rows:,} rows, {found.size_bytes:,} bytes{span}"
        )
        unused = f"unreferenced files: {found.unused_bytes:,} bytes"
        print(f"log: {found.log_entries} entries, {found.log_bytes:,} bytes; {unused}")
    write_rows(found.groups, form, output)


def _compact(root: Location, *, rewrite: bool) -> None:
    with progress_bar("compactions") as progress:
        report = compact(root, sync_to_disk, progress, rewrite=rewrite)
    print(
        f"{report.files_removed} files were merged into {report.files_added}, "
        f"{report.rows:,} rows, {report.seconds:.1f} s"
    )
    if rewrite:
        print(f"{report.rewritten} other files were rewritten with the current encoding")
        _require_rewritten(report)
    elif report.refused:
        raise CommandError("another compaction of this store is running: it will compact the remaining files")


def _require_rewritten(report: CompactionReport) -> None:
    """Raise CommandError, with the number of files and the reasons, if files with an older encoding are left."""
    reasons = list(report.failed[:_SHOWN_ERRORS])
    if len(report.failed) > _SHOWN_ERRORS:
        reasons.append(f"{len(report.failed) - _SHOWN_ERRORS} other merges failed")
    if report.refused and report.left:
        reasons.append(f"other processes changed the files of {report.refused} merges: run the command again")
    if report.left and not reasons:
        reasons.append("another process added them, possibly a service of an earlier release")
    if reasons:
        left = f"{report.left} files still have the older encoding: " if report.left else ""
        raise CommandError(left + "; ".join(reasons))


def _policy(days: float | None, scalars: float | None, samples: float | None, rollups: float | None) -> Retention:
    if {days, scalars, samples, rollups} == {None}:
        raise CommandError(
            "no retention time: give --days, --scalars-days, --samples-days or --rollup-days", code=USAGE
        )
    with command_errors(usage=(ValueError,)):
        return Retention(raw_days=days, scalars_days=scalars, samples_days=samples, rollup_days=rollups)


def _retain(root: Location, policy: Retention, form: Format, output: Path, *, dry_run: bool) -> None:
    now = dt.datetime.now(dt.UTC)
    try:
        policy.limits(now)
    except OverflowError as error:
        raise CommandError("a number of days is too large: the resulting date is out of range", code=USAGE) from error
    with progress_bar("commits") as progress:
        report = retain(root, policy, sync_to_disk, now=now, dry_run=dry_run, progress=progress)
    write_rows(report.groups, form, output)
    if form == "table" and output == STANDARD_OUTPUT:
        old = f"{report.files} files, {report.rows:,} rows, {report.size_bytes:,} bytes"
        kept = "maintenance of the store deletes the old files from disk after two hours"
        print(f"would delete: {old}" if dry_run else f"deleted: {old}; {kept}")
        if report.added_rows and not dry_run:
            print(f"added rollups: {report.added_rows:,} rows, {report.added_bytes:,} bytes")
    if report.failed:
        raise CommandError("; ".join(report.failed))
    if report.refused:
        raise CommandError("another process replaced some of the files: run the command again")


def _copy(source: Location, target: Location) -> None:
    with progress_bar("files") as progress:
        report = copy_store(located(source), located(target), sync_to_disk, progress)
    already = f", {report.resumed} of them before" if report.resumed else ""
    print(f"copied version {report.version}: {report.files} files{already}, {report.size_bytes:,} bytes; all intact")


def _upgrade(root: Location) -> None:
    report = upgrade(root, sync_to_disk)
    done = f"{report.files} files with {report.rows:,} rows were converted"
    print(done if report.is_converted else "the store has the current schema version")


def _repair(root: Location, *, deep: bool, dry_run: bool, force: bool) -> None:
    report = repair(root, sync_to_disk, deep=deep, dry_run=dry_run, force=force)
    would = "would be " if dry_run else ""
    if report.torn_entry:
        print(f"{would}moved to _damaged/: log entry {report.torn_entry} (torn; none of its rows were acknowledged)")
    if report.torn_checkpoint:
        print(f"{would}moved to _damaged/: {report.torn_checkpoint} (torn checkpoint; its log entries still exist)")
    for lost in report.lost:
        print(f"{would}removed from the log, data lost: {lost}")
    if (report.torn_entry or report.torn_checkpoint) and dry_run:
        print("data files can be checked only after the log is repaired: run the command without --dry-run")
    elif report.swept:
        print(f"{would}removed: {report.swept} files left by killed processes, {report.swept_bytes:,} bytes")
    elif not report.changed:
        print("nothing to repair")
