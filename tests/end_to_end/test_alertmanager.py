"""Notifications with a real rank, Prometheus, Alertmanager, HTTP and SMTP server: content, and less than a minute."""

import json
import re
import signal
import subprocess
import urllib.parse
import urllib.request

import pytest
from tests.end_to_end.alerting import EVENT_SECONDS, alerting, live_runs
from tests.programs import run_command

from rankscope.demo.receiver import Sender
from rankscope.up.machine import free_port

SECONDS = 30.0


@pytest.fixture(scope="module")
def running(tmp_path_factory, require_server):
    programs = require_server("prometheus"), require_server("prometheus-alertmanager")
    with alerting(tmp_path_factory.mktemp("alerting"), *programs) as running:
        yield running


@pytest.fixture(scope="module")
def ranks(running):
    """Start one rank per scenario at the same time, because torch takes long to load."""
    stories = ("comes-again", "raises", "dies")
    started = running.start_ranks(*stories)
    running.wait_for(lambda: live_runs(running.urls["service"]).keys() == set(stories))
    return started


def break_it(running, ranks, run, command):
    before = len(ranks.bad[run])
    running.wait_for(lambda: live_runs(running.urls["service"])[run] > 5)
    ranks.send(run, command)
    running.wait_for(lambda: len(ranks.bad[run]) > before)
    return ranks.bad[run][-1]


def told_in_time(running, run, at):
    """Wait until both senders notified about the run; return the delays."""
    for sender in (Sender.EMBEDDED, Sender.ALERTMANAGER):
        received = running.wait_for(lambda sender=sender: running.notifications(sender, run))
        seconds = received[0].at - at
        print(f"{run}: {sender} after {seconds:.2f} s")

        assert 0 < seconds <= SECONDS, (sender, seconds)


