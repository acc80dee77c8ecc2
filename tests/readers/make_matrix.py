"""Read one store with other readers in several versions, and write the matrix in docs/readers.md: `make test-readers`.

Each version has a virtual environment in the folder RANKSCOPE_READERS_CACHE (default: ~/.cache/rankscope-readers). It
is created once. The exit code is 1 if a version that must read the store does not, or if it reads other values.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from tests.readers import read_files
from tests.readers.reader_store import queries, write_reader_store

from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.log.delta import Log
from rankscope_storage.query.sql_script import FILE_NAME

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "readers.md"
_BLOCK: Final = re.compile(r"(<!-- matrix: readers -->\n).*?(<!-- end -->)", re.DOTALL)
_SECONDS: Final = 600
"""Time limit of one installation and of one reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader: its package, its versions in ascending order, and the function of `read_files` that calls it.

    `reads` describes the compared values. `refused` are versions that are known not to read the store. `beside` are
    further requirements of single versions, and `always` those of all versions.
    """

    name: str
    package: str
    function: str
    reads: str
    versions: tuple[str, ...]
    refused: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]]


_FILES: Final = "all columns of all datasets"
READERS: Final = (
    Reader(
        name="DuckDB",
        package="duckdb",
        function="views",
        reads="all views and macros of `rankscope.sql`",
        versions=("1.2.2", "1.3.2", "1.4.0", "1.4.4", "1.5.6", "2.0.1"),
        refused=("1.2.2", "1.3.2"),
        always=("pytz==2026.1",),
        beside={},
    ),
    Reader(
        name="pyarrow",
        package="pyarrow",
        function="pyarrow",
        reads=_FILES,
        versions=("10.0.1", "14.0.2", "26.0.1"),
        refused=("10.0.1",),
        beside={"10.0.1": ("numpy<2",), "14.0.2": ("numpy<2",)},
    ),
    Reader(
        name="polars",
        package="polars",
        function="polars",
        reads=_FILES,
        versions=("1.0.0", "1.20.0", "2.1.0"),
        refused=("1.0.0",),
        beside={},
    ),
    Reader(
        name="pandas",
        package="pandas",
        function="pandas",
        reads=f"{_FILES}, with pyarrow",
        versions=("1.5.3", "2.0.3", "3.1.1"),
        beside={
            "1.5.3": ("pyarrow==14.0.2", "numpy<2"),
            "2.0.3": ("pyarrow==14.0.2", "numpy<2"),
            "3.1.1": ("pyarrow==26.0.1",),
        },
    ),
    Reader(
        name="delta-rs",
        package="deltalake",
        function="delta_rs",
        reads="the Delta table",
        versions=("0.15.3", "0.18.2", "1.6.6"),
        beside={
            "0.15.3": ("pyarrow==14.0.2", "numpy<2"),
            "0.18.2": ("pyarrow==14.0.2", "numpy<2"),
            "1.6.6": ("pyarrow==26.0.1",),
        },
    ),
    Reader(
        name="DataFusion",
        package="datafusion",
        function="datafusion",
        reads=_FILES,
        versions=("34.0.0", "40.1.0", "55.0.0"),
        refused=("34.0.0",),
        beside={"34.0.0": ("pyarrow==14.0.2", "numpy<2"), "40.1.0": ("pyarrow==14.0.2", "numpy<2")},
    ),
    Reader(
        name="ClickHouse",
        package="chdb",
        function="clickhouse",
        reads=f"{_FILES}, with chdb",
        versions=("2.0.4", "3.0.1", "4.4.0"),
        always=("pyarrow==26.0.1",),
        beside={"2.0.4": ("pandas",), "3.0.1": ("pandas",)},
    ),
    Reader(
        name="fastparquet",
        package="fastparquet",
        function="fastparquet",
        reads="texts, integers and times of all datasets; see below",
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
        asked = json.dumps(list(queries().values()))
        return dict(json.loads(_run([str(python), str(HERE / "read_views.py"), str(root / FILE_NAME)], asked)))
    asked = json.dumps({"root": str(root), "files": _files(root)})
    return dict(json.loads(_run([str(python), str(HERE / "read_files.py"), function], asked)))


def _files(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in Log.open(root, sync_to_disk).snapshot().files.to_pylist():
        found.setdefault(file["dataset"], []).append(str(root / file["path"]))
    return found


def _floats(root: Path) -> set[tuple[str, str]]:
    """Return dataset and name of each column with floats."""
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
    """Return the result of one version of a reader on the store at `root`."""
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
    """Return the table of the page."""
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
