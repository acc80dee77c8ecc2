"""`rankscope report`, and the calls of the package for scripts and notebooks."""

import pickle

import pytest
from tests.view.served import served

import rankscope
from rankscope.output.report_file import fetch_report, make_report
from rankscope.shell.errors import CommandError
from rankscope_storage.connection import connect
from rankscope_view.site import Site


def test_report_of_a_run_and_of_a_log_is_a_file(in_process, sample_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n', encoding="utf-8")
    of_store = in_process("report", "my-run", "--store", sample_store, "--summary")
    of_log = in_process("report", "log.jsonl", "--output", "new/log.html")

    of_other = in_process("report", "../other run", "--store", sample_store)

    assert (0, 0) == (of_store.returncode, of_log.returncode), of_store.stderr + of_log.stderr
    assert of_other.stdout.startswith(f"report of ../other run: {tmp_path.as_uri()}/_other_run~"), of_other.stderr
    assert "  step: 30 / 30, 100 %" in of_store.stdout
    assert f"report of my-run: {(tmp_path / 'my-run.html').as_uri()}" == of_store.stdout.splitlines()[-1]
    assert "30 of 30 steps in 30 s. Loss 0.1667" in (tmp_path / "my-run.html").read_text(encoding="utf-8")
    assert "Loss 2.250." in (tmp_path / "new" / "log.html").read_text(encoding="utf-8")


def test_report_of_a_log_with_a_secret_in_its_name_contains_none(in_process, tmp_path):
    log, report = tmp_path / "run-api_key=correct-horse.log", tmp_path / "out.html"
    log.write_text('{"step": 1, "loss": 2.5}\n', encoding="utf-8")
    in_process("report", log, "--output", report)

    assert "run-api_key=***" in report.read_text(encoding="utf-8")
    assert "horse" not in report.read_text(encoding="utf-8")


@pytest.mark.parametrize("run", [pytest.param("my-run", marks=pytest.mark.thorough), "../other run"])
def test_service_makes_the_report_of_a_run_of_any_name(sample_store, tmp_path, run):
    with served(Site(sample_store)) as url:
        found = fetch_report(url, run)
        with pytest.raises(CommandError, match="has no run 'unknown'"):
            fetch_report(url, "unknown")

    with connect(sample_store) as connection:
        assert make_report(connection, run, "history").summary == found.summary
    assert f"{run}, " in found.summary


def test_opened_run_is_shown_in_a_notebook(sample_store, tmp_path):
    run = rankscope.open_run(sample_store, "my-run")

    assert f"OpenedRun(store={str(sample_store)!r}, run='my-run')" == repr(run)
    assert "30 of 30 steps" in pickle.loads(pickle.dumps(run))._repr_html_()
    assert 30 == len(run.curve()) == run.summary().progress.step
    assert run.report(tmp_path / "a.html").is_file()
    assert "my-run" == rankscope.open_run(sample_store).run
    with pytest.raises(CommandError, match="Did you mean 'my-run'"):
        rankscope.open_run(sample_store, "my-rn")


@pytest.mark.thorough
def test_script_receives_the_path_and_no_error(sample_store, tmp_path, capsys):
    path = rankscope.report(sample_store, "my-run", output=tmp_path / "end.html")
    late = rankscope.report(sample_store, output=tmp_path / "late.html", limit_seconds=0.01)

    assert tmp_path / "end.html" == path
    assert "30 of 30 steps" in path.read_text(encoding="utf-8")
    assert late is None
    *printed, last = capsys.readouterr().out.splitlines()
    assert "  lowest: 0.166667 at step 30" in printed
    assert last.startswith("no report was made: the process did not end within 0.01 s; to make it: ")
    assert "rankscope report " in last