def asked(running, expression, url=None):
    """Return the result of a query to the running Prometheus, or to the one at `url`; empty while it starts."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{url or running.urls['prometheus']}/api/v1/query?{query}", timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
    except OSError:
        return []
    return result


@pytest.mark.timeout(120)
@pytest.mark.thorough
def test_doctor_lists_readers_of_ranks_and_alert_receivers(running, ranks):
    running.wait_for(lambda: len(asked(running, 'up{job="rankscope"} == 1')) == len(ranks.bad))
    given = [f"--{name}={running.urls[name]}" for name in ("prometheus", "alertmanager")]
    store = f"--store={running.folder / 'history'}"
    command = ["doctor", f"--url={running.urls['service']}", store, *given]
    expected = (
        r"OK    /records is read by Rankscope/\S+ \(\d of \d ranks, \d+ s ago\)",
        r"OK    /metrics is read by Prometheus/2\.\S+ \(\d of \d ranks, \d+ s ago\)",
        r"OK    the clocks of the ranks agree",
        r"OK    scrapes the ranks: \d of \d up",
        r"OK    evaluates \d+ Rankscope rules",
        r"OK    notifies address-1, address-2",
        r"\(service\): \S+ \(process \d+\)",
    )
    report = ""

    def all_lines_match():
        nonlocal report  # a busy machine sometimes misses a scrape, which the doctor reports
        report = run_command(*command).stdout
        return all(re.search(line, report) for line in expected)

    assert running.wait_for(all_lines_match), report


@pytest.mark.timeout(240)
def test_alert_fires_resolves_and_fires_again_by_webhook_and_by_mail(running, ranks):
    step, at = break_it(running, ranks, "comes-again", "nan")
    told_in_time(running, "comes-again", at)
    embedded, *more = running.notifications(Sender.EMBEDDED, "comes-again")
    labels = [labels for alert in running.notifications(Sender.ALERTMANAGER, "comes-again") for labels in alert.labels]
    resolved = running.wait_for(lambda: running.notifications(Sender.ALERTMANAGER, "comes-again", "resolved"))

    assert [] == more
    assert {f"step: {step}", "rank: 0", "tensor: weight"} <= set(embedded.text.splitlines())
    assert {("comes-again", "0", "critical")} == {(of["run"], of["rank"], of["severity"]) for of in labels}
    assert resolved[0].at - at > EVENT_SECONDS / 2
    (first,) = running.notifications(Sender.ALERTMANAGER, "comes-again")
    assert f"AnomalyNan in grad_unreduced of weight (nans), rank 0, step {step}, run comes-again" == first.text

    fired = len(running.notifications(Sender.ALERTMANAGER, "comes-again"))
    _, again_at = break_it(running, ranks, "comes-again", "nan")
    running.wait_for(lambda: len(running.notifications(Sender.ALERTMANAGER, "comes-again")) > fired)

    seconds = running.notifications(Sender.ALERTMANAGER, "comes-again")[fired].at - again_at

    assert seconds <= SECONDS
    for status, times in (("FIRING", 2), ("RESOLVED", 1)):
        subject = f'[{status}] AnomalyNan in run "comes-again", rank 0'
        running.wait_for(lambda s=subject, n=times: running.postbox.subjects().count(s) >= n)


@pytest.mark.timeout(120)
@pytest.mark.thorough
def test_prometheus_that_was_down_does_not_fire_old_events_again(running, ranks, require_server, tmp_path):
    """A Prometheus without data is in the same position as one that was down for longer than the window."""
    break_it(running, ranks, "comes-again", "nan")
    active = 'ALERTS{alertname="AnomalyNanEvents", alertstate="firing", run="comes-again"}'
    running.wait_for(lambda: asked(running, active))
    running.wait_for(lambda: not asked(running, active))
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        require_server("prometheus"),
        f"--config.file={running.folder / 'live' / 'config' / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path}",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as late:
        try:
            for metric in ("rankscope_anomaly_events_total", "rankscope_ingest_anomaly_events_total"):
                scraped = f'count_over_time({metric}{{run="comes-again", rule="AnomalyNan"}}[1m]) > 4'
                running.wait_for(lambda query=scraped: asked(running, query, url=url))
            fired = asked(running, f"count_over_time({active}[1m])", url=url)
        finally:
            late.terminate()

    assert [] == fired


@pytest.mark.timeout(120)
def test_nan_in_the_last_step_before_an_exception_is_sent_by_both(running, ranks):
    _, at = break_it(running, ranks, "raises", "nan-raise")
    told_in_time(running, "raises", at)

    assert 1 == running.wait_for(lambda: ranks.exits.get("raises"))
    assert "the last step was bad" in (running.folder / "ranks.log").read_text()


@pytest.mark.timeout(120)
def test_nan_in_the_last_steps_before_a_kill_is_sent_by_both(running, ranks):
    """The page of the rank is gone, but the page of the service still has the firings."""
    _, at = break_it(running, ranks, "dies", "nan-die")
    told_in_time(running, "dies", at)

    assert -signal.SIGKILL == running.wait_for(lambda: ranks.exits.get("dies"))
    assert asked(running, 'rankscope_ingest_anomaly_events_total{run="dies", rule="AnomalyNan"} > 0')


@pytest.mark.timeout(60)
def test_nan_inhibits_only_the_turbulence_of_its_tensor(running):
    """Alerts with another tensor, or without one, are still sent."""
    common = {"run": "inhibited", "rank": "0", "kind": "grad_reduced"}
    posted = [
        {"labels": common | {"alertname": name, "rule": name} | ({"tensor": tensor} if tensor else {})}
        for name, tensor in (
            *(("AnomalyNan", "a"), ("AnomalyTurbulence", "a"), ("AnomalyTurbulence", "b")),
            *(("AnomalyTurbulence", None), ("AnomalyNan", None)),
        )
    ]
    url = f"{running.urls['alertmanager']}/api/v2/alerts"
    request = urllib.request.Request(url, json.dumps(posted).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()

    received = running.wait_for(
        lambda: running.notifications(Sender.ALERTMANAGER, "inhibited", rule="AnomalyTurbulence")
    )
    assert {"b", None} == {labels.get("tensor") for alert in received for labels in alert.labels}
