"""Stores that delta-rs rewrites (OPTIMIZE, Z-ORDER, DELETE, checkpoints): a file gets the columns of all datasets."""

import datetime as dt
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from tests.storage.rows import ask, data_files, entries, table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.datasets import DATASETS
from rankscope_storage.base.errors import ConflictError, StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.connection.pool import DEFINITIONS
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance import compaction
from rankscope_storage.maintenance.check import check
from rankscope_storage.maintenance.compaction import compact
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.runs import edit

START = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
STEPS = 4
LAST_SEQ = len(DATASETS) * STEPS - 1
MACROS = (
    "scalar_curve('r', 'loss')",
    "top_deviations('r')",
    "bucket_deviations('r')",
    "ema(loss_curve, step, loss, 0.5)",
    "moving_average(loss_curve, step, loss, 3)",
    "p10(loss_curve, loss)",
    "downsample(loss_curve, step, step, 5)",
)
VIEWS = tuple(name for name, one in DEFINITIONS.items() if "MACRO" not in one.statement[:30])
EMPTY = {"clock_jumps", "desync", "first_causes", "step_phases", "collective_calls", *MACROS[1:3]}
"""Views and macros that are empty for the rows of these tests."""
OPERATIONS: dict[str, Callable[[DeltaTable], Any]] = {
    "optimize": lambda table: table.optimize.compact(),
    "z-order": lambda table: table.optimize.z_order(["rank", "ts"]),
    "delete": lambda table: table.delete("step = 1"),
    "checkpoint": lambda table: table.create_checkpoint(),
}
REWRITES = ("optimize", "z-order")


def other_tool(root: Path, *operations: str) -> None:
    for operation in operations:
        OPERATIONS[operation](DeltaTable(str(root)))


def value_of(field: pa.Field, number: int) -> Any:
    if pa.types.is_list(field.type):
        return ["a"] if field.type.value_type == pa.string() else [number, number + 1]
    if pa.types.is_timestamp(field.type):
        return START + dt.timedelta(seconds=number)
    if pa.types.is_boolean(field.type):
        return number % 2 == 0
    if field.name.endswith(("_count", "_nans", "_infs")):  # of rollups
        return int(field.name.endswith("_count"))
    return f"{field.name} {number % 2}" if field.type == pa.string() else number % 7


TEXTS = {"tags": '{"team":"ours"}', "config": "{}", "details": "{}", "labels": None, "ts_origin": "rank"}


