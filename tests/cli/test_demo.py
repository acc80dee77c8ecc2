"""The parts of the demo: alert receiver, child processes, progress display, and the final checks."""

import io
import json
import math
import urllib.request
from dataclasses import replace

import pytest
from rich.console import Console

from rankscope.commands.demo import _collect
from rankscope.demo.checks import KINDS_OF_EVERY_STEP, KINDS_OF_OPTIMIZER_STEPS, ExpectedRun, Fault, checks
from rankscope.demo.receiver import Alert, AlertReceiver, Sender, parse_alert
from rankscope.demo.report import show_page
from rankscope.output.progress import ProgressView, progress_parts
from rankscope.shell.errors import CommandError
from rankscope_ingest.live.progress import RunProgress

RUN = RunProgress(
    run="my-run", attempt=0, state="running", reason=None, step=60, planned_steps=200, loss=2.5, ranks_alive=2,
    world_size=2, tokens_per_second=2048.4, rows_stored=12345, lag_records=3, records_lost=0, eta_seconds=75.0,
)  # fmt: skip
FAULT = Fault(step=2, rank=1, tensor="w", rule="AnomalyNan", skips_step=True)
EXPECTED = ExpectedRun(run="demo", ranks=2, steps=3, tensors=4, faults=(FAULT,))
ALERT = Alert(0.0, "[critical] demo: AnomalyNan", "run: demo\nrank: 1\nstep: 2\ntensor: w\n")
LABELS = {"run": "demo", "rule": "AnomalyNan", "rank": "1"}
BOTH_SENDERS = replace(EXPECTED, senders=tuple(Sender))


def stored(**changes):
    """Return a fake query function with the results of a perfect run, changed by `changes`."""
    rows = {kind: EXPECTED.rows_of(kind) for kind in (*KINDS_OF_EVERY_STEP, *KINDS_OF_OPTIMIZER_STEPS)}
    rows["grad_clipped"] = 2 * EXPECTED.tensors
    answers = {
        "group by kind": list((rows | changes.get("rows", {})).items()),
        "having": [(changes.get("doubled", 0),)],
        "'grad_norm'": [(changes.get("clipped", 2),)],
        "'loss'": changes.get("losses", [(0, 3, 1, 3), (1, 3, 1, 3)]),
        "from runs": changes.get("states", [("demo", "completed")]),
    }
    return lambda statement: next(answer for part, answer in answers.items() if part in statement)


def failed(alerts, expected=EXPECTED, **changes):
    return [check.text for check in checks(expected, stored(**changes), alerts) if not check.holds]


@pytest.mark.parametrize(
    ("changes", "alerts"),
    [
        *(({"rows": {"grad_reduced": 23}}, [ALERT]), ({"rows": {"exp_avg": 17}}, [ALERT])),
        *(({"rows": {"surprise": 1}}, [ALERT]), ({"clipped": 3}, [ALERT]), ({"doubled": 1}, [ALERT])),
        *(({"losses": [(0, 3, 1, 3), (1, 2, 1, 3)]}, [ALERT]), ({"states": [("demo", "failed")]}, [ALERT]), ({}, [])),
        *(({}, [ALERT, ALERT]), ({}, [replace(ALERT, text=ALERT.text.replace("rank: 1", "rank: 0"))])),
        ({}, [replace(ALERT, text=ALERT.text.replace("step: 2", "step: 20"))]),
    ],
)
def test_missing_or_unexpected_data_fails_a_check(changes, alerts):
    """A skipped step has rows of gradients only."""
    assert (2 * 3 * 4, 2 * 2 * 4) == (EXPECTED.rows_of("grad_reduced"), EXPECTED.rows_of("exp_avg"))
    assert [] == failed([ALERT])
    assert failed(alerts, **changes)


def webhook(*labels, at=5.0, status="firing"):
    alerts = [{"labels": given, "annotations": {"summary": f"rank {given['rank']}"}} for given in labels]
    group = {"run": "demo", "rule": "AnomalyNan"}
    return parse_alert({"version": "4", "status": status, "groupLabels": group, "alerts": alerts}, at)


def test_parse_alert_distinguishes_alertmanager_from_the_service():
    alert = webhook(LABELS, LABELS | {"rank": "0"}, status="resolved")

    assert Sender.ALERTMANAGER is alert.sender
    assert Sender.EMBEDDED is parse_alert({"title": "bad", "message": "worse"}, 0.0).sender
    assert "[resolved] AnomalyNan in run demo: 2 alerts" == alert.title
    assert ["      rank 0", "      rank 1"] == list(alert.lines())[1:]
    assert "by Alertmanager: " in next(alert.lines())


