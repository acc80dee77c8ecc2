"""A store with rows in every view and macro and a query for each of them, which other readers read in several versions.

`make test-readers` writes the matrix in docs/readers.md. RANKSCOPE_READERS_CACHE is the folder of the environments. The
exit code is 1 if a version that must read the store does not, or if it reads other values.
"""

import datetime as dt
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from tests.readers import read_files
from tests.view.training import MAIN, START, Size, write_store

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.connection.pool import DEFINITIONS
from rankscope_storage.log.delta import Log
from rankscope_storage.maintenance.retention import Retention, retain
from rankscope_storage.query.sql_script import FILE_NAME

_BEGAN: Final = dt.datetime.fromtimestamp(START / 1e6, dt.UTC)
_CURVE: Final = f"WITH c AS (SELECT run, step, rank, value FROM scalars WHERE run = '{MAIN}' AND name = 'loss')"
_CALLS: Final = {  # A query for each macro; a view is read completely
    "ema": f"{_CURVE} FROM ema(c, step, value, 0.1, series := rank)",
    "moving_average": f"{_CURVE} FROM moving_average(c, step, value, 5, series := rank)",
    "p10": f"{_CURVE} FROM p10(c, value, series := rank)",
    "perplexity": f"{_CURVE} SELECT step, rank, perplexity(value) FROM c WHERE value < 20",
    "downsample": f"{_CURVE} FROM downsample(c, step, value, 20, series := rank)",
    "scalar_curve": f"FROM scalar_curve('{MAIN}', points := 20)",
    "top_deviations": f"FROM top_deviations('{MAIN}')",
    "bucket_deviations": f"FROM bucket_deviations('{MAIN}')",
}


def queries() -> dict[str, str]:
    """Return a query for each view and each macro of tables. They call the functions that remain."""
    tables = (name for name, made in DEFINITIONS.items() if {"VIEW", "TABLE"} & {*made.statement.split()})
    return {name: _CALLS.get(name, f"FROM {name}") for name in tables} | _CALLS


def write_reader_store(root: Path) -> None:
    """Create a store with several runs, hashes that differ, collectives, and rollups of the oldest steps."""
    write_store(root, Size(steps=240))
    with Store.open(root).claim(owner="readers") as writer:
        tables = {"hashes": _hashes(), "collectives": _collectives(), "histograms": _histograms()}
        rows = {name: pa.Table.from_pylist(listed, schema=dataset_schema(name)) for name, listed in tables.items()}
        writer.append(Batch(tables=rows, watermarks={}))
    retain(root, Retention(raw_days=1, scalars_days=1), sync_to_disk, now=_BEGAN + dt.timedelta(days=1, minutes=12))


def _common(rank: int, step: int) -> dict[str, Any]:
    ts = _BEGAN + dt.timedelta(days=2, seconds=step)
    return {"run": MAIN, "attempt": 0, "rank": rank, "step": step, "ordinal": step, "ts": ts, "ts_origin": "rank"}


def _hashes() -> list[dict[str, Any]]:
    return [
        _common(rank, step)
        | {
            "kind": "param_after",
            "tensor": f"t{number}",
            "replicas": "0-3",
            "hash": _hash(step) + (rank == 2 and step > 300),
        }
        for step in range(295, 305)
        for rank in range(4)
        for number in range(3)
    ]


def _hash(step: int) -> int:
    """Return one of the numbers in the whole range of the column, as real hashes are."""
    return (step * 0x9E3779B97F4A7C15) % (1 << 64) - (1 << 63)


def _collectives() -> list[dict[str, Any]]:
    call = {
        "incarnation": "readers", "op": "all_reduce", "group": "dp", "group_id": "0", "group_size": 2,
        "group_ranks": "0-1", "bytes": 12, "dtype": "float32", "state": "left", "backend": "gloo", "is_p2p": False,
    }  # fmt: skip
    return [
        _common(rank, step)
        | call
        | {"collective_seq": step, "t_start": _BEGAN + dt.timedelta(days=2, seconds=step + 0.1 * rank)}
        for step in range(300, 330)
        for rank in range(2)
    ]


