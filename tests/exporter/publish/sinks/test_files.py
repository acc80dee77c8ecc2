"""Sinks: complete writes only, the data of the record channel, and a failing sink that disturbs nothing."""

import contextlib
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exporter.publish.sinks.records import FINITE, entry, identity, imported, record
from torch import nn

from rankscope_contract.model.events import EventType
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish.sinks import LONGEST_PAUSE, Sink, Sinks, files, sink_classes
from rankscope_exporter.publish.sinks.files import output_folder
from rankscope_exporter.records.record import StepRecord
from rankscope_msprobe.sinks.csv_files import Csv, CsvOptions
from rankscope_msprobe.sinks.tensorboard import TensorBoard, TensorBoardOptions

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


@dataclass(frozen=True)
class NoOptions:
    """Options without a setting."""


class Failing(Sink):
    """A sink that fails while `ill` is true and records the steps that it receives."""

    name = "failing"
    options_class = NoOptions

    def __init__(self, name: str = "failing", *, ill: bool = True) -> None:
        self.name = name
        self.offered: list[int | None] = []
        self.closed, self.ill = 0, ill

    def put(self, record: StepRecord) -> None:
        self.offered.append(record.step)
        if self.ill:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed += 1
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("healthy", "steps", "offered"),
    [((), 20, [1, 3, 6, 11]), ((6, 7, 9, 10), 11, [1, 3, 6, 7, 8, 10])],
    ids=["never", "recovered"],
)
def test_failing_sink_is_retried_after_growing_pauses_until_it_recovers(healthy, steps, offered):
    sink = Failing()
    sinks = Sinks([sink], ErrorBoundary())
    for step in range(1, steps):
        sink.ill = step not in healthy
        sinks.put(record(step))

    assert offered == sink.offered
    assert {"sink_failing": steps - 1 - len({*offered} & {*healthy})} == sinks.missed


def test_sink_that_fails_for_days_is_still_retried():
    sink = Failing()
    sinks = Sinks([sink], ErrorBoundary())
    for step in range(5 * LONGEST_PAUSE):
        sinks.put(record(step))

    assert LONGEST_PAUSE + 1 == sink.offered[-1] - sink.offered[-2]


def test_failing_sink_is_reported_once_and_others_continue(caplog):
    boundary, hearing = ErrorBoundary(), Failing("hearing", ill=False)
    sinks = Sinks([Failing(), hearing], boundary)
    for step in range(1, 7):
        sinks.put(record(step))
    sinks.close()

    assert [1, 2, 3, 4, 5, 6] == hearing.offered
    assert 1 == hearing.closed
    assert ["sink failing", "sink hearing"] == [text.getMessage().split(" failed")[0] for text in caplog.records]
    assert 3 + 2 == boundary.count


def test_forked_child_writes_no_sink(tmp_path):
    sinks = Sinks([Csv(CsvOptions(folder=str(tmp_path)), identity())], ErrorBoundary())
    sinks.put(record(1, (entry(), FINITE)))
    child = os.fork()
    if child == 0:
        try:
            sinks.put(record(2, (entry(), FINITE)))
            sinks.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    assert ["grad_reduced_0-0.csv"] == [path.name for path in tmp_path.glob("*/*")]


@pytest.mark.parametrize("blocked", ["out", "out/below/it"])
def test_sink_recovers_when_its_folder_can_be_created(tmp_path, blocked):
    """A file has the name of the folder. After its removal, rows are written."""
    in_the_way = tmp_path / "out"
    in_the_way.write_text("in the way")
    boundary = ErrorBoundary()
    sinks = Sinks([Csv(CsvOptions(folder=str(tmp_path / blocked)), identity())], boundary)
    for step in (1, 2):
        sinks.put(record(step, (entry(), FINITE)))
    in_the_way.unlink()
    sinks.put(record(3, (entry(), FINITE)))

    assert 1 == boundary.count
    assert {"sink_csv": 2} == sinks.missed
    assert ["grad_reduced_2-2.csv"] == [path.name for path in (tmp_path / blocked).glob("*/*")]


STEPS = 4
VALUES = ("norm", "min", "max", "mean", "nans", "zeros", "numel")
QUANTITIES = ("parameters", "gradients", "micro_gradients", "optimizer_state", "activations", "direction", "linear")


