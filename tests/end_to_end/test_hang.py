"""A real job that hangs: notification with the place of each rank, `rankscope stacks`, and the end of the stall."""

import json
import re
from pathlib import Path

import pytest
from tests.programs import run_command

from rankscope.demo.receiver import AlertReceiver
from rankscope_storage.connection import connect

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).with_name("blamed_training.py")
TOKEN = "a-token-of-both"


def line_of(comment):
    return next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith(comment))


CAUSE = (
    r"rank 1: it never entered all_reduce \d+ \(4 B float32\) of default_pg, in which rank 0 waits \(flight records\); "
    rf"it is in time\.sleep, called at blamed_training\.py:{line_of('# rank 1 hangs here')} in fall_behind, "
    r"and rank 0 waits in a collective \(stacks\)"
)


def ask(service, *arguments, token=TOKEN):
    environment = {"RANKSCOPE_TOKEN": token} if token else {}
    return run_command("stacks", *arguments, "--service", service.url, **environment)


def assert_message_names_both_places(text, service):
    lines = text.splitlines()
    where = lines.index("where:")

    assert re.fullmatch(rf"cause: {CAUSE}", lines[where - 1]), text
    # First the collective, then the rank for which the other one waits.
    assert re.fullmatch(
        r"  rank 1 never entered all_reduce \d+ \(4 B float32\) of default_pg; rank 0 is in it since \d+ s,"
        rf" called at blamed_training\.py\[{line_of('# the others wait here')}\]",
        lines[where + 1],
    ), text
    assert re.fullmatch(
        rf"  rank 1 in time\.sleep, called at blamed_training\.py:{line_of('# rank 1 hangs here')} in fall_behind;"
        r" its last collective was all_reduce \d+",
        lines[where + 2],
    ), text
    assert re.fullmatch(
        r"  rank 0 in all_reduce seq \d+ \(gloo, default_pg, Float scalar\),"
        rf" called at blamed_training\.py:{line_of('# the others wait here')} in main",
        lines[where + 3],
    ), text
    assert f"details: rankscope stacks hangs --service {service.url}" in lines


def test_hang_notification_has_the_place_of_each_rank_and_is_resolved(service, start_ranks, tmp_path):
    """The watchdogs of the ranks are off: the service detects the stall and requests stacks with its token."""
    service.token, service.stalled_after_seconds = TOKEN, 2.0
    with AlertReceiver() as receiver:
        service.urls = (receiver.notify_url,)
        service.start()
        training = start_ranks(SCRIPT, tmp_path, run="hangs", RANKSCOPE_TOKEN=TOKEN, RANKSCOPE_HANG_AFTER_SECONDS="0")
        service.wait_for(lambda: receiver.alerts)
        alert = receiver.alerts[0]
        asked = ask(service, "hangs")
        only_one = ask(service, "--rank", "1", "--json")
        refused = [ask(service, "hangs", token=token) for token in (None, "wrong")]
        (tmp_path / "go-on").touch()

        assert [0, 0] == [rank.wait(60) for rank in training], (tmp_path / "training.log").read_text()
        service.wait_for(lambda: len(receiver.alerts) > 1)
        titles = [alert.title for alert in receiver.alerts]
    assert 0 == service.stop(), service.log()

    assert [
        "[critical] hangs: RunStalled, rank 1, step 5",
        "[resolved] hangs: RunStalled, training continues",
    ] == titles
    assert_message_names_both_places(alert.text, service)
    assert (0, "") == (asked.returncode, asked.stderr)
    assert_printed_groups(asked.stdout)
    assert [1] == [rank["rank"] for rank in json.loads(only_one.stdout)["ranks"]]
    assert [1, 1] == [done.returncode for done in refused]
    assert all("RANKSCOPE_TOKEN is" in done.stderr and 1 == done.stderr.count("\n") for done in refused)
    with connect(service.store) as connection:
        events = connection.sql(
            "select distinct type, rank, step, details->>'reason' from events"
            " where type in ('stacks', 'flight_record') order by all"
        ).fetchall()
        incidents = connection.sql(
            "select distinct details->>'state' from events where type = 'incident' order by all"
        ).fetchall()
    assert [(kind, rank, 5, "request") for kind in ("flight_record", "stacks") for rank in (0, 1)] == events
    assert [("notified",), ("opened",), ("resolved",)] == incidents


def assert_printed_groups(text):
    head, matter, first, second = text.split("\n\n")

    assert head.startswith("run hangs (attempt 0) is stalled: alive, but no step for ")
    assert re.search(rf"last step 5; 2 of 2 ranks returned their stacks\ncause: {CAUSE}$", head), head
    assert re.fullmatch(
        r"rank 1 never entered all_reduce \d+ \(4 B float32\) of default_pg; rank 0 is in it since \d+ s,"
        rf" called at blamed_training\.py\[{line_of('# the others wait here')}\]",
        matter,
    )
    assert first.startswith("rank 1: not in a collective; the last was all_reduce ")
    assert re.search(rf"> fall_behind +{re.escape(str(SCRIPT))}:{line_of('# rank 1 hangs here')}\n", first)
    assert second.startswith("rank 0: waiting in all_reduce seq ")
    assert re.search(r"^ +all_reduce +.*distributed_c10d\.py:\d+$", second, re.MULTILINE)


def test_without_a_token_ranks_report_hangs_and_send_stacks_on_loopback(service, start_ranks, tmp_path):
    """The service would wait for minutes, but the watchdogs of the ranks report the hang."""
    with AlertReceiver() as receiver:
        service.urls = (receiver.notify_url,)
        service.start()
        training = start_ranks(SCRIPT, tmp_path, run="hangs", RANKSCOPE_HANG_AFTER_SECONDS="1.5")
        service.wait_for(lambda: receiver.alerts)
        alert = receiver.alerts[0]
        answer = ask(service, "hangs", token=None)
        (tmp_path / "go-on").touch()

        assert [0, 0] == [rank.wait(60) for rank in training], (tmp_path / "training.log").read_text()
        service.wait_for(lambda: len(receiver.alerts) > 1)
    assert 0 == service.stop(), service.log()

    assert "[critical] hangs: RunStalled, rank 1, step 5" == alert.title
    assert_message_names_both_places(alert.text, service)
    assert 0 == answer.returncode, answer.stderr
    assert "blamed_training.py" in answer.stdout
    log = (tmp_path / "training.log").read_text()
    assert 1 == log.count("rank 1: no sign of training for"), log
    assert 1 == log.count("rank 1: training continues after"), log