def _histograms() -> list[dict[str, Any]]:
    names = {field.name: field.type for field in dataset_schema("histograms")}
    lists = {name: [1, 2, step] for step in (3,) for name, type_ in names.items() if pa.types.is_list(type_)}
    return [
        _common(0, step) | {"kind": "grad_reduced", "tensor": "t", "scheme": "log2"} | lists for step in range(300, 310)
    ]


HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "readers.md"
_BLOCK: Final = re.compile(r"(<!-- matrix: readers -->\n).*?(<!-- end -->)", re.DOTALL)
_SECONDS: Final = 600  # Time limit of one installation and of one reader


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader: its package, its versions in ascending order, and the function of `read_files` that calls it."""

    # `reads` describes the compared values. `refused` are versions that are known not to read the store. `beside` are
    # further requirements of single versions, and `always` those of all versions.

    name: str
    package: str
    function: str
    reads: str
    versions: tuple[str, ...]
    refused: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_FILES: Final = "all columns of all datasets"
_OLD_ARROW: Final = ("pyarrow==14.0.2", "numpy<2")
_NEW_ARROW: Final = ("pyarrow==26.0.1",)
READERS: Final = (
    Reader(
        *("DuckDB", "duckdb", "views", "all views and macros of `rankscope.sql`"),
        versions=("1.2.2", "1.3.2", "1.4.0", "1.4.4", "1.5.6", "2.0.1"),
        refused=("1.2.2", "1.3.2"),
        always=("pytz==2026.1",),
    ),
    Reader(
        *("pyarrow", "pyarrow", "pyarrow", _FILES),
        versions=("10.0.1", "14.0.2", "26.0.1"),
        refused=("10.0.1",),
        beside={"10.0.1": ("numpy<2",), "14.0.2": ("numpy<2",)},
    ),
    Reader("polars", "polars", "polars", _FILES, versions=("1.0.0", "1.20.0", "2.1.0"), refused=("1.0.0",)),
    Reader(
        *("pandas", "pandas", "pandas", f"{_FILES}, with pyarrow"),
        versions=("1.5.3", "2.0.3", "3.1.1"),
        beside={"1.5.3": _OLD_ARROW, "2.0.3": _OLD_ARROW, "3.1.1": _NEW_ARROW},
    ),
    Reader(
        *("delta-rs", "deltalake", "delta_rs", "the Delta table"),
        versions=("0.15.3", "0.18.2", "1.6.6"),
        beside={"0.15.3": _OLD_ARROW, "0.18.2": _OLD_ARROW, "1.6.6": _NEW_ARROW},
    ),
    Reader(
        *("DataFusion", "datafusion", "datafusion", _FILES),
        versions=("34.0.0", "40.1.0", "55.0.0"),
        refused=("34.0.0",),
        beside={"34.0.0": _OLD_ARROW, "40.1.0": _OLD_ARROW},
    ),
    Reader(
        *("ClickHouse", "chdb", "clickhouse", f"{_FILES}, with chdb"),
        versions=("2.0.4", "3.0.1", "4.4.0"),
        always=_NEW_ARROW,
        beside={"2.0.4": ("pandas",), "3.0.1": ("pandas",)},
    ),
    Reader(
        *("fastparquet", "fastparquet", "fastparquet", "texts, integers and times of all datasets; see below"),
        versions=("2024.2.0", "2024.11.0", "2026.9.0"),
        beside={"2024.2.0": ("numpy<2", "pandas<2.3"), "2024.11.0": ("pandas<2.3",)},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one version: `error` is empty if it read all rows correctly."""

    reader: Reader
    version: str
    error: str

    @property
    def is_expected(self) -> bool:
        """Return whether the version reads the store, or is known not to."""
        return bool(self.error) == (self.version in self.reader.refused)


