"""The report at the end of a training: which rank makes it, when, from which records, and with equal bits."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exporter.parts import QUIET, Watched, small

from rankscope_exporter import Monitor
from rankscope_exporter.integrations.callback_base import CallbackBase, ReportChoice, start_report
from rankscope_exporter.process.report_child import ReportJob

SETTINGS = {"run": "end", "statistics": "torch"}
OFFLINE = {"spool_dir": "records"}


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(2, 3)).square().sum().backward()
        optimizer.step()


def trained(serve: dict[str, Any]) -> Monitor:
    with Watched(*small(), **SETTINGS, serve=serve) as watched:
        train(watched.net, watched.optimizer)
    return watched.monitor


def with_callback(*, report: ReportChoice, error: BaseException | None = None) -> list[torch.Tensor]:
    """Return the bits of a training whose callback makes a report, and that ends with `error`."""
    net, optimizer = small()
    callback = CallbackBase(QUIET | SETTINGS | {"serve": OFFLINE}, report=report)
    callback.begin(net, optimizer, first_step=1, total_steps=3)
    train(net, optimizer)
    callback.end(*(() if error is None else (error,)))
    return [*(item.detach().clone() for item in net.parameters()), torch.get_rng_state()]


def started(monitor: Monitor, choice: ReportChoice = True) -> list[ReportJob]:
    jobs: list[ReportJob] = []
    waiter = start_report(monitor, choice, lambda job, _: jobs.append(job))
    if waiter is not None:
        assert not waiter.daemon  # the interpreter waits for it
        waiter.join()
    return jobs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANKSCOPE_SPOOL_DIR")
    return tmp_path


def test_offline_training_is_reported_from_its_folder(folder):
    (job,) = started(trained(OFFLINE))

    assert (str(folder / "records"), "end") == (job.source, job.run)
    assert folder / "rankscope-reports" / "end.html" == job.path
    assert folder / "my.html" == started(trained(OFFLINE), "my.html")[0].path


def test_other_ranks_make_no_report(monkeypatch):
    monkeypatch.setenv("RANK", "1")

    assert [] == started(trained(OFFLINE))


def test_training_without_records_in_a_file_makes_no_report():
    assert [] == started(trained({"spool_dir": "off"}))


def test_records_without_confirmation_of_the_service_make_no_report(free_port):
    monitor = trained({"ingest_url": f"http://127.0.0.1:{free_port}", "spool_dir": "off"})

    assert monitor.ended is not None
    assert not monitor.ended.is_stored
    assert [] == started(monitor)


def test_attached_monitor_has_not_ended():
    with Watched(*small(), **SETTINGS, serve=OFFLINE) as watched:
        assert watched.monitor.ended is None
        assert [] == started(watched.monitor)


def test_callback_makes_the_report_and_changes_no_bit(folder):
    """The child process is the real one. It reads the folder that the training has closed."""
    before = set(threading.enumerate())
    without, with_report = with_callback(report=False), with_callback(report="end.html")
    (waiter,) = [item for item in threading.enumerate() if item.name == "rankscope-report"]
    waiter.join(60)

    assert all(map(torch.equal, without, with_report))
    assert "3 of 3 steps" in (folder / "end.html").read_text()
    assert before >= set(threading.enumerate())


def test_error_in_training_makes_no_report(folder):
    with_callback(report=True, error=ValueError("training failed"))

    assert not (folder / "rankscope-reports").exists()
    assert "rankscope-report" not in {item.name for item in threading.enumerate()}
