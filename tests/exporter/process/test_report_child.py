"""The child process that makes a report: whatever happens to it, its parent continues and states the command."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankscope_exporter.process import report_child
from rankscope_exporter.process.report_child import ReportJob, installation, make_report

WRITES = """
import os, sys
path = sys.argv[sys.argv.index("--output") + 1]
open(path, "w").write(" ".join(sys.argv[2:]) + os.environ.get("RANKSCOPE_TOKEN", ""))
print("loss 2.5")
"""


def job(folder: Path) -> ReportJob:
    output = folder / "new" / "report.html"
    return ReportJob(source="the store", run="my run", output=output, environment={"RANKSCOPE_TOKEN": "secret"})


def made(folder: Path, code: str, *, seconds: float = 60.0, needed: tuple[str, ...] = ()) -> tuple[Path | None, str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_child, "_PROGRAM", (sys.executable, "-S", "-c", code))
        patch.setattr(ReportJob, "needed", needed)
        path = make_report(job(folder), said.append, seconds)
    (text,) = said
    return path, text


def test_summary_of_the_child_is_passed_on(tmp_path):
    path, text = made(tmp_path, WRITES)

    assert tmp_path / "new" / "report.html" == path
    assert "loss 2.5" == text.splitlines()[-1]
    assert f"report the store --run my run --output {path} --summarysecret" == path.read_text()


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("import sys; sys.exit('rankscope: run not found')", 60.0, "rankscope: run not found"),
        ("import os; os.kill(os.getpid(), 9)", 60.0, "exit code -9"),
        ("", 60.0, "exit code 0"),  # it wrote no file
        ("import time; time.sleep(60)", 0.2, "the process did not end within 0.2 s"),
    ],
)
def test_failed_child_is_one_line_with_the_command(tmp_path, code, seconds, reason):
    path, text = made(tmp_path, code, seconds=seconds)

    assert path is None
    assert text == f"no report was made: {reason}; to make it: {job(tmp_path).command}"
    assert "secret" not in text


def test_missing_library_prints_the_command_and_starts_nothing(tmp_path):
    path, text = made(tmp_path, WRITES, needed=("sys", "no_such_library"))

    assert path is None
    assert "no_such_library, which is not installed here; to make it: " in text
    assert "[cli,store,service]', then " in text
    assert "rankscope report 'the store'" in text
    assert not (tmp_path / "new").exists()


def test_search_for_pip_calls_no_import_hook(monkeypatch):
    asked: list[str] = []
    hook = SimpleNamespace(find_spec=lambda name, *_: asked.append(name))  # setuptools has one that replaces distutils
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])

    assert installation(["no_such_library"]).startswith(sys.executable)
    assert ["no_such_library"] == asked


def test_report_of_a_service_needs_no_store():
    assert {"duckdb", "deltalake"} == {*ReportJob(source="history").needed} - {*ReportJob(source="https://h:1").needed}


def test_folder_that_cannot_be_created_is_one_line(tmp_path):
    (tmp_path / "new").write_text("a file")

    assert "no report was made: " in made(tmp_path, WRITES)[1]