def environment(reader: Reader, version: str) -> Path:
    """Return the Python program of the environment with `version`; create the environment at first use."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rankscope-readers"
    cache = Path(os.environ.get("RANKSCOPE_READERS_CACHE", default))
    folder = cache / f"{reader.package}-{version}"
    stamp = folder / "installed.txt"
    wanted = [f"{reader.package}=={version}", *reader.always, *reader.beside.get(version, ())]
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        uv = [sys.executable, "-m", "uv"]
        _run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)])
        _run([*uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *wanted])
        stamp.write_text("\n".join(wanted))
    return folder / "bin" / "python"


def _run(command: list[str], text: str = "") -> str:
    """Return the output of `command`, which does not import this tree. Raises RuntimeError with its last line."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_SECONDS, env=clean, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(next((line for line in lines if "rankscope.sql needs" in line), lines[-1]))
    return done.stdout


def read(python: Path | str, function: str, root: Path) -> dict[str, Any]:
    """Return the values that `function` reads from the store at `root`, with the program `python`."""
    if function == "views":
        arguments, asked = [function, str(root / FILE_NAME)], json.dumps(list(queries().values()))
    else:
        arguments, asked = [function], json.dumps({"root": str(root), "files": _files(root)})
    return dict(json.loads(_run([str(python), str(HERE / "read_files.py"), *arguments], asked)))


def _files(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in Log.open(root, sync_to_disk).snapshot().files.to_pylist():
        found.setdefault(file["dataset"], []).append(str(root / file["path"]))
    return found


def _floats(root: Path) -> set[tuple[str, str]]:
    return {
        (dataset, field.name)
        for dataset, paths in _files(root).items()
        for path in paths
        for field in pq.read_schema(path)
        if pa.types.is_floating(field.type)
    }


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of each query, or column of a dataset, with a different result."""
    for name, value in expected.items():
        other = found.get(name)
        if isinstance(value, dict):
            for column, (count, total) in value.items():
                numbers = (other or {}).get(column, [0, 0])
                if count != numbers[0] or not math.isclose(total, numbers[1], rel_tol=1e-6, abs_tol=1e-6):
                    yield f"{name}.{column}"
        elif value != other:
            yield name


def result(reader: Reader, version: str, root: Path, expected: Mapping[str, Mapping[str, Any]]) -> Result:
    wanted: Mapping[str, Any] = expected["views" if reader.function == "views" else "files"]
    if reader.function == "fastparquet":
        excluded = _floats(root)
        wanted = {
            name: {column: one for column, one in columns.items() if (name, column) not in excluded}
            for name, columns in wanted.items()
        }
    try:
        different = list(differences(wanted, read(environment(reader, version), reader.function, root)))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Result(reader=reader, version=version, error=str(error))
    return Result(reader=reader, version=version, error=f"other values: {', '.join(different)}" if different else "")


def matrix(results: list[Result]) -> str:
    lines = ["| reader | minimum version | also tested | older versions | reads |", "|---|---|---|---|---|"]
    for reader in READERS:
        own = [one for one in results if one.reader is reader]
        good = [one.version for one in own if not one.error] or ["none"]
        bad = "; ".join(f"{one.version}: {one.error}" for one in own if one.error)
        lines.append(f"| {reader.name} | {good[0]} | {', '.join(good[1:])} | {bad} | {reader.reads} |")
    return "\n".join(lines)


def main() -> int:
    """Run all readers, print their results, and write the table. Return the exit code."""
    with tempfile.TemporaryDirectory(prefix="rankscope-readers-") as folder:
        root = Path(folder) / "history"
        write_reader_store(root)
        files = {
            name: read_files.described(
                {
                    column: [value for path in paths for value in pq.ParquetFile(path).read()[column].to_pylist()]
                    for column in pq.read_schema(paths[0]).names
                }
            )
            for name, paths in _files(root).items()
        }
        expected = {"files": files, "views": read(sys.executable, "views", root)}
        empty = [name for name, query in queries().items() if not expected["views"][query][1]]
        print(f"views and macros without rows in this store: {', '.join(empty) or 'none'}", flush=True)
        results = []
        for reader in READERS:
            for version in reader.versions:
                results.append(result(reader, version, root, expected))
                print(f"{reader.name} {version}: {results[-1].error or 'equal'}", flush=True)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(lambda found: f"{found[1]}\n{matrix(results)}\n\n{found[2]}", text), encoding="utf-8")
    return int(not all(one.is_expected for one in results))


if __name__ == "__main__":
    sys.exit(main())
