"""Tests that files contain complete writes only: a full disk, a kill at any time, a fork."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.exporter.sinks.reading import imported
from tests.exporter.sinks.records import FINITE, entry, identity, record

from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.sinks import files
from rankscope_exporter.sinks.base import Sinks
from rankscope_exporter.sinks.csv_msprobe import Csv, CsvOptions
from rankscope_exporter.sinks.files import output_folder
from rankscope_exporter.sinks.tensorboard import TensorBoard, TensorBoardOptions

ROWS = tuple((entry(f"layers.{place}.weight"), FINITE) for place in range(20))


@contextlib.contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """Limit the size of files of this process to `size`: the write beyond it is shortened, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def sinks(folder: Path, *classes: Any, **options: Any) -> Sinks:
    made = {Csv: CsvOptions, TensorBoard: TensorBoardOptions}
    own = [one(made[one](folder=str(folder), **options), identity()) for one in classes or (Csv,)]
    return Sinks(own, ErrorBoundary())


def steps_of(folder: Path) -> Counter[int]:
    """Return the number of imported rows by step. No row is broken."""
    rows, faults = imported(folder)
    assert 0 == faults.count
    return Counter(row["step"] for row in rows["tensor_stats"])


def test_full_disk_loses_complete_steps_only(tmp_path):
    written = sinks(tmp_path, steps_per_file=100)
    written.put(record(1, *ROWS))
    (path,) = tmp_path.glob("*/*")
    before = path.read_bytes()
    with files_no_longer_than(len(before) + len(before) // 2):
        written.put(record(2, *ROWS))

    assert {"sink_csv": 1} == written.missed
    assert before == path.read_bytes()
    for step in (3, 4):
        written.put(record(step, *ROWS))
    assert {1: 20, 4: 20} == steps_of(tmp_path)


def test_full_disk_leaves_no_partial_file_and_no_partial_event(tmp_path):
    events = sinks(tmp_path / "events", TensorBoard)
    events.put(record(1, *ROWS))
    (path,) = tmp_path.rglob("events*/*/*/events*")
    before = path.read_bytes()
    with files_no_longer_than(len(before) + 100):
        events.put(record(2, *ROWS))
    with files_no_longer_than(100):
        sinks(tmp_path / "csv").put(record(1, *ROWS))

    assert before == path.read_bytes()
    assert [] == list(tmp_path.glob("csv/*/*"))


def killed(at: str, during: Callable[[], None]) -> None:
    """Run `during` in a process that is killed during its first write ("write") or before its rename."""
    child = os.fork()
    if child == 0:
        try:
            whole = os.write

            def half(descriptor: int, data: bytes) -> int:
                whole(descriptor, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
                return 0

            if at == "write":
                os.write = half
            else:
                Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign,return-value]  # it never returns
            during()
        finally:
            os._exit(1)
    assert signal.SIGKILL == os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("at", ["write", "rename"])
def test_kill_during_creation_leaves_no_file(tmp_path, at):
    """The process leaves at most one hidden file, which the next process overwrites."""
    sink = Csv(CsvOptions(folder=str(tmp_path)), identity())
    for _ in range(2):
        killed(at, lambda: sink.put(record(1, *ROWS)))

    assert [] == list(tmp_path.glob("*/*.csv"))
    assert [".grad_reduced_0-0.csv.partial"] == [path.name for path in tmp_path.glob("*/.*")]
    sink.put(record(1, *ROWS))
    assert ["grad_reduced_0-0.csv"] == [path.name for path in (next(tmp_path.iterdir())).iterdir()]


def test_next_write_removes_the_partial_row_of_a_killed_process(tmp_path):
    sink = Csv(CsvOptions(folder=str(tmp_path), steps_per_file=10), identity())
    sink.put(record(1, *ROWS))
    killed("write", lambda: sink.put(record(2, *ROWS)))

    (path,) = tmp_path.glob("*/*.csv")
    assert not path.read_bytes().endswith(b"\n")
    rows, _ = imported(tmp_path)
    assert 20 <= len(rows["tensor_stats"]) < 40
    sink.put(record(3, *ROWS))
    assert 20 == steps_of(tmp_path)[3]


@pytest.mark.parametrize("torn", [b"", b"0,w,1", b"x" * 10_000])
@pytest.mark.parametrize("whole", [b"", b"header\n", b"header\n" + b"row\n" * 3_000])
def test_only_the_incomplete_last_line_is_removed(tmp_path, whole, torn):
    path = tmp_path / "file"
    path.write_bytes(whole + torn)
    files.append(path, b"new\n", lines=True)

    assert whole + b"new\n" == path.read_bytes()


def test_no_file_is_open_between_writes(tmp_path):
    written = sinks(tmp_path, Csv, TensorBoard)
    written.put(record(1, *ROWS))
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    for step in range(2, 6):
        written.put(record(step, *ROWS))

    assert before == {path.name for path in Path("/proc/self/fd").iterdir()}


def test_unknown_user_in_a_path_is_a_folder_name(tmp_path, monkeypatch):
    """An error here would leave the training without a monitor."""
    monkeypatch.chdir(tmp_path)

    assert tmp_path / "~nobody-of-that-name" / "out" == output_folder("~nobody-of-that-name/out")
