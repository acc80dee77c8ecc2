"""Real jobs with fewer sources than usual: the message names the right rank with its evidence, or no rank."""

import re
from pathlib import Path

import pytest

from rankscope.demo.receiver import AlertReceiver
from rankscope_storage.connection import connect

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).with_name("blamed_training.py")
TOKEN = "a-token-of-both"
NO_FLIGHT_RECORD = {"TORCH_FR_BUFFER_SIZE": "0"}
ASKED = {"RANKSCOPE_TOKEN": TOKEN, "RANKSCOPE_HANG_AFTER_SECONDS": "0"}
SILENT = {
    "RANKSCOPE_HANG_AFTER_SECONDS": "0",
    # Beyond loopback without a token: the service cannot request stacks.
    "RANKSCOPE_LISTEN": "0.0.0.0:0",
    "RANKSCOPE_INSECURE": "1",
    "RANKSCOPE_ADVERTISE": "127.0.0.1",
}
STEP = "[56]"
"""The last complete step, or the started one, to which the exit of a process belongs."""
CALLED = r"called at blamed_training\.py:\d+ in"


def message_of(service, start_ranks, folder, situation, **environment):
    """Return the first notification about a job in `situation`."""
    with AlertReceiver() as receiver:
        service.urls = (receiver.notify_url,)
        service.start()
        ranks = start_ranks(SCRIPT, folder, situation, run="blame", count=3, **environment)
        alert = service.wait_for(lambda: receiver.alerts and receiver.alerts[0])
        (folder / "go-on").touch()
        if situation == "sleeps":
            assert [0, 0, 0] == [rank.wait(60) for rank in ranks], (folder / "training.log").read_text()
        else:
            for rank in ranks:
                rank.kill()
    assert 0 == service.stop(), service.log()
    return alert


def incident_of(service):
    """Return rule and rank of the only incident in the store."""
    with connect(service.store) as connection:
        (found,) = connection.sql("select distinct rule, rank from events where type = 'incident'").fetchall()
    return found


@pytest.mark.parametrize(
    ("situation", "environment", "rank", "cause", "more"),
    [
        pytest.param(
            "sleeps",
            ASKED | NO_FLIGHT_RECORD,
            1,
            rf"rank 1: it is in time\.sleep, {CALLED} fall_behind, and ranks 0, 2 wait in a collective \(stacks\)",
            rf"where:\n  rank 1 in time\.sleep, {CALLED} fall_behind\n  ranks 0, 2 in all_reduce",
            id="stacks name the rank that sleeps",
        ),
        pytest.param(
            "sleeps",
            SILENT,
            None,
            "unknown: no rank sent stacks or a flight record",
            rf"last reports:\n  ranks 0-2: step {STEP}, \d(-\d)? s ago\nwhere:\n  ranks 0-2 sent no stacks: ",
            id="without any source no rank is named",
        ),
        pytest.param(
            "barrier",
            ASKED | NO_FLIGHT_RECORD,
            None,
            "unknown: the stacks of ranks 0-2 do not identify a single rank",
            rf"last reports:\n  ranks 0-2: step {STEP}, \d(-\d)? s ago\nwhere:\n  rank 1 in barrier ",
            id="stacks do not show which of two collectives is the right one",
        ),
    ],
)
def test_cause_of_a_stall_is_named_or_unknown(
    service, start_ranks, tmp_path, situation, environment, rank, cause, more
):
    service.token, service.stalled_after_seconds = environment.get("RANKSCOPE_TOKEN"), 2.0
    alert = message_of(service, start_ranks, tmp_path, situation, **environment)

    title = f"blame: RunStalled, rank {'unknown' if rank is None else rank}, step {STEP}"
    assert re.search(title, alert.title), alert.title
    assert re.search(rf"^cause: {cause}$", alert.text, re.MULTILINE), alert.text
    assert re.search(more, alert.text), alert.text
    assert ("last reports:" in alert.text) == (rank is None)
    assert ("RunStalled", rank) == incident_of(service)


def test_dead_rank_is_named_although_the_others_report_first(service, start_ranks, tmp_path):
    """Its peers lose the connection immediately. The service finds seconds later that the rank is dead."""
    alert = message_of(service, start_ranks, tmp_path, "dies", **SILENT)

    assert re.search(f"blame: RunFailed, rank 1, step {STEP}", alert.title), alert.title
    assert "cause: rank 1: first rank to stop responding without an exit report" in alert.text.splitlines()
    assert ("RunFailed", 1) == incident_of(service)