def train(batches: Iterator[torch.Tensor], config: MonitorConfig | None, during: Callable[[Any], Any] = bool) -> Any:
    """Train with a monitor if there is a `config`, and return the model and the result of `during(monitor)`."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters())
    with contextlib.nullcontext() if config is None else Monitor(config).attach(net, optimizer) as monitor:
        for inputs in batches:
            optimizer.zero_grad()
            net(inputs).square().sum().backward()
            optimizer.step()
        return net, during(monitor)


def steps() -> Iterator[torch.Tensor]:
    return (torch.randn(5, 4, generator=torch.Generator().manual_seed(step)) for step in range(STEPS))


@pytest.fixture
def config(tmp_path: Path, quiet: MonitorConfig) -> MonitorConfig:
    """Return a configuration with every quantity and all sinks, and a long timeout for the last step."""
    folder = {"folder": str(tmp_path / "out")}
    sinks = {"csv": {**folder, "steps_per_file": 2}, "tensorboard": folder, "api": {}}
    return replace(quiet, quantities=QUANTITIES, sinks=sinks, exit_wait_seconds=60)


def test_training_is_bit_identical_with_all_sinks(config):
    nets = []
    for used in (config, None):
        net, faults = train(steps(), used, lambda monitor: monitor and monitor.faults)
        assert not faults
        nets.append((*(parameter.detach() for parameter in net.parameters()), torch.get_rng_state()))

    assert all(torch.equal(first, second) for first, second in zip(*nets, strict=True))


def test_files_have_the_values_of_the_record_channel(config, tmp_path, reader, eventually):
    def during(monitor):
        monitor.end_step()
        return eventually(lambda: told_if_whole(reader(monitor).rows()), 60)

    _, told = train(steps(), config, during)
    rows, faults = imported(tmp_path / "out")
    found = {
        (row["step"], row["kind"], row["tensor"], row["index"], row["micro_step"]): tuple(row[op] for op in VALUES)
        for row in rows["tensor_stats"]
    }

    assert 0 == faults.count, faults.first
    assert len(rows["tensor_stats"]) == len(found)
    assert told == found
    assert {"direction_agreement", "stable_rank", "spectral_norm"} == {row["kind"] for row in rows["features"]}


def told_if_whole(rows: list[Any]) -> dict[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return what the stream holds, in the terms of the layout, once its last step is there."""
    if not rows or rows[-1].step < STEPS:
        return None
    micro = {(row.step, row.kind, row.tensor) for row in rows if row.micro_step is not None}
    return {
        (row.step, row.kind, row.tensor, row.index, row.micro_step): tuple(row.numbers[op] for op in VALUES)
        for row in rows
        # The layout cannot hold a gradient of the step in addition to those of its micro-batches.
        if row.micro_step is not None or (row.step, row.kind, row.tensor) not in micro
    }


def test_read_only_folder_affects_neither_training_nor_channel(config, tmp_path, reader, eventually):
    (tmp_path / "out").write_text("in the way")

    def during(monitor):
        monitor.end_step()
        assert eventually(lambda: told_if_whole(reader(monitor).rows()), 60)
        events = [event["message"] for event in reader(monitor).events() if event["type"] == EventType.FAULT]
        return events, reader(monitor).get("/metrics").decode(), monitor

    _, (events, page, monitor) = train(steps(), config, during)

    assert ["sink csv failed", "sink tensorboard failed"] == sorted({text.split(", training")[0] for text in events})
    assert len(events) == 2, "each is named once"
    assert 'reason="sink_csv"' in page
    assert monitor.sink("api").steps(), "another sink has its rows"


def test_uncounted_nan_is_visible_in_the_published_columns(config, tmp_path):
    """The norm of finite elements, which the store receives, would hide the NaN from a reader of the file."""
    sinks = {"csv": {"folder": str(tmp_path)}}
    options = {"gradients": {"ops": ["max", "norm"]}}
    config = replace(config, quantities=("gradients", "parameters"), options=options, sinks=sinks)
    net = nn.Sequential(nn.Linear(4, 8))
    optimizer = torch.optim.Adam(net.parameters())
    with Monitor(config).attach(net, optimizer):
        (net(torch.ones(5, 4)).sum() + next(net.parameters())[0, 0] * torch.nan).backward()  # one of the gradients
        optimizer.step()
    files = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*/*.csv")}

    assert "vpp_stage,name,step,norm,max,shape,dtype" == files["grad_reduced_0-0.csv"][0]
    assert '0,0.weight,0,nan,nan,"[8, 4]",torch.float32' == files["grad_reduced_0-0.csv"][1]
    assert "vpp_stage,name,step,norm,min,max,mean,nans,zeros,shape,dtype" == files["param_origin_0-0.csv"][0]


class _StopError(Exception):
    pass


@pytest.mark.parametrize("ending", [None, _StopError, SystemExit, KeyboardInterrupt])
@pytest.mark.usual(2)
def test_last_step_is_in_the_file_however_training_ends(config, tmp_path, ending):
    def during(_):
        if ending is not None:
            raise ending

    with contextlib.suppress(_StopError, SystemExit, KeyboardInterrupt):
        train(steps(), config, during)
    rows, _ = imported(tmp_path / "out")

    assert STEPS == max(row["step"] for row in rows["tensor_stats"] if row["kind"] == "param_after")


def test_forked_workers_write_no_rows(config, tmp_path):
    """Workers inherit the monitor. Each row is written once, in one folder."""
    data = [torch.ones(4) * place for place in range(8)]
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    train(iter(loader), config)
    rows, faults = imported(tmp_path / "out")
    seen = [(row["step"], row["tensor"]) for row in rows["tensor_stats"] if row["kind"] == "param_after"]

    assert 0 == faults.count
    assert 4 * 4 == len(seen) == len(set(seen))
    assert 1 == len(list((tmp_path / "out").glob("*-rank0-*")))


PAGE = Path(__file__).resolve().parents[4] / "docs" / "sinks.md"


def test_page_documents_every_sink_and_setting():
    text = PAGE.read_text(encoding="utf-8")
    ours = [cls for cls in sink_classes().values() if cls.__module__.startswith("rankscope_exporter.")]  # not of a test
    said = [f"`{cls.name}`" for cls in ours]
    said += [f"`{item.name}`" for cls in ours for item in fields(cls.options_class)]

    assert [] == [name for name in said if name not in text]
