"""Commands and the service with a store in a bucket."""

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Service
from tests.programs import run_command


@pytest.fixture
def command(bucket: str, tmp_path: Path):
    """Return a function that runs a command with the store in the bucket, and returns its output."""
    store = f"s3://{bucket}/history"

    def run(*arguments: str, code: int = 0) -> str:
        done = run_command(*arguments, folder=tmp_path, RANKSCOPE_STORE=store, COLUMNS="120")
        assert code == done.returncode, done.stderr
        return done.stdout + done.stderr

    return run


def test_commands_read_and_write_a_store_in_a_bucket(command, bucket, s3_server, tmp_path):
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in range(1, 4)))
    command("import", "log.jsonl", "--run", "a")
    command("runs", "rename", "a", "b")

    assert "\nb " in command("runs")
    assert "\n3\n" in command("sql", "SELECT count(*) AS rows FROM scalars", "--format", "csv")
    assert "no damage" in command("store", "check", "--deep")
    assert "4 files, " in command("store", "copy", f"s3://{bucket}/history", f"s3://{bucket}/copy")
    assert "\nb " in command("runs", "--store", f"s3://{bucket}/copy")
    assert "only copy has places" in command("store", "copy", "history", code=2)
    for arguments in (["runs"], ["summary", "b"], ["incidents"], ["store", "check"]):
        refused = command(*arguments, "--store", "s3://missing-bucket/history", code=1)
        assert "does not exist: create it" in refused.splitlines()[0]
    assert "needs a local store" in command("sql", "--emit-views", code=2)
    assert ["log.jsonl"] == [path.name for path in tmp_path.iterdir()]
    assert {"copy", "history"} == {key.partition("/")[0] for key in s3_server.objects(bucket)}


def test_service_shows_and_keeps_a_store_in_a_bucket(command, bucket, tmp_path, free_port):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    command("import", "log.jsonl", "--run", "a")
    program = tmp_path / "program.py"
    program.write_text("from rankscope.__main__ import main\n\nmain()\n")
    service = Service(tmp_path, free_port, program=program, place=f"s3://{bucket}/history")
    service.start()
    try:
        assert "2.5" in service.get("/runs/a")
        command("import", "log.jsonl", "--run", "b", "--shard", "1/2")
        service.wait_for(lambda: "2.5" in service.get("/runs/b"))
    finally:
        assert 0 == service.stop()
