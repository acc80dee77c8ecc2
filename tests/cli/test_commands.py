"""Golden output of commands, rewritten by `RANKSCOPE_UPDATE_GOLDEN=1 make test PYTEST=tests/cli`; one-line errors."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.msprobe.conftest import TWO_RANKS

from rankscope.commands import subcommands
from rankscope.shell.streams import masked
from rankscope_storage.connection import connect

GOLDEN = Path(__file__).parents[1] / "golden" / "cli"


LOSS_AROUND_THE_NAN = """
    select step, value, null as nothing from scalars
    where name = 'loss' and rank = 1 and step between 9 and 12 order by all"""


def assert_golden(name, text):
    path = GOLDEN / f"{name}.txt"
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    # The size on disk depends on the release of the Parquet writer.
    text = re.sub(r"; [\d.]+ (bytes|kB|MB)$", "; SIZE", text, flags=re.MULTILINE)
    if os.environ.get("RANKSCOPE_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("runs", ["runs"]), ("summary", ["summary", "my-run"])),
        *(("summary_of_failed_run", ["summary", "../other run"]), ("anomalies", ["anomalies", "--top", "8"])),
        *(("anomalies_none", ["anomalies", "my-run", "--steps", "1:9"]), ("sql_table", ["sql", LOSS_AROUND_THE_NAN])),
        ("sql_json", ["sql", "--format", "json", LOSS_AROUND_THE_NAN]),
        ("sql_csv", ["sql", "--format", "csv", "select distinct tensor, zeros from tensor_stats order by zeros"]),
    ],
)
def test_golden_output(rankscope, name, arguments):
    done = rankscope(*arguments)

    assert "" == done.stderr
    assert 0 == done.returncode
    assert_golden(name, done.stdout)


def test_sql_reads_a_file_and_standard_input(rankscope, tmp_path):
    (tmp_path / "query.sql").write_text("select 1 as one", encoding="utf-8")
    from_file = rankscope("sql", "-f", str(tmp_path / "query.sql"))

    assert 0 == from_file.returncode
    assert from_file.stdout == rankscope("sql", input="select 1 as one").stdout


def test_sql_can_only_read_and_only_the_store(rankscope, tmp_path):
    target = tmp_path / "stolen.csv"
    for statement in (
        f"copy (select 1) to '{target}'",
        "create table t as select 1",
        "select * from read_text('/etc/passwd')",
        "select 1; drop view runs",
        "install httpfs",
        "set enable_external_access = true",
    ):
        done = rankscope("sql", statement)

        assert 1 == done.returncode, statement
        assert 1 == done.stderr.count("\n"), done.stderr
    assert not target.exists()


def test_emitted_views_return_the_same_rows_in_duckdb(rankscope):
    import duckdb

    script = rankscope("sql", "--emit-views").stdout
    plain = duckdb.connect()
    plain.execute(script)

    assert [(240, 2)] == plain.execute("select (select count(*) from scalars), (select count(*) from runs)").fetchall()


ON_A_URL = [f"{name} --store gs://a/b" for name in ("runs", "import log.jsonl", "serve", "up")]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["summary", "my-rum"], 2, "run 'my-rum' not found. Did you mean 'my-run'?"),
        (["summary", "zzz"], 2, "Runs in the store: ../other run, my-run."),
        *((["anomalies", "--steps", "9:1"], 2, "write first:last"), (["sql", "select * from scalar"], 1, "scalars")),
        *((["sql", "selec 1"], 1, "selec"), (["sql", "select 1", "-f", "x.sql"], 2, "not both")),
        (["sql", "-f", "missing.sql"], 2, "missing.sql"),
        (["runs", "--store", "/nowhere"], 2, "/nowhere is not a Rankscope store"),
        (["sql", "select 1", "--store", "/etc/passwd"], 1, "/etc/passwd"),
        (
            ["sql", "--emit-views", "-o", "/proc/none/views"],
            1,
            "cannot write /proc/none/views: No such file or directory",
        ),
        (["runs", "rename", "my-run"], 2, "rankscope: write: rankscope runs rename RUN NAME\n"),
        (["export", "my-rn"], 2, "run 'my-rn' not found. Did you mean 'my-run'?"),
        (["export", "my-run", "--format", "parquet", "--data-type-list", "grads"], 2, "there is no data type 'grads'"),
        (["export", "my-run", "--format", "parquet", "--time-start", "today"], 2, "'today' is not a time"),
        (["export", "my-run", "--format", "parquet", "--steps", "a:b"], 2, "write first:last"),
        (["export", "my-run", "--format", "parquet", "--steps", "9:1"], 2, "write first:last"),
        (["export", "my-run", "--format", "parquet", "--ranks", "one"], 2, "write numbers and ranges"),
        (["export", "my-run", "--format", "tensorboard", "--ranks", "99"], 1, "no rows of tensor_stats, scalars"),
        (["export", "my-run", "--format", "tensorboard", "-o", "/proc/none"], 1, "cannot write to /proc/none"),
        (["report", "no-such-run"], 2, "run 'no-such-run' not found"),
        (["report", "http://127.0.0.1:9"], 2, "--run is missing"),
        (["report", "http://127.0.0.1:9", "--run", "my-run"], 1, "http://127.0.0.1:9/runs/my-run/report: "),
        (["report", "my-run", "-o", "/proc/a.html"], 1, "cannot write /proc/a.html: No such file or directory"),
        (["plot", "my-run", "--output", "figure.gif"], 2, "name a file with the suffix png, svg, pdf"),
        (["plot", "my-run", "--output", "missing/figure.png"], 1, "cannot write missing/figure.png: No such file"),
        (["plot", "my-run", "--kind", "tensors", "--tensor-kind", "grad"], 2, "has no kind 'grad'; it has exp_avg"),
        (["plot", "my-run", "--kind", "tensors", "--op", "median"], 2, "'median' is no statistic"),
        (["plot", "my-run", "--scalar", "los"], 2, "my-run has no scalar 'los'; similar names: loss"),
        (["compare", "my-run", "my-run", "--no-figure"], 2, "rankscope: name two or more different runs or logs\n"),
        (["import", "missing.jsonl", "--store", "history"], 1, "missing.jsonl cannot be read"),
        (["import", "/etc/passwd", "--store", "history"], 1, "has an unknown format; known formats: "),
        (["import", "/etc/passwd", "--format", "jsonll", "--store", "history"], 2, "Did you mean 'jsonl'?"),
        (
            ["import", "/etc/passwd", "--run", "x" * 1001, "--store", "h"],
            2,
            "has 1,001 characters; the maximum is 1,000",
        ),
        (["view", "."], 2, "is not a Rankscope store"),
        (["notify", "test"], 2, "no address: give --notify URL"),
        (["notify", "test", "--notify", "nothing://x"], 2, "nothing://…"),
        (["msprobe", "csv2db", "--monitor-path", "/nowhere"], 2, "/nowhere is not a folder"),
        (
            ["msprobe", "csv2tensorboard", "--monitor-path", str(TWO_RANKS), "--time-start", "now"],
            2,
            "as in Dec03_21-34-40",
        ),
        (["msprobe", "anomaly", "-d", "/nowhere"], 2, "/nowhere contains no folder of a rank"),
        *(
            (command.split(), 2, "gs://a/b has the unknown scheme gs: a store is a local folder, or s3://bucket/prefix")
            for command in ON_A_URL
        ),
    ],
)
def test_errors_are_one_line_without_a_traceback(rankscope, tmp_path, arguments, code, message):
    done = rankscope(*arguments, cwd=tmp_path)

    assert code == done.returncode
    assert message in done.stderr
    assert 1 == done.stderr.count("\n")
    assert "Traceback" not in done.stderr
    assert "" == done.stdout
    assert [] == list(tmp_path.iterdir())


def test_misspelt_command_suggests_the_nearest_name(rankscope):
    done = rankscope("anomalys")

    assert 2 == done.returncode
    assert "Did you mean 'anomalies'?" in done.stderr


def test_usage_error_shows_no_secret(rankscope):
    refused = [
        rankscope("https://bob:correct-horse@host/x"),
        rankscope("summary", "my-run", "https://bob:correct-horse@host/x"),
        rankscope("incidents", "--closed", "password=correct-horse"),
    ]

    assert {2} == {done.returncode for done in refused}
    assert all("Error" in done.stderr and "***" in done.stderr for done in refused[:2])
    assert "horse" not in "".join(done.stderr + done.stdout for done in refused)


FULL = "rankscope: cannot write standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        *(("--help | true", 0, "", ""), ("runs --help | true", 0, "", "")),
        ("sql --store STORE --format csv 'from range(300000)' | head -n 2", 0, "range\n0\n", ""),
        *(("runs --store STORE >&- 2>&- <&-", 0, "", ""), ("runs --store STORE >&-", 0, "", "")),
        ("sql 'SELECT 1' --store STORE >/dev/full", 1, "", FULL),
    ],
)
def test_closed_stream_is_no_error_and_a_full_disk_is_one_line(sample_store, tmp_path, command, code, out, err):
    line = f"cd {tmp_path}; {sys.executable} -m rankscope {command.replace('STORE', str(sample_store))}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)

    assert (code, out, err) == (done.returncode, done.stdout, done.stderr)


def test_escape_sequences_in_names_are_masked_by_each_command(rankscope, tmp_path):
    """Only rows as CSV or JSON are not changed."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202e\n\r"
    run, other, store = f"a{evil}", f"b{evil}", ("--store", str(tmp_path / "store"))
    log = tmp_path / f"{run}.jsonl"
    log.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
    commands = [
        *(("import", str(log), "--run", name, *store) for name in (run, other)),
        *((name, run, *store) for name in ("anomalies", "summary")),
        *(("runs", *store), ("diff", run, other, *store), ("summary", f"x{evil}", *store)),
        ("watch", str(log), "--once", "--run", run, "--store", str(tmp_path / "second")),
    ]
    for command in commands:
        done = rankscope(*command, cwd=tmp_path)
        text = done.stdout + done.stderr

        assert "owned" in text, command
        assert set("\x1b\x07\x9b\u202e\r").isdisjoint(text), command


