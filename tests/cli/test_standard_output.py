"""`-` as the output of a command is standard output. A command whose output is a folder refuses it."""

import pytest
import typer

from rankscope.commands import build

FILES = {
    "anomalies": (["my-run"], "step"),
    "compare": (["my-run", "../other run"], "\N{REPLACEMENT CHARACTER}PNG"),
    "export": (["my-run", "--format", "sqlite"], "SQLite format 3"),
    "incidents": (["my-run"], "n   state"),
    "plot": (["my-run"], "\N{REPLACEMENT CHARACTER}PNG"),
    "report": (["my-run"], "<!DOCTYPE html>"),
    "runs": (["list"], "run"),
    "sql": (["select 1 as one", "--format", "parquet"], "PAR1"),
    "store": (["stats", "--format", "csv"], "dataset"),
}
"""The arguments of each command that writes a file, and the first bytes of the file."""

FOLDERS = {"dashboards provision --into", "msprobe anomaly --out-path"}
FOLDERS |= {"msprobe csv2tensorboard --output-dirpath", "msprobe csv2db --output-dirpath"}


def options():
    """Yield the path of each command, with the longest spelling of each option that names an output."""
    pending = [("", typer.main.get_command(build()))]
    while pending:
        path, command = pending.pop()
        pending += [(f"{path} {name}".strip(), each) for name, each in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            if (parameter.name or "").startswith(("output", "out_", "into")):
                yield path, max(parameter.opts, key=len)


def test_each_command_with_an_output_is_in_one_of_the_lists():
    outputs = {(command, option) for command, option in options() if option != "--outputs"}

    files = {*FILES, "dashboards preview"}  # the preview needs a Prometheus, which tests/cli/test_preview.py has

    assert {(command, "--output") for command in files} == {each for each in outputs if each[1] == "--output"}
    assert {" ".join(each) for each in outputs if each[1] != "--output"} == FOLDERS


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "compare")) for name in sorted(FILES)]
)
def test_output_of_a_command_is_standard_output(rankscope, tmp_path, command):
    arguments, head = FILES[command]
    done = rankscope(command, *arguments, "--output", "-", cwd=tmp_path)

    assert 0 == done.returncode, done.stderr
    assert head == done.stdout[: len(head)]
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("option", sorted([*FOLDERS, "export --output", "import --store"]))
def test_a_folder_is_not_standard_output(rankscope, tmp_path, option):
    *command, name = option.split()
    needed = {"import": ["log.jsonl"], "msprobe": ["--monitor-path", "."], "export": ["--format", "csv"]}
    given = ["--data-path", "."] if command[-1] == "anomaly" else needed.get(command[0], [])
    done = rankscope(*command, *given, name, "-", cwd=tmp_path)

    assert 2 == done.returncode, done.stderr
    assert "folder" in done.stderr
    assert [] == list(tmp_path.iterdir())