def test_both_senders_must_report_each_fault_and_nothing_else():
    second_rank = webhook(LABELS, LABELS | {"rank": "0"})  # the all-reduce propagates the fault to the other rank
    stranger = webhook(LABELS, {"run": "demo", "alertname": "RanksMissing", "rank": ""})

    nothing_else = "Alertmanager reports nothing else: [('demo', 'RanksMissing', '')]"

    assert [] == failed([ALERT, second_rank], BOTH_SENDERS)
    assert ["Alertmanager reports AnomalyNan on rank 1"] == failed([ALERT], BOTH_SENDERS)
    assert [nothing_else] == failed([ALERT, stranger], BOTH_SENDERS)
    assert 2 == len(failed([webhook(LABELS)], BOTH_SENDERS))  # the service's own message is missing


def test_receiver_accepts_messages_of_the_apprise_json_notifier():
    with AlertReceiver() as receiver:
        address = receiver.notify_url.replace("json://", "http://")
        body = json.dumps({"version": "1.0", "title": "bad", "message": "rank: 1\nstep: 2", "type": "failure"}).encode()
        urllib.request.urlopen(urllib.request.Request(address, data=body), timeout=5).close()
        (alert,) = receiver.new_alerts()

        assert ["bad"] == [alert.title for alert in receiver.alerts]
        assert [] == list(receiver.new_alerts())
    assert ["      rank: 1", "      step: 2"] == list(alert.lines())[1:]


COUNTS = ["12,345 rows stored", "lag 3", "2/2 ranks"]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ["step 60/200", "loss 2.5000", "2,048 tokens/s", *COUNTS, "1:15 left"]),
        (
            {"step": None, "loss": None, "tokens_per_second": None, "eta_seconds": None, "records_lost": 7},
            [*COUNTS, "7 records LOST"],
        ),
        (
            {"state": "completed", "ranks_alive": 0, "loss": math.nan},
            ["step 60/200", "loss NaN", "2,048 tokens/s", "12,345 rows stored", "0/2 ranks"],
        ),
    ],
)
def test_progress_has_the_known_values_and_a_lag_while_the_run_lasts(changes, parts):
    assert parts == list(progress_parts(replace(RUN, **changes)))


def test_plain_view_limits_the_rate_of_lines_per_run():
    moved, ended = replace(RUN, step=70), replace(RUN, step=200, state="completed")
    text = io.StringIO()
    with ProgressView(Console(file=text, width=40), every_seconds=5.0) as view:
        for run, now in ((RUN, 0.0), (moved, 1.0), (RUN, 6.0), (moved, 7.0), (ended, 8.0), (ended, 99.0)):
            view.show([run], now)

    assert ["my-run running  step 60", "my-run running  step 70", "my-run completed  step 200"] == [
        line.partition("/")[0] for line in text.getvalue().splitlines()
    ]


def test_bar_view_draws_a_bar_and_prints_lines_above_it_with_masked_names():
    text = io.StringIO()
    with ProgressView(Console(file=text, force_terminal=True, width=160)) as view:
        view.show([RUN, replace(RUN, run="a\x1b[2J\nb")], 0.0)
        view.print_line("ALERT [not markup]")

    assert all(part in text.getvalue() for part in ("ALERT [not markup]", "step 60/200", r"a\x1b[2J\nb"))
    assert "\x1b[2J" not in text.getvalue()


def test_demo_never_deletes_a_folder_that_it_did_not_create(in_process, tmp_path):
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    done = in_process("demo", "--folder", tmp_path)

    assert 2 == done.returncode
    assert "name another folder with --folder" in done.stderr
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("environment", "platform", "is_terminal", "opened"),
    [
        *(({"DISPLAY": ":0"}, "linux", True, 1), ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True, 1)),
        *(({}, "darwin", True, 1), ({}, "linux", True, 0)),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, "linux", True, 0),
        *(({"DISPLAY": ":0", "CI": "true"}, "linux", True, 0), ({"DISPLAY": ":0"}, "linux", False, 0)),
    ],
)
def test_demo_prints_the_address_of_its_page_and_opens_it(tmp_path, environment, platform, is_terminal, opened):
    text, calls = io.StringIO(), []
    console = Console(file=text, force_terminal=is_terminal, width=40, color_system=None)
    page = tmp_path / "report.html"
    show_page(
        console, page, tmp_path / "history", environment=environment, platform=platform, open_browser=calls.append
    )

    assert opened * [page.as_uri()] == calls
    assert [
        f"Page of the run:  {page.as_uri()}",
        f"All pages:        rankscope view {tmp_path / 'history'}",
    ] == text.getvalue().splitlines()


def test_service_that_exits_during_the_demo_is_an_error(tmp_path):
    programs = f"$(cat {tmp_path}/live/config/supervisord.pid)"
    kill = ["sh", "-c", f"kill -9 $(pgrep -P {programs} -f service.toml) && sleep 3"]
    with AlertReceiver() as receiver, pytest.raises(CommandError, match=r"^service exited \(terminated by SIGKILL"):
        _collect(Console(), tmp_path, receiver, (), kill)
