"""Messages of a real Grafana server about faults of real ranks: how soon, how many, and about what."""

import re
import time
from collections.abc import Iterator

import pytest
from tests.dashboards.grafana.conftest import complete, needs_server, real_server
from tests.dashboards.grafana.watched import Watched, watched

from rankscope.demo.receiver import Sender
from rankscope_dashboards.alerts.anomaly import WINDOW

pytestmark = [needs_server, pytest.mark.timeout(600)]
STALLED_AFTER_SECONDS = 5.0
EVALUATION_SECONDS = 10.0
WITHIN_SECONDS = 30.0
JUDGED_AFTER_STEPS = 110  # A step for which the rule AnomalyTurbulence has enough earlier values

WINDOW_SECONDS = 60.0 * int(WINDOW.removesuffix("m"))


@pytest.fixture(scope="module")
def all_programs(require_server, tmp_path_factory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    servers = (require_server("prometheus"), require_server("prometheus-alertmanager"))
    grafana = real_server(folder, complete())
    with watched(grafana, folder, servers, stalled_after_seconds=STALLED_AFTER_SECONDS) as found:
        found.start("once", "lasting", "large", "paused", "counted", "raised")
        yield found


def firings(programs: Watched, run: str) -> set[tuple[str, str]]:
    """Return the name and the begin of each firing alert of the run."""
    return {
        (alert["labels"]["alertname"], alert["startsAt"])
        for message in programs.hook.messages
        for alert in message.alerts()
        if alert["labels"].get("run") == run
    }


def without_run(programs: Watched, since: float) -> list[dict]:
    """Return the documents of the messages about firing alerts since a time that are about no run."""
    documents = [message.document for message in programs.hook.messages if message.at >= since]
    firing = [one for one in documents if one["status"] == "firing"]
    return [one for one in firing if not any("run" in alert["labels"] for alert in one["alerts"])]


def test_large_gradient_of_one_step(all_programs: Watched):
    all_programs.wait_for_result(f'rankscope_step{{run="large"}} > {JUDGED_AFTER_STEPS}')

    assert all_programs.seconds_until_message("large", "large", "AnomalyIncident") < WITHIN_SECONDS


def test_nan_of_one_step_is_one_message_and_one_about_its_end(all_programs: Watched):
    """Alertmanager and Grafana send the same number of messages to each contact point."""
    all_programs.seconds_until_message("counted", "nan", "AnomalyIncident")
    all_programs.wait_for(lambda: all_programs.hook.alerts("AnomalyIncident", "resolved", run="counted"), 240)
    time.sleep(3 * EVALUATION_SECONDS)

    by_grafana = [message.document["status"] for message in all_programs.hook.about("counted")]
    received = [alert.title for alert in all_programs.programs.receiver.alerts if alert.sender is Sender.ALERTMANAGER]
    by_alertmanager = [title.partition("]")[0] for title in received if "in run counted" in title]
    assert (["firing", "resolved"], ["[firing", "[resolved"]) == (by_grafana, by_alertmanager)


def test_exception_is_one_message_that_names_it_and_its_rank(all_programs: Watched):
    all_programs.seconds_until_message("raised", "nan-raise", "RunFailed")
    time.sleep(6 * EVALUATION_SECONDS)

    ((_, alert),) = all_programs.hook.alerts("RunFailed", run="raised")
    assert "run raised failed: RuntimeError, rank 0" == alert["annotations"]["summary"]
    for message in all_programs.hook.messages:
        labels = [label for alert in message.document["alerts"] for label in alert["labels"].values()]
        assert not {"", "none"} & set(labels)
        assert re.match(r"\[[A-Z]+(:\d+)?\] [A-Z]", message.document["title"]), message.document["title"]


def test_lasting_nan_is_one_firing_until_it_ends(all_programs: Watched):
    assert all_programs.seconds_until_message("lasting", "nan-steps", "AnomalyIncident") < WITHIN_SECONDS
    time.sleep(3 * EVALUATION_SECONDS)
    all_programs.send("lasting", "continue")

    all_programs.wait_for(lambda: all_programs.hook.alerts("AnomalyIncident", "resolved", run="lasting"), 300)
    names = [name for name, _ in firings(all_programs, "lasting")]
    assert sorted(set(names)) == sorted(names)


def test_run_without_steps_is_stalled_until_its_next_step(all_programs: Watched):
    limit = STALLED_AFTER_SECONDS + WITHIN_SECONDS
    assert all_programs.seconds_until_message("paused", "pause", "RunStalled") < limit
    all_programs.send("paused", "continue")

    all_programs.wait_for(lambda: all_programs.hook.alerts("RunStalled", "resolved", run="paused"))


def test_service_away_is_one_message_that_names_its_address(all_programs: Watched):
    with all_programs.away("service") as since:
        all_programs.wait_for(lambda: all_programs.hook.alerts("ServiceDown"), 150)
        time.sleep(3 * EVALUATION_SECONDS)
    all_programs.wait_for(lambda: all_programs.hook.alerts("ServiceDown", "resolved"), 150)

    (message,) = without_run(all_programs, since)
    (alert,) = message["alerts"]
    assert "rule" not in alert["labels"]
    assert all_programs.programs.urls["service"].rpartition("/")[2] in alert["annotations"]["summary"]


def test_fault_fires_once_although_prometheus_is_away_for_long(all_programs: Watched):
    """Prometheus is away: one message, which names the data source. After it, the old fault does not fire again."""
    assert all_programs.seconds_until_message("once", "nan", "AnomalyIncident") < WITHIN_SECONDS
    time.sleep(2 * EVALUATION_SECONDS)
    before = firings(all_programs, "once")

    with all_programs.away("prometheus") as since:
        all_programs.wait_for(lambda: all_programs.hook.alerts("DatasourceUnreachable"), 200)
        time.sleep(max(0.0, since + WINDOW_SECONDS + 3 * EVALUATION_SECONDS - time.time()))
    all_programs.wait_for(lambda: all_programs.hook.alerts("DatasourceUnreachable", "resolved"), 150)
    time.sleep(6 * EVALUATION_SECONDS)

    (message,) = without_run(all_programs, since)
    (alert,) = message["alerts"]
    assert not {"run", "rule"} & alert["labels"].keys()
    assert "rankscope-live" in alert["annotations"]["summary"]
    assert before == firings(all_programs, "once")
