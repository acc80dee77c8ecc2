"""`rankscope import`: repeatable, and clear about what it cannot read."""

from __future__ import annotations

import pytest

LINES = '{"step": 1, "loss": 2.5}\nnoise of the launcher\n{"step": 2, "loss": NaN}\n'


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINES, encoding="utf-8")
    return path


def test_log_becomes_a_run_that_can_be_asked(rankscope, log, tmp_path):
    store = str(tmp_path / "history")
    done = rankscope("import", str(log), "--run", "old", "--store", store)
    asked = rankscope("sql", "select run, step, value from scalars order by step", "--format", "csv", "--store", store)

    assert 0 == done.returncode, done.stderr
    assert f"{log}: jsonl, 2 records, up to step 2; 3 new rows in old (1 anomalies)\n" == done.stdout
    assert "1 lines could not be read (line 2: " in done.stderr
    assert "run,step,value\nold,1,2.5\nold,2,NaN\n" == asked.stdout


def test_grown_log_is_repeated_and_only_its_new_lines_are_stored(rankscope, log, tmp_path):
    store = str(tmp_path / "history")
    rankscope("import", str(log), "--store", store)
    with log.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": 2.0}\n')
    done = rankscope("import", str(log), "--store", store)

    assert f"{log}: jsonl, 3 records, up to step 3; 1 new rows in metrics\n" == done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.jsonl"], 1, "missing.jsonl cannot be read"),
        (["/etc/passwd"], 1, "is in no known format; known are"),
        (["/etc/passwd", "--format", "jsonll"], 2, "Did you mean 'jsonl'?"),
    ],
)
def test_what_cannot_be_imported_is_one_clear_line(rankscope, tmp_path, arguments, code, said):
    done = rankscope("import", *arguments, "--store", str(tmp_path / "history"))

    assert code == done.returncode
    assert said in done.stderr
    assert 1 == done.stderr.count("\n")
    assert not (tmp_path / "history").exists()
