"""`rankscope dashboards provision` writes the tree with the given addresses, and prints what to do next."""

import pytest
import typer
import yaml
from typer.testing import CliRunner

from rankscope.commands.dashboards import provision
from rankscope.shell.errors import USAGE, CommandError


def run(*arguments):
    """Run the command, and return its output. An error is raised as the exception that `rankscope` prints."""
    app = typer.Typer()
    app.command()(provision)
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert 0 == result.exit_code, result.output
    return result.output


def test_provision_writes_addresses_and_the_real_path_of_the_boards(tmp_path):
    folder = tmp_path / "stack"
    output = run("--into", folder, "--prometheus-url", "http://p.example:9090", "--runbooks-url", "https://w.example/r")
    (provider,) = yaml.safe_load((folder / "dashboards/rankscope.yaml").read_text())["providers"]
    boards = [path.suffix for path in (folder / "dashboards/rankscope").iterdir()]

    assert str(folder / "dashboards/rankscope") == provider["options"]["path"]
    assert boards
    assert {".json"} == set(boards)
    assert "http://p.example:9090" in (folder / "datasources/rankscope.yaml").read_text()
    assert "https://w.example/r#servicedown" in (folder / "alerting/rules.yaml").read_text()
    assert f"docker compose -f {folder}/compose.yaml up --build -d" in output
    assert all(str(folder) in line or "/" not in line for line in output.splitlines())
    assert "Written by `rankscope dashboards provision`" in (folder / "compose.yaml").read_text()


def test_provision_refuses_a_folder_of_the_user(tmp_path):
    (tmp_path / "mine").write_text("mine")

    with pytest.raises(CommandError, match="is not empty"):
        run("--into", tmp_path)
    run("--into", tmp_path, "--force")
    assert "mine" == (tmp_path / "mine").read_text()


def test_provision_rejects_an_address_without_a_scheme(tmp_path):
    with pytest.raises(CommandError, match="write an address such as https://host:9090") as error:
        run("--into", tmp_path / "stack", "--prometheus-url", "p.example:9090")

    assert USAGE == error.value.code
    assert not (tmp_path / "stack").exists()
