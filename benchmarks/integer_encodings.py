"""Integers as plain numbers and differences, compared with integers split into bytes: file size, writing and queries.

    python benchmarks/run.py integer_encodings

Several readers cannot decode integers that are split into bytes (docs/readers.md). Earlier releases wrote tensor
statistics that way, and all other integers as differences of any width. Both encodings write equal rows, and their
writers and stores take turns, so that other work on the machine affects both. A ratio is the median of the ratios of
neighboring measurements, with its 95 % bootstrap interval.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import stored_bytes
from _rows import Row, print_rows, ratio_with_interval

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import conform, dataset_schema
from rankscope_storage.connection import connect
from rankscope_storage.connection.connection import Connection
from rankscope_storage.files import encoding
from rankscope_storage.maintenance import compaction

ROUNDS = 41
SPLIT, DIFFERENCES = "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"

QUERIES = {
    "norm of one tensor over all steps": """SELECT step, rank, norm FROM tensor_stats
        WHERE tensor = 'transformer.layers.7.block.3.projection.weight' AND kind = 'param_after' ORDER BY step""",
    "sum of zeros of each tensor": "SELECT kind, tensor, sum(zeros) FROM tensor_stats GROUP BY ALL",
    "rows of one rank at one step": "SELECT * FROM tensor_stats WHERE rank = 3 AND step = 31",
    "`tensor_global`, a tenth of the tensors": "FROM tensor_global WHERE tensor LIKE 'transformer.layers.1%'",
    "`bucket_deviations`": "FROM bucket_deviations('bench')",
    "`tensor_latest`": "FROM tensor_latest",
    "rows of each second": "SELECT date_trunc('second', ts) AS second, count(*) FROM tensor_stats GROUP BY second",
    "curve of one scalar of 8 ranks": """SELECT step, rank, value FROM scalars
        WHERE run = 'bench' AND name = 'n07' ORDER BY step, rank""",
    "`scalar_curve`, 4,000 points": "FROM scalar_curve('bench', 'n07')",
    "sum of one scalar by hour": """SELECT date_trunc('hour', ts) AS hour, sum(value) FROM scalars
        WHERE name = 'n03' GROUP BY hour""",
}


def run() -> list[Row]:
    """Return all rows."""
    folder = Path(tempfile.mkdtemp(prefix="rankscope-integers-"))
    try:
        tables = {"tensor_stats": [_with_irregular_times(table) for table in _tensor_batches()]}
        tables["scalars"] = [scalars(names=20, ranks=8, steps=5_000)]
        stores = {"before": folder / "before", "now": folder / "now"}
        with split_integers():
            _build(stores["before"], tables)
        _build(stores["now"], tables)
        return [*_sizes(), *_asking(stores), *_writing(tables)]
    finally:
        shutil.rmtree(folder)


# Rows.


def _tensor_batches() -> Iterator[pa.Table]:
    with mock.patch.multiple(stored_bytes, FLUSHES=6):
        yield from stored_bytes._batches()  # noqa: SLF001 - equal rows in both benchmarks


def _with_irregular_times(table: pa.Table) -> pa.Table:
    """Return `table` with one time per rank and step, at irregular distances as in a training."""
    step, rank = (table[name].to_numpy() for name in ("step", "rank"))
    noise = np.random.default_rng(5).integers(0, 20_000, (int(step.max()) + 1, int(rank.max()) + 1))
    times = 1_770_000_000_000_000 + step.astype(np.int64) * 500_000 + noise[step, rank]
    place = table.column_names.index("ts")
    return table.set_column(place, "ts", pa.array(times, pa.timestamp("us", tz="UTC")))


def scalars(names: int, ranks: int, steps: int, *, pace: int = 300_000, noise: float = 0.02) -> pa.Table:
    """Return rows in the order of their arrival: by step, rank and name. All names of a step have the same time.

    `pace` is the length of a step in microseconds, and `noise` its relative standard deviation. Ranks begin apart.
    """
    step, rank, name = (one.ravel() for one in np.indices((steps, ranks, names)))
    random = np.random.default_rng(1)
    paces = pace * (1 + noise * random.standard_normal((steps, ranks)))
    starts = 1_770_000_000_000_000 + random.integers(0, 5_000_000, ranks)
    times = (starts + np.cumsum(paces, axis=0).astype(np.int64))[step, rank]
    texts = {key: [text] * len(step) for key, text in {"run": "bench", "incarnation": "i", "ts_origin": "rank"}.items()}
    columns = {
        **{key: pa.array(text).dictionary_encode() for key, text in texts.items()},
        "attempt": np.zeros(len(step), np.int32),
        "rank": rank.astype(np.int32),
        "seq": step,
        "step": step,
        "ordinal": times,
        "ts": pa.array(times, pa.timestamp("us", tz="UTC")),
        "name": pa.DictionaryArray.from_arrays(name.astype(np.int32), [f"n{one:02d}" for one in range(names)]),
        "value": random.standard_normal(len(step)),
    }
    return conform(pa.table(columns), "scalars")


# Encodings.


@contextlib.contextmanager
def split_integers() -> Iterator[None]:
    """Write files as the releases that split integers into bytes."""
    options = functools.partial(_split_options, encoding._options)  # noqa: SLF001 - there is no setting
    with mock.patch.multiple(encoding, _options=options, _plain_integers=_constant_plain, INTEGERS_KEY="unknown"):
        yield


def _constant_plain(columns: dict[str, Any], *_: object) -> set[str]:
    return {name for name, column in columns.items() if column.is_constant}


def _split_options(
    options: Callable[..., dict[str, Any]], dataset: str, zero: Collection[str], constant: Collection[str], **also: Any
) -> dict[str, Any]:
    found = options(dataset, zero, constant, **also)
    for field in dataset_schema(dataset):
        if (pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type)) and field.name not in constant:
            in_bytes = dataset == "tensor_stats" and field.name != "rank"
            found["column_encoding"][field.name] = SPLIT if in_bytes else DIFFERENCES
    return found | {"compression": "zstd", "compression_level": 1}


def _file_bytes(table: pa.Table, dataset: str) -> int:
    content = io.BytesIO()
    encoding.write_sorted(table, dataset, content)
    return content.tell()


# Figures.


def _sizes() -> Iterable[Row]:
    """Return the sizes of files of scalars. All names of a step have the same time."""
    shapes = ((20, 1_000), (4, 4_000), (4, 4_100), (2, 9_000))
    tables = {
        **{f"{names} names, 8 ranks, {steps:,} steps": scalars(names, 8, steps) for names, steps in shapes},
        "1 name, 8 ranks, 10,000 steps": scalars(1, ranks=8, steps=10_000),
        "1 name, 8 ranks, 1,000 steps": scalars(1, ranks=8, steps=1_000),
        "1 name, 8 ranks, 10,000 steps of 5 minutes": scalars(1, ranks=8, steps=10_000, pace=300_000_000),
        "1 name, 8 ranks, 10,000 steps of exactly 10 s": scalars(1, ranks=8, steps=10_000, pace=10_000_000, noise=0),
        "1 name, 1,000 ranks, 200 steps of exactly 10 s": scalars(1, ranks=1_000, steps=200, pace=10_000_000, noise=0),
        "1 name, 1,000 ranks, 100 steps of exactly 10 s": scalars(1, ranks=1_000, steps=100, pace=10_000_000, noise=0),
    }
    for name, table in tables.items():
        with split_integers():
            before = _file_bytes(table, "scalars") / table.num_rows
        now = _file_bytes(table, "scalars") / table.num_rows
        yield Row(f"file of scalars: {name}", now, "bytes per row", f"before {before:.2f}")


def _writing(tables: dict[str, list[pa.Table]]) -> Iterable[Row]:
    flush = conform(pa.concat_tables(tables["tensor_stats"][:1]), "tensor_stats")
    merge = conform(pa.concat_tables(tables["tensor_stats"]), "tensor_stats")
    for name, dataset, table, rounds in (
        ("sort and encode tensor statistics of a flush", "tensor_stats", flush, ROUNDS),
        ("sort and encode tensor statistics of a merge", "tensor_stats", merge, 11),
        ("sort and encode scalars", "scalars", tables["scalars"][0], 21),
    ):
        with split_integers():
            before = _file_bytes(table, dataset)
        now = _file_bytes(table, dataset)
        yield Row(f"{name}: file size", now / before, "now/before", f"{now / table.num_rows:.2f} bytes per row")

        def write(store: str, table: pa.Table = table, dataset: str = dataset) -> None:
            with split_integers() if store == "before" else contextlib.nullcontext():
                _file_bytes(table, dataset)

        yield _compared(name, write, rounds)
    yield from _appending()


def _appending() -> Iterable[Row]:
    """Compare the whole way of scalars into a store: conform, sort, encode, synchronize with the disk, commit."""
    flush = scalars(names=20, ranks=8, steps=40)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        writers = {
            which: stack.enter_context(Store.open(Path(folder, which), create=True).claim(owner="bench"))
            for which in ("before", "now")
        }
        numbers = itertools.count()

        def append(which: str) -> None:
            seq = pa.array(np.full(flush.num_rows, next(numbers)))
            table = flush.set_column(flush.column_names.index("seq"), "seq", seq)
            with split_integers() if which == "before" else contextlib.nullcontext():
                writers[which].append(Batch(tables={"scalars": table}, watermarks={"i": seq[0].as_py()}))

        yield _compared(f"append a flush of {flush.num_rows:,} scalars", append, 101)


def _asking(stores: dict[str, Path]) -> Iterable[Row]:
    with contextlib.ExitStack() as stack:
        open_stores = {name: stack.enter_context(connect(path)) for name, path in stores.items()}
        for name, query in QUERIES.items():
            rows = {store: _ask(connection, query) for store, connection in open_stores.items()}
            assert rows["before"] == rows["now"] > 0, (name, rows)

            def ask(store: str, query: str = query) -> None:
                _ask(open_stores[store], query)

            yield _compared(name, ask, ROUNDS)


def _ask(connection: Connection, query: str) -> int:
    """Return the number of rows in the answer to `query`."""
    return len(connection.query(query))


def _compared(name: str, work: Callable[[str], object], rounds: int) -> Row:
    """Return the ratio of the wall-clock times of `work("now")` and `work("before")`, which take turns."""
    shuffle = random.Random(2)  # noqa: S311 - an order, no secret
    taken: dict[str, list[float]] = {"before": [], "now": []}
    for number in range(rounds + 2):
        for which in shuffle.sample(sorted(taken), 2):
            began = time.perf_counter()
            work(which)
            if number >= 2:
                taken[which].append(time.perf_counter() - began)
    ratio, low, high = ratio_with_interval(list(zip(taken["now"], taken["before"], strict=True)))
    before, now = (1000 * statistics.median(taken[which]) for which in ("before", "now"))
    return Row(name, ratio, "now/before", f"{low:.3f} to {high:.3f}; {before:.3g} and {now:.3g} ms")


def _build(root: Path, tables: dict[str, list[pa.Table]]) -> None:
    """Append all rows and merge the files, as a service does."""
    with Store.open(root, create=True).claim(owner="bench") as writer:
        for dataset, batches in tables.items():
            for table in batches:
                marks = table.group_by("incarnation").aggregate([("seq", "max")])
                watermarks = dict(zip(marks["incarnation"].to_pylist(), marks["seq_max"].to_pylist(), strict=True))
                writer.append(Batch(tables={dataset: table}, watermarks=watermarks))
        with mock.patch.object(compaction, "SMALL_FILES", 2):
            writer.compact()


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
