"""A training without a service: its records are in a local folder, which commands read and import."""

import json
import subprocess
import time

import pytest
from tests.exporter.conftest import wait_until
from tests.programs import run_command, run_program, start_script
from tests.view.test_site import read

from rankscope_contract.rules.curve import RANK_RULES
from rankscope_contract.wire.spool import folders
from rankscope_storage.connection import connect
from rankscope_view.data.events import event_lines
from rankscope_view.data.incidents import incidents, sentence_of
from rankscope_view.site import Site

STEPS = 12

TRAINING = """
import sys, time, torch
from torch import nn
from rankscope_exporter import Monitor

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
with Monitor(SETTINGS).attach(model, optimizer) as monitor:
    for step in range(1, 13):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.log(loss=float(step), tokens=4)
    AFTER
"""

Answer = subprocess.CompletedProcess[str]


def program(after="pass", **settings):
    return TRAINING.replace("SETTINGS", repr({"run": "alone", **settings})).replace("AFTER", after)


def trained(folder, after="pass", *, spool_dir="", service_url="", **settings):
    """Return the result of a training in `folder`. Without `spool_dir`, the records are in the default folder."""
    environment = {"RANKSCOPE_SPOOL_DIR": spool_dir, "RANKSCOPE_INGEST_URL": service_url}
    return run_program(program(after, **settings), folder=folder, **environment)


def command(*arguments):
    done = run_command(*arguments, COLUMNS="160")
    assert 0 == done.returncode, done.stderr
    return done


def rows(store, query):
    return json.loads(command("sql", query, "--store", store, "--format", "json").stdout)