def test_masked_text_keeps_its_lines_and_letters():
    assert "学习\té\n\\x1b[31m\\u2028" == masked("学习\té\n\x1b[31m\u2028")


@pytest.fixture
def removed_folder(monkeypatch, tmp_path):
    """Make a folder that does not exist any more the working directory."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.mark.usefixtures("removed_folder")
def test_store_with_a_full_path_is_read_in_a_removed_folder(in_process, sample_store):
    read = in_process("sql", "--store", sample_store, "--format", "csv", "select 3 as found from runs limit 1")

    assert (0, "found\n3\n") == (read.returncode, read.stdout)


@pytest.mark.usual(1)
@pytest.mark.usefixtures("removed_folder")
@pytest.mark.parametrize(
    "arguments", [("runs",), ("summary", "my-run"), ("watch", "LOG", "--once"), ("import", "LOG", "--run", "log")]
)
def test_command_that_runs_as_a_module_works_in_a_removed_folder(sample_store, tmp_path, arguments):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    store = shutil.copytree(sample_store, tmp_path / "history")
    given = [str(tmp_path / "log.jsonl") if each == "LOG" else each for each in arguments]
    command = [sys.executable, "-m", "rankscope", *given, "--store", store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert 0 == done.returncode, done.stderr
    assert done.stdout


@pytest.mark.usefixtures("removed_folder")
def test_relative_store_in_a_removed_folder_is_a_one_line_error(in_process):
    failed = in_process("runs", "--store", "history")

    assert (1, 1) == (failed.returncode, failed.stderr.count("\n"))
    assert failed.stderr.startswith("rankscope: the working directory was removed or cannot be read: ")


def test_unreadable_working_directory_is_a_one_line_error(in_process, monkeypatch):
    def refused(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "cwd", classmethod(refused))
    failed = in_process("runs", "--store", "history")

    assert (1, 1) == (failed.returncode, failed.stderr.count("\n"))


@pytest.mark.parametrize("name", sorted(subcommands()))
def test_every_command_has_a_help_text_with_all_sections_in_brackets(rankscope, name):
    text = inspect.getdoc(subcommands()[name]) or ""
    sections = re.findall(r"\[(?!/?bold\])[^\]]+\]", text)
    done = rankscope(*name.split(), "--help", env={"COLUMNS": "200"})

    assert 0 == done.returncode
    assert "Usage: rankscope" in done.stdout
    assert text.strip()
    assert [] == [section for section in sections if section not in done.stdout]
    assert name != "notify" or ["[notify]"] == sections


def test_runs_merge_and_rm_move_and_delete_rows(rankscope, sample_store, tmp_path):
    copy = str(tmp_path / "copy")
    shutil.copytree(sample_store, copy)
    joined = rankscope("runs", "merge", "../other run", "my-run", "--store", copy)
    unsure = rankscope("runs", "rm", "my-run", "--store", copy, input="n\n")
    removed = rankscope("runs", "rm", "my-run", "--store", copy, "--yes")

    assert [0, 1, 0] == [done.returncode for done in (joined, unsure, removed)], removed.stderr
    assert "1 rows in 1 files\n" == joined.stdout
    assert " rows in 4 files; " in removed.stdout
    with connect(copy) as connection:
        assert [] == connection.sql("SELECT run FROM scalars UNION SELECT run FROM runs").fetchall()


def test_version_and_short_help_are_options(rankscope):
    version, top, command = rankscope("--version"), rankscope("-h"), rankscope("runs", "-h")

    assert re.fullmatch(r"rankscope \d+\.\d+\.\d+\n", version.stdout)
    assert "Usage: rankscope" in top.stdout
    assert "--install-completion" in top.stdout
    assert "Usage: rankscope runs" in command.stdout
