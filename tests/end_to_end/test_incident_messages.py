"""Messages of a real Alertmanager about one NaN that spread to all tensors of two ranks: number, size, first line."""

import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from aiosmtpd.controller import Controller
from tests.end_to_end.alerting import Postbox
from tests.end_to_end.lives import until

from rankscope.up.machine import free_port
from rankscope.up.plan import receivers
from rankscope_dashboards.alerts.groups import DEFAULT_RULES, alert_groups
from rankscope_dashboards.deploy.alertmanager import AlertmanagerSettings, alertmanager_config
from rankscope_dashboards.deploy.prometheus import as_yaml

MAX_BYTES = 4096
FIRST = {"run": "pretrain", "rank": "1", "rule": "AnomalyNan", "severity": "critical", "kind": "grad_unreduced"}
FIRST |= {"tensor": "model.layers.11.mlp.down_proj.weight", "op": "nans", "step": "150"}
SUMMARY = "AnomalyNan in grad_unreduced of model.layers.11.mlp.down_proj.weight (nans), rank 1, step 150, run pretrain"
ALERTS = {alert.name: alert for group in alert_groups() for alert in group.alerts}


class Web(BaseHTTPRequestHandler):
    """A receiver of webhooks. Below /slack it accepts only the fields of Slack, as a chat does."""

    received: list[tuple[str, bytes]]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fields = {"channel", "username", "text", "attachments"}
        is_refused = self.path == "/slack" and not json.loads(body).keys() <= fields
        if not is_refused:
            self.received.append((self.path, body))
        self.send_response(400 if is_refused else 200)
        self.end_headers()

    def log_message(self, format, *args):  # noqa: A002 - http.server's signature
        """Do nothing instead of logging each request."""


def an_alert(name, **labels):
    """Return the alert as Prometheus posts it, with the labels of its rule."""
    rule = ALERTS[name]
    summary = SUMMARY if name == "AnomalyIncident" else rule.summary
    return {
        "labels": {**labels, **rule.all_labels(), "alertname": name},
        "annotations": {**rule.annotations(""), "summary": summary},
        "generatorURL": f"http://prometheus.example:9090/graph?g0.expr={urllib.parse.quote(rule.expression)}&g0.tab=1",
    }


def spread():
    """Return 518 alerts: of each tensor and rank, of each kind and rank, and the incident."""
    series = [
        {"run": "pretrain", "rank": rank, "kind": kind, "tensor": f"model.layers.{number}.weight", "op": "nans"}
        for rank in "01"
        for kind in ("grad_unreduced", "grad_reduced", "param_after")
        for number in range(85)
    ]
    kinds = [dict(pair) for pair in {tuple((name, one[name]) for name in ("run", "rank", "kind")) for one in series}]
    details = [an_alert("AnomalyNan", **one) for one in series] + [an_alert("AnomalyNanEvents", **one) for one in kinds]
    return [*details, an_alert("AnomalyTurbulence", **series[0]), an_alert("AnomalyIncident", **FIRST)]


@pytest.fixture
def post(tmp_path, require_server):
    """Run Alertmanager; yield a function that posts alerts and returns the bodies of all messages, by receiver."""
    postbox, Web.received = Postbox(), []
    mail = Controller(postbox, hostname="127.0.0.1", port=free_port())
    with ExitStack() as stack:
        mail.start()
        stack.callback(mail.stop)
        web = ThreadingHTTPServer(("127.0.0.1", 0), Web)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        stack.callback(web.shutdown)
        address = f"http://127.0.0.1:{web.server_port}"
        addresses = [f"{address}/hook", f"slack+{address}/slack", f"smtp://127.0.0.1:{mail.port}?to=a@b.example&tls=no"]
        settings = AlertmanagerSettings(
            rules=DEFAULT_RULES, receivers=receivers(addresses)[0], group_wait_seconds=1, group_interval_seconds=1
        )
        (tmp_path / "alertmanager.yml").write_text(as_yaml(alertmanager_config(settings)))
        url = f"127.0.0.1:{free_port()}"
        options = [f"--storage.path={tmp_path}", f"--web.listen-address={url}", "--cluster.listen-address="]
        command = [
            require_server("prometheus-alertmanager"),
            f"--config.file={tmp_path / 'alertmanager.yml'}",
            *options,
        ]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        stack.callback(process.wait, 10)
        stack.callback(process.terminate)

        def send(alerts):
            _post(f"http://{url}/api/v2/alerts", alerts)
            until(lambda: len(Web.received) >= 2 and postbox.mails, 60, lambda: Web.received)
            time.sleep(4)  # longer than group wait and interval: a second message would have arrived
            by_path = {path: [body for at, body in Web.received if at == path] for path in ("/hook", "/slack")}
            return by_path | {"mail": [bytes(message) for message in postbox.mails]}

        yield send


def _post(url, alerts):
    request = urllib.request.Request(url, json.dumps(alerts).encode(), {"Content-Type": "application/json"})
    until(lambda: urllib.request.urlopen(request, timeout=30).close() is None, 60)


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_one_nan_on_all_tensors_is_one_small_message(post):
    alerts = spread()
    sent = post(alerts)
    hook, slack, mail = (bodies[0] for bodies in sent.values())
    (shown,) = json.loads(slack)["attachments"]
    (reported,) = json.loads(hook)["alerts"]

    assert 518 == len(alerts)
    assert {"/hook": 1, "/slack": 1, "mail": 1} == {name: len(bodies) for name, bodies in sent.items()}
    assert [] == [len(body) for body in (hook, slack, mail) if len(body) > MAX_BYTES]
    assert SUMMARY == reported["annotations"]["summary"]
    assert f"[FIRING] {SUMMARY}" == shown["title"]
    assert f"[FIRING] {SUMMARY}" in mail.decode().replace("=\n", "").splitlines()
    assert "runbook_url" not in reported["annotations"]