def content(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


RATES = """select name, count(*) as rows from scalars
where name in ('step_seconds', 'tokens_per_second') group by name order by name"""
"""No wait for data follows the last step, so that its duration would be too short."""
LOSSES = "select step, value from scalars where name = 'loss' order by step"


def test_training_without_service_is_read_from_its_folder_and_imported(tmp_path):
    """The end of training names the folder and the command; the folder is not changed by them."""
    done = trained(tmp_path, throughput={"method": "off"})  # without a note about a missing formula
    records, store = tmp_path / "rankscope-records", tmp_path / "history"
    before = content(records)
    expected = [{"step": step, "value": float(step)} for step in range(1, STEPS + 1)]

    assert 0 == done.returncode, done.stderr
    assert f"no service (RANKSCOPE_INGEST_URL): records are written to {records}" in done.stderr
    assert f"rankscope import {records} --store history" in done.stderr
    assert "alone, completed" in command("summary", "--store", records).stdout
    assert rows(records, LOSSES) == expected
    assert rows(records, RATES) == [
        {"name": "step_seconds", "rows": STEPS - 1},
        {"name": "tokens_per_second", "rows": STEPS - 1},
    ]

    first = command("import", records, "--store", store)
    again = command("import", records, "--store", store)

    assert rows(store, LOSSES) == expected
    assert first.stdout.startswith(f"{records}: 1 process, {STEPS + 1} records; ")
    assert "; 0 new rows in alone" in again.stdout
    assert content(records) == before


def test_failure_is_resolved_if_a_later_launch_of_the_folder_completes(tmp_path):
    failed = trained(tmp_path, "model(torch.ones(4, 8)); raise ValueError('disk full')")
    assert (1, 0) == (failed.returncode, trained(tmp_path).returncode)

    records = tmp_path / "rankscope-records"
    found = rows(records, "select attempt, state from attempts order by attempt")
    listed, incidents = (command(name, "--store", records).stdout.splitlines() for name in ("runs", "incidents"))

    assert [{"attempt": 0, "state": "failed"}, {"attempt": 1, "state": "completed"}] == found
    assert ["completed"] == [line.split("  ")[1].strip() for line in listed[1:]]
    assert "resolved" == incidents[2].split()[1]


def test_killed_training_leaves_its_published_records(tmp_path):
    records, script = tmp_path / "rankscope-records", tmp_path / "killed.py"
    # The compiled kernel would let step 10 wait, so that the last steps are made faster than records are written.
    script.write_text(program("monitor.current(); print('ready', flush=True); time.sleep(600)", statistics="torch"))
    training = start_script(script, log=tmp_path / "log", RANKSCOPE_SPOOL_DIR=str(records), RANKSCOPE_INGEST_URL="")
    try:
        wait_until(lambda: "ready\n" in (tmp_path / "log").read_text())
        wait_until(lambda: STEPS - 1 <= len(rows(records, LOSSES)))
    finally:
        training.kill()
        training.wait(60.0)

    steps = [row["step"] for row in rows(records, LOSSES)]
    assert list(range(1, len(steps) + 1)) == steps
    assert STEPS - 1 <= len(steps)


def test_switch_turns_files_off_and_replaced_default_rules_are_named(tmp_path):
    done = trained(tmp_path, spool_dir="off", rules=[{"rule_name": "AnomalyNan"}])

    assert 0 == done.returncode, done.stderr
    assert [] == list(tmp_path.iterdir())
    assert "no file has the records" in done.stderr
    names = ", ".join(sorted(rule.name for rule in RANK_RULES if rule.name != "AnomalyNan"))
    assert f'rules replaces the default rules {names}: add "default"' in done.stderr


def test_folder_that_cannot_be_created_is_reported_and_training_continues(tmp_path):
    (tmp_path / "file").touch()
    done = trained(tmp_path, spool_dir=str(tmp_path / "file" / "records"))

    assert 0 == done.returncode, done.stderr
    assert str(tmp_path / "file") in done.stderr
    assert "records are lost with this process: they are in no file" in done.stderr


def test_running_training_can_be_read_but_is_not_imported(tmp_path):
    records, store, log = tmp_path / "rankscope-records", tmp_path / "history", tmp_path / "log"
    script = tmp_path / "waiting.py"
    script.write_text(program("monitor.current(); print('ready', flush=True); time.sleep(600)"))
    training = start_script(script, log=log, RANKSCOPE_SPOOL_DIR=str(records), RANKSCOPE_INGEST_URL="")
    try:
        wait_until(lambda: "ready\n" in log.read_text())
        read = command("sql", LOSSES, "--store", records)
        events = command("events", "--store", records)
        runs = command("runs", "--store", records)
        imported = command("import", records, "--store", store)
    finally:
        training.kill()
        training.wait(60.0)

    assert "1 process still running; the records are read up to now" in read.stderr
    assert f"{STEPS - 1} rows" in read.stdout or f"{STEPS} rows" in read.stdout
    assert "failed" not in events.stdout + runs.stdout
    assert "stopped responding" not in events.stdout + runs.stdout
    assert "running" == runs.stdout.splitlines()[1].split()[1]
    assert "not imported; import the folder again after they have ended" in imported.stderr
    assert "0 new rows in no run" in imported.stdout
    assert "1 process, " in command("import", records, "--store", store).stdout
    assert STEPS - 1 <= len(rows(store, LOSSES))


@pytest.mark.parametrize(
    ("within", "error"), [(".sum().backward()", "ValueError: disk full"), ("", "KeyboardInterrupt: asked")]
)
def test_step_that_was_not_completed_is_the_last_one_nowhere(tmp_path, within, error):
    """The exception is raised within step 13. The progress, the list and SQL have step 12."""
    name, _, text = error.partition(": ")
    raising = f"model(torch.ones(4, 8)){within}; raise {name}('{text}')"
    done = run_program(
        program(raising).replace(").attach(", ", total_steps=20).attach("),
        folder=tmp_path, RANKSCOPE_SPOOL_DIR="", RANKSCOPE_INGEST_URL="",
    )  # fmt: skip
    store = tmp_path / "history"
    command("import", tmp_path / "rankscope-records", "--store", store)
    listed, summary = command("runs", "--store", store).stdout, command("summary", "alone", "--store", store).stdout
    page = read(Site(store), "runs", "alone").text

    assert done.returncode
    assert name != "ValueError" or f"rankscope: rank 0: {error}; the last completed step is 12\n" in done.stderr
    assert [{"last_step": 12, "loss": 12}] == rows(
        store, "select last_step, (select max(step) from scalars where name = 'loss') as loss from runs"
    )
    assert " 12/20 " in listed
    assert "  step: 12 / 20, 60 %" in summary.splitlines()
    assert "12 of 20 steps" in page
    assert name != "ValueError" or f"{error} at step 13" in page


def test_unreadable_spool_is_named_and_the_others_are_read(tmp_path):
    for _ in range(2):
        assert 0 == trained(tmp_path).returncode
    records = tmp_path / "rankscope-records"
    first, _ = folders(records)
    (first / "identity.json").write_text("{", encoding="utf-8")
    done = command("import", records, "--store", tmp_path / "history")

    assert f"not read: {first}" in done.stderr
    assert done.stdout.startswith(f"{records}: 1 process, ")


def test_next_training_with_a_service_delivers_the_earlier_records(tmp_path, service):
    """The folder is removed when the store has all its records."""
    assert 0 == trained(tmp_path).returncode
    service.start()
    done = trained(tmp_path, "time.sleep(4)", service_url=service.url)
    assert 0 == service.stop()

    assert 0 == done.returncode, done.stderr
    assert f"registered with service {service.url}" in done.stderr
    assert [{"attempt": 0, "rows": STEPS}, {"attempt": 1, "rows": STEPS}] == rows(
        service.store, "select attempt, count(*) as rows from scalars where name = 'loss' group by all order by all"
    )
    assert not (tmp_path / "rankscope-records").exists()


def test_unreachable_service_is_reported_and_the_records_are_kept(tmp_path, free_port):
    url = f"http://127.0.0.1:{free_port}"
    done = trained(tmp_path, service_url=url, exit_wait_seconds=1)

    assert 0 == done.returncode, done.stderr
    assert f"registering with service {url}" in done.stderr
    assert f"the service cannot be reached ({url}" in done.stderr
    assert "registered with" not in done.stderr
    assert f"{url} did not commit " in done.stderr
    assert f"rankscope import {tmp_path / 'rankscope-records'}" in done.stderr
    assert STEPS == len(rows(tmp_path / "rankscope-records", LOSSES))


def test_rule_for_one_scalar_is_one_line_next_to_the_default_rules(tmp_path):
    """The end of training also prints where the time went."""
    rule = {"rule_name": "CurveRule", "args": {"name": "High", "names": ["loss"], "ratio": 1.2, "fewest": 3}}
    rule["args"] |= {"deviations": 0.0, "in_a_row": 3}
    records = tmp_path / "records"
    done = trained(tmp_path, spool_dir=str(records), rules=["default", rule])
    (anomaly,) = [line for line in command("anomalies", "--store", records).stdout.splitlines() if "High" in line]
    (spent,) = [text for text in done.stderr.splitlines() if "step time of rank 0: " in text]
    found = json.loads(command("summary", "--store", records, "--format", "json").stdout)

    assert "replaces" not in done.stderr
    assert "step 6, rank 0: High: loss is 6, a median before it is 3" in done.stderr
    assert "6 0 High null null loss 6 3 1.2 1" == " ".join(anomaly.split())
    assert found["speed"]["time_spent"] == spent.partition("step time of rank 0: ")[2]
    assert {"forward", "backward", "optimizer", "data"} <= set(spent.replace(",", "").split())


def test_incidents_of_an_ended_run_have_the_times_of_its_records(tmp_path):
    """A spike at step 30 is over at the end; NaN from step 40 remains, and is the sentence of the run."""
    begin = program("")
    faulty = begin.replace("range(1, 13)", "range(1, 61)").replace(
        "loss.backward()", "(loss * (1 if step < 40 else float('nan'))).backward()"
    )
    faulty = faulty.replace("float(step)", "9.0 if step == 30 else 2.0 + step % 3 / 100")
    assert 0 == run_program(faulty, folder=tmp_path, RANKSCOPE_SPOOL_DIR="", RANKSCOPE_INGEST_URL="").returncode
    ended_at = time.time()
    done = command("import", tmp_path / "rankscope-records", "--store", tmp_path / "history")
    assert "LossSpike" not in done.stderr
    with connect(tmp_path / "history") as connection:
        nan, spike = incidents(connection, ["alone"])["alone"]
        lines = event_lines(connection, "alone")
        (row,) = connection.query("SELECT count(*) AS n FROM events WHERE type = 'anomaly' AND step >= 40").to_pylist()
    page = read(Site(tmp_path / "history"), "runs", "alone", "incidents", nan.key).text
    command("report", "alone", "--store", tmp_path / "history", "--output", tmp_path / "report.html")

    assert f"First of {row['n']} anomalies in steps 40 to 60." in page
    assert "incident opened, no message was sent" in page
    assert f" {row['n']} anomalies" in (tmp_path / "report.html").read_text()
    assert (30, "warning", False, "Rank 0: loss 9, 4.5 times its median at step 30") == (
        *(spike.step, spike.severity, spike.is_open),
        sentence_of(spike),
    )
    assert (40, 60, "critical", True) == (nan.step, nan.last_step, nan.severity, nan.is_open)
    assert ["muted", "muted", "resolved"] == [state for one in (nan, spike) for _, state in one.states]
    times = [at for one in (nan, spike) for at, _ in one.states] + [line.at for line in lines]
    assert [] == [at for at in times if at is None or at > ended_at]