def row_of(dataset: str, number: int, seq: int) -> dict[str, Any]:
    """Return a row of `dataset` with a value in every column but the labels; two runs, ranks and attempts."""
    step = number % STEPS
    row = {field.name: value_of(field, number) for field in dataset_schema(dataset)} | TEXTS
    row |= {"run": "r" if step % 2 else "s", "rank": step // 2, "attempt": int(step > 2), "incarnation": "i"}
    row |= {"seq": seq, "ordinal": seq, "step": step, "name": "loss" if step else "step_seconds"}
    row |= {"ts": START + dt.timedelta(seconds=step), "micro_step": 0, "vpp_stage": 0, "index": 0, "call_seq": 0}
    row |= {"first_step": step, "last_step": step, "first_ts": row["ts"], "rows": 1}
    return {name: row[name] for name in dataset_schema(dataset).names}


def fill(writer, steps: range) -> None:
    """Append a commit per step, with a row of every dataset."""
    for step in steps:
        seqs = {dataset: step * len(DATASETS) + place for place, dataset in enumerate(DATASETS)}
        tables = {name: table(name, [row_of(name, step, seq)]) for name, seq in seqs.items()}
        writer.append(Batch(tables=tables, watermarks={"i": max(seqs.values())}))


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    """Return stores with the same rows: `own` by Rankscope alone, the others with files that delta-rs rewrote."""
    folder = tmp_path_factory.mktemp("stores")
    with Store.open(folder / "half", create=True).claim(owner="test") as writer:
        fill(writer, range(STEPS // 2))
    shutil.copytree(folder / "half", folder / "mixed")
    other_tool(folder / "mixed", "optimize")
    for name in ("half", "mixed"):
        with Store.open(folder / name).claim(owner="test") as writer:
            fill(writer, range(STEPS // 2, STEPS))
    stores = {"own": folder / "half", "mixed": folder / "mixed"}
    for name in REWRITES:
        stores[name] = Path(shutil.copytree(folder / "half", folder / name))
        other_tool(stores[name], name, "checkpoint")
    return stores


def copy(root: Path, target: Path) -> Path:
    return Path(shutil.copytree(root, target))


@pytest.fixture(params=["mixed", "z-order"])
def rewritten(request, stores, tmp_path) -> Path:
    return copy(stores[request.param], tmp_path / "history")


@pytest.fixture
def own(stores, tmp_path) -> Path:
    return copy(stores["own"], tmp_path / "own")


def answers(source: Any) -> Iterator[tuple[str, list[str], list[str], list[Any]]]:
    for name in (*VIEWS, *MACROS):
        found = source.sql(f"FROM {name} ORDER BY ALL")
        yield name, found.columns, list(map(str, found.types)), found.fetchall()


@pytest.mark.usual(1)
def test_every_view_has_the_same_rows_and_types_after_a_rewrite(stores, rewritten):
    with connect(stores["own"]) as own, connect(rewritten) as other:
        for one, another in zip(answers(own), answers(other), strict=True):
            assert one == another
            assert one[3] or one[0] in EMPTY, one[0]


def test_rewritten_store_is_intact(rewritten):
    report = check(rewritten, deep=True)

    assert report.is_intact, report.findings
    assert LAST_SEQ + 1 == report.rows


def test_file_without_required_columns_is_damage(stores, tmp_path):
    root = copy(stores["optimize"], tmp_path / "history")
    with connect(root) as connection:
        path = Path(connection.files("tensor_stats")[0])
    size = path.stat().st_size
    pq.write_table(pq.read_table(path, partitioning=None).drop_columns(["tensor"]), path)
    entry = entries(root)[-1]
    entry.write_text(entry.read_text().replace(f'"size":{size}', f'"size":{path.stat().st_size}'))
    for checkpoint in (root / "_delta_log").glob("*checkpoint*"):
        checkpoint.unlink()
    (finding,) = (one for one in check(root).findings if one.kind.is_damage)

    assert finding.text.startswith("lacks the columns tensor of the dataset tensor_stats")


@pytest.mark.usual(1)
def test_compaction_restores_files_with_own_columns(stores, rewritten, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 0)
    monkeypatch.setattr(compaction, "PAST_FILES", 0)
    more = [row_of("features", 0, 0) | {"incarnation": "j", "attempt": attempt} for attempt in (0, 1)]
    with Store.open(rewritten).claim(owner="test") as writer:  # a merge needs two files with the same attempts
        writer.append(Batch(tables={"features": table("features", more)}, watermarks={"j": 0}))
        writer.compact()
    schema = pa.schema([pa.field(field.name, field.type) for field in dataset_schema("features")])
    asked = "SELECT * FROM features WHERE incarnation = 'i' ORDER BY ALL"
    with connect(rewritten) as connection, connect(stores["own"]) as own:
        assert own.query(asked) == connection.query(asked)
        shapes = [pq.read_schema(path) for path in connection.files("features")]

    assert all(schema.equals(pa.schema(zip(one.names, one.types, strict=True))) for one in shapes)
    assert check(rewritten, deep=True).is_intact


@pytest.mark.usual(1)
@pytest.mark.parametrize(("change", "names"), [("rename", ("r", "new")), ("merge", ("s", "r")), ("remove", ("s",))])
def test_run_in_rewritten_files_can_be_edited(own, rewritten, change, names):
    for root in (own, rewritten):
        getattr(edit, change)(root, *names, sync_to_disk)
    count = "SELECT run, attempt, count(*) FROM {} GROUP BY ALL ORDER BY ALL"
    with connect(own) as one, connect(rewritten) as other:
        for dataset in DATASETS:
            assert ask(one, count.format(dataset)) == ask(other, count.format(dataset)), dataset
    assert check(rewritten, deep=True).is_intact


@pytest.mark.usual(1)
@pytest.mark.parametrize("days", [0, 1], ids=["all", "a part"])
def test_retention_rolls_up_rewritten_files(own, rewritten, days):
    now = START + dt.timedelta(days=2) if not days else START + dt.timedelta(days=1, seconds=4)
    retention = Retention(raw_days=1, scalars_days=1, samples_days=1, rollup_days=400)
    reports = [retain(root, retention, sync_to_disk, now=now) for root in (own, rewritten)]
    asked = 'SELECT run, name, sum("rows")::BIGINT FROM scalar_timeline GROUP BY ALL ORDER BY ALL'

    assert [()] * 2 == [report.failed for report in reports]
    assert ask(own, asked) == ask(rewritten, asked)
    assert check(rewritten).is_intact


def enable(root: Path, feature: str) -> None:
    """Enable a table feature of Delta that readers must know, as another tool does."""
    entry = entries(root)[-1]
    features = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [feature], "writerFeatures": [feature]}
    (entry.parent / f"{int(entry.stem) + 1:020d}.json").write_text(json.dumps({"protocol": features}))


def test_table_with_deletion_vectors_is_refused_with_the_remedy(root, writer, batch):
    """DuckDB would read the deleted rows. Open handles refuse the table, too."""
    log = Log.open(root, sync_to_disk)
    with connect(root) as connection:
        enable(root, "timestampNtz")
        writer.append(batch([4]))
        rows = len(ask(connection, "FROM scalars"))
        enable(root, "deletionVectors")
        before = data_files(root)
        uses = (log.refresh, lambda: connection.sql("FROM scalars"), lambda: writer.append(batch([5])))
        for use in (*uses, *uses, lambda: connect(root), lambda: Log.open(root, sync_to_disk)):
            with pytest.raises(StoreError, match=r"has enabled deletionVectors .* drop this table feature"):
                use()

    assert (5, before) == (rows, data_files(root))


# --- while another tool writes


class Interrupted:
    """A sync function that calls `action` once, at its first call. It acts as another process between two steps."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self, path: Path) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()
        sync_to_disk(path)


def stored(root: Path) -> list[tuple[int, int]]:
    """Return seq and number of copies of each scalar in the store."""
    return ask(root, "SELECT seq, count(*) FROM scalars GROUP BY seq ORDER BY seq")


def once(count: int, *missing: int) -> list[tuple[int, int]]:
    return [(seq, 1) for seq in range(count) if seq not in missing]


@pytest.fixture
def root(writer, batch) -> Path:
    """Return a store with four commits of one scalar each."""
    for seq in range(4):
        writer.append(batch([seq]))
    return writer._log.root


@pytest.mark.usual(2)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_append_during_an_operation_of_another_tool_is_stored_once(root, writer, batch, operation):
    writer._sync = Interrupted(lambda: other_tool(root, operation))
    writer.append(batch([4]))
    missing = [1] if operation == "delete" else []

    assert once(5, *missing) == stored(root)
    assert 4 == writer.watermark("i0")
    assert check(root, deep=True).is_intact


def test_batch_after_a_checkpoint_and_clean_up_is_stored_once(root, writer, batch):
    other_tool(root, "optimize", "checkpoint")
    DeltaTable(str(root)).cleanup_metadata()
    writer.append(batch([4]))
    writer.close()
    with Store.open(root).claim(owner="another") as successor:
        successor.append(batch(range(6)))

        assert 5 == successor.watermark("i0")
    assert once(6) == stored(root)


@pytest.mark.parametrize("operation", [*REWRITES, "delete"])
def test_compaction_yields_to_a_rewrite_by_another_tool(root, monkeypatch, operation):
    """delta-rs itself would accept both commits, and each row would be stored twice."""
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    report = compact(root, Interrupted(lambda: other_tool(root, operation)))
    missing = [1] if operation == "delete" else []

    assert (0, 1) == (report.files_removed, report.refused)
    assert once(4, *missing) == stored(root)
    assert check(root).is_intact


CHANGES: dict[str, Callable[[Path], Any]] = {
    "compaction": lambda root: compact(root, sync_to_disk).files_removed,
    "retention": lambda root: retain(root, Retention(scalars_days=1), sync_to_disk, now=dt.datetime.now(dt.UTC)).files,
    "rename": lambda root: edit.rename(root, "r", "new", sync_to_disk).rows,
}


@pytest.mark.usual(3)
@pytest.mark.parametrize("operation", [*REWRITES, "delete"])
@pytest.mark.parametrize("change", CHANGES)
def test_other_tool_cannot_add_rows_again_that_a_rewrite_moved(root, writer, monkeypatch, change, operation):
    """The other tool read the table before our commit and commits after it."""
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    writer.close()
    stale = DeltaTable(str(root))
    assert 4 == CHANGES[change](root)
    with pytest.raises(CommitFailedError):
        OPERATIONS[operation](stale)

    assert [(4,)] == ask(root, 'SELECT sum("rows")::BIGINT FROM scalar_timeline')


def test_rename_is_tried_again_after_a_rewrite_by_another_tool(root, writer):
    writer.close()
    edit.rename(root, "r", "new", Interrupted(lambda: other_tool(root, "optimize")))

    assert [("new", 4)] == ask(root, "SELECT run, count(*) FROM scalars GROUP BY run")


def test_append_does_not_prevent_a_rewrite(root, writer, batch, monkeypatch):
    monkeypatch.setattr(compaction, "SMALL_FILES", 1)
    report = compact(root, Interrupted(lambda: writer.append(batch([4]))))

    assert (4, 0) == (report.files_removed, report.refused)
    assert once(5) == stored(root)


def test_files_of_a_commit_that_is_reported_as_refused_are_kept(root, writer, batch, monkeypatch):
    """A network file system may report that an entry exists, because it repeated the request that wrote the entry."""
    genuine = Log._try_commit

    def commit_and_fail(log, change):
        genuine(log, change)
        raise ConflictError("the entry exists already")

    monkeypatch.setattr(Log, "_try_commit", commit_and_fail)
    writer.append(batch([4]))

    assert once(5) == stored(root)
    assert check(root, deep=True).is_intact
