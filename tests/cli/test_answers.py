"""Answers of the commands to a person: an unknown name, a figure without data, wide rows, a damaged file, a log."""

import fcntl
import html
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import urllib.error
import urllib.request

import pytest
import typer
from tests.programs import run_command
from tests.view.served import served

from rankscope.commands import build
from rankscope_view.site import Site

RUN_OF = {name: ["gone"] for name in ("anomalies", "events", "export", "plot", "report", "summary")}
RUN_OF |= {"compare": ["gone", "my-run", "--no-figure"], "diff": ["gone", "my-run"], "runs": ["show", "gone"]}
OF_STORES = {**RUN_OF, "sql": ["select 1"], "store": ["check"], "view": []}


@pytest.mark.usual(5)
@pytest.mark.parametrize("command", sorted(OF_STORES))
def test_unknown_run_and_unknown_store_have_the_exit_code_of_wrong_usage(in_process, sample_store, tmp_path, command):
    for path, message in ((sample_store, "run 'gone' not found"), (tmp_path / "nowhere", "is not a Rankscope store")):
        if command in RUN_OF or path != sample_store:
            done = in_process(command, *OF_STORES[command], "--store", path)

            assert (2, 1) == (done.returncode, done.stderr.count("\n")), done.stderr
            assert message in done.stderr


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    for number in range(12):
        (folder / f"log{number}.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    done = run_command("import", folder, "--store", folder / "history")
    assert 0 == done.returncode, done.stderr
    return folder / "history"


def test_unknown_run_lists_some_runs_and_the_number_of_the_others(in_process, many_runs):
    done = in_process("summary", "xyz", "--store", many_runs)

    assert "log6, log7, and 2 more: see rankscope runs." in done.stderr


@pytest.mark.parametrize(
    ("kind", "reason"), [("ranks", "no step times"), ("updates", "no norms of updates"), ("tensors", "no statistics")]
)
def test_figure_without_data_is_not_written(in_process, logs, tmp_path, kind, reason):
    done = in_process("plot", logs / "metrics.jsonl", "--kind", kind, "--output", tmp_path / "figure.png")

    assert (1, "") == (done.returncode, done.stdout)
    assert f"there is no data for this figure, and no file is written: {reason}" in done.stderr
    assert [] == list(tmp_path.iterdir())


def on_a_terminal(*arguments, columns):
    """Return the lines that `rankscope ARGUMENTS` prints on a terminal of this width."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "rankscope", *map(str, arguments)]
    with subprocess.Popen(command, stdout=other, env=environment):
        os.close(other)
        text = b""
        while True:
            try:
                text += os.read(main, 1 << 16)
            except OSError:  # the other end is closed
                break
    os.close(main)
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()


def test_rows_wider_than_a_terminal_have_a_line_for_each_column(sample_store):
    wide = on_a_terminal("sql", "select * from runs order by run", "--store", sample_store, columns=100)
    narrow = on_a_terminal("sql", "select run, state from runs order by run", "--store", sample_store, columns=100)

    assert "planned_steps  30" in wide
    assert "run            my-run" in wide
    assert 2 == sum(line.startswith("row ") for line in wide)
    assert ["run", "state"] == narrow[0].split()
    assert ["my-run", "completed"] in [line.split() for line in narrow]


def test_anomalies_with_one_cause_are_one_line_with_steps_and_number(in_process, tmp_path):
    losses = [0.5] * 20 + ["NaN"] * 39 + [0.5] * 30 + ["NaN"]
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    done = in_process("anomalies", tmp_path / "train.jsonl", "--top", "1")
    every = in_process("anomalies", tmp_path / "train.jsonl")
    rows = json.loads(in_process("anomalies", tmp_path / "train.jsonl", "--format", "json", "--top", "50").stdout)

    assert (0, "") == (done.returncode, done.stderr)
    assert re.fullmatch(r"21-59 .* 39", done.stdout.splitlines()[2].strip())
    assert "1 of 2 lines, 40 anomalies in train; --top 2 shows all lines" == done.stdout.splitlines()[-1]
    assert ["21-59", "90"] == [line.split()[0] for line in every.stdout.splitlines()[2:4]]
    assert [*range(21, 60), 90] == [row["step"] for row in rows]


@pytest.fixture(scope="module")
def store_with_a_damaged_file(tmp_path_factory):
    """Return a store of the runs alpha, gamma and beta, and the file with the losses of beta, which is damaged."""
    folder = tmp_path_factory.mktemp("damaged")
    store, files = folder / "history", set()
    for run in ("alpha", "gamma", "beta"):
        (folder / f"{run}.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
        assert 0 == run_command("import", folder / f"{run}.jsonl", "--store", store).returncode
        (new,) = {*(store / "dataset=scalars").rglob("*.parquet")} - files
        files.add(new)
    os.truncate(new, 200)
    return store, f"rankscope: {new} is damaged: `rankscope store check` names the run and the steps of its rows\n"


@pytest.mark.parametrize("command", ["summary", pytest.param("events", marks=pytest.mark.thorough), "report"])
def test_damaged_file_blocks_only_its_run(in_process, store_with_a_damaged_file, tmp_path, command):
    store, message = store_with_a_damaged_file
    page = ("--output", tmp_path / "report.html") if command == "report" else ()
    other = in_process(command, "alpha", "--store", store, *page)
    own = in_process(command, "beta", "--store", store, *page)

    assert (0, "") == (other.returncode, other.stderr)
    assert (1, message) == (own.returncode, own.stderr)


def test_damaged_file_leaves_the_list_of_runs_complete(in_process, store_with_a_damaged_file):
    store, message = store_with_a_damaged_file
    done = in_process("runs", "--store", store)
    every_row = in_process("sql", "select sum(value) from scalars", "--store", store)

    assert [(1, message)] * 2 == [(one.returncode, one.stderr) for one in (done, every_row)]
    assert ["alpha", "beta", "gamma"] == sorted(line.split()[0] for line in done.stdout.splitlines()[1:])


def test_damaged_file_blocks_only_comparisons_with_its_run(in_process, store_with_a_damaged_file):
    store, message = store_with_a_damaged_file
    for command in (("compare", "--no-figure"), ("diff",)):
        others = in_process(*command, "alpha", "gamma", "--store", store)
        own = in_process(*command, "alpha", "beta", "--store", store)

        assert (0, "") == (others.returncode, others.stderr)
        assert "no difference" in others.stdout
        assert (False, message) == (own.returncode == 0, own.stderr)


def test_damaged_file_blocks_only_the_pages_of_its_run(store_with_a_damaged_file):
    store, message = store_with_a_damaged_file
    text = html.escape(message.removeprefix("rankscope: ").strip(), quote=False)

    def status(path):
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    with served(Site(store)) as url:
        code, page = status("/")
        assert 200 == code
        assert text in html.unescape(page)
        assert all(f'/runs/{run}"' in page for run in ("alpha", "beta", "gamma"))
        shown = {path: status(path) for path in ("/runs/alpha", "/runs/alpha/tensors", "/compare?a=alpha&b=gamma")}
        blocked = {path: status(path) for path in ("/runs/beta", "/compare?a=alpha&b=beta", "/data/curve?run=beta")}

    assert {200} == {code for code, _ in shown.values()}
    assert not any("damaged" in page for _, page in shown.values())
    assert {500} == {code for code, _ in blocked.values()}
    assert all(text in html.unescape(page) for _, page in blocked.values())


def test_damaged_list_of_runs_blocks_only_its_run(in_process, store_with_a_damaged_file, tmp_path):
    store = shutil.copytree(store_with_a_damaged_file[0], tmp_path / "history")
    newest = max((store / "dataset=runs").rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    os.truncate(newest, 200)
    alpha, beta = (in_process("summary", run, "--store", store) for run in ("alpha", "beta"))

    assert (0, "") == (alpha.returncode, alpha.stderr)
    assert f"rankscope: {newest} is damaged: `rankscope store check` names" in beta.stderr


def test_an_option_has_one_form_in_all_commands():
    """The options --store, --listen and --notify have the same spellings, variable and kind of value everywhere."""
    forms = {}
    for command in typer.main.get_command(build()).commands.values():
        for option in command.params:
            if option.name in {"store", "listen", "notify"} or option.opts == ["--notify"]:
                shown = (option.metavar, option.multiple, *option.opts)
                forms.setdefault(option.opts[0], set()).add(shown)

    assert {"--store", "--listen", "--notify"} == forms.keys()
    assert dict.fromkeys(forms, 1) == {name: len(found) for name, found in forms.items()}


def of_state(steps, step):
    """Return a trainer_state.json with one entry per line, as some tools write it."""
    entries = [json.dumps({"step": number, "loss": 5 / number}) for number in range(1, steps + 1)]
    facts = json.dumps({"epoch": step / 30, "global_step": step, "max_steps": 90, "num_train_epochs": 3})
    return facts[:-1] + ', "log_history": [\n' + ",\n".join(entries) + "\n]}"


def test_checkpoint_without_logged_entries_has_its_progress_and_no_data(in_process, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trainer_state.json").write_text(of_state(0, 15))
    done = in_process("summary", tmp_path / "run" / "trainer_state.json")

    assert (0, "") == (done.returncode, done.stderr)
    assert "  step: 15 / 90, 16.7 %" in done.stdout.splitlines()
    assert "  trend: no data" in done.stdout.splitlines()


def test_losses_without_a_step_are_on_the_axis_of_rows(in_process, tmp_path):
    rows = [
        [{"event": "train", "loss": 5 - n / 20}, {"event": "gpu", "step": 10 * n, "gpu_util": 50}] for n in range(30)
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(json.dumps(row) for pair in rows for row in pair))
    done = in_process("summary", tmp_path / "events.jsonl")

    assert "  logged losses: 30" in done.stdout.splitlines()
    assert "  highest: 5.000000" in done.stdout.splitlines()
