"""The configurations of Prometheus and Alertmanager are valid for promtool and amtool."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rankscope_contract.model.events import Severity
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_dashboards.alerts.groups import DEFAULT_RULES, alert_groups, rule_file
from rankscope_dashboards.deploy import alertmanager
from rankscope_dashboards.deploy.alertmanager import AlertmanagerSettings, Mail, Receiver, Webhook, alertmanager_config
from rankscope_dashboards.deploy.prometheus import PrometheusSettings, Tls, as_yaml, duration, prometheus_config
from rankscope_dashboards.generate import PROVISIONING

HOOK = Webhook(url="https://alerts.example/hook?key=1")
MAIL = Mail(to="me@example", sender="rankscope@example", smarthost="mail.example:587", username="u", password="p")
CHAT = Receiver(name="chat", integrations=(HOOK, alertmanager.Slack(url="https://chat.example/hooks/x")))
ON_CALL = Receiver(name="on-call", integrations=(MAIL, HOOK), severities=(Severity.CRITICAL,))
HISTORY_PAGE = Path(__file__).parents[3].joinpath("docs/prometheus.md").read_text(encoding="utf-8")
HOSTILE = 'a"b\\c\n{{ .Evil }}'


@pytest.fixture
def checked(tmp_path, require_server):
    """Return a function that checks a document with promtool or amtool and returns the path of its file."""

    def check(document, program, package, *command):
        (tmp_path / "secret").write_text("token")
        path = tmp_path / "checked.yml"
        path.write_text(as_yaml(document), encoding="utf-8")
        arguments = [require_server(program, package), *command, path]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert 0 == done.returncode, done.stdout + done.stderr
        return path

    return check


@pytest.fixture
def by_amtool(checked):
    return lambda document: checked(document, "amtool", "prometheus-alertmanager", "check-config")


@pytest.fixture
def by_promtool(checked):
    return lambda document: checked(document, "promtool", "prometheus", "check", "config")


def test_every_alertmanager_configuration_is_valid(by_amtool):
    by_amtool(yaml.safe_load((PROVISIONING / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8")))
    hostile = (AnomalyNan(name=HOSTILE), AnomalyTurbulence(threshold=2.0))
    for rules, settings in (
        (DEFAULT_RULES, {}),
        (DEFAULT_RULES, {"receivers": (CHAT, ON_CALL), "group_wait_seconds": 0.25, "repeat_seconds": 90}),
        (hostile, {"receivers": (CHAT,)}),
    ):
        by_amtool(alertmanager_config(AlertmanagerSettings(rules=rules, **settings)))


@pytest.mark.parametrize(
    ("group", "common", "subject"),
    [
        ({"rule": "AnomalyNan", "run": "a b"}, {"rank": "3"}, '[FIRING] AnomalyNan in run "a b", rank 3'),
        ({"rule": "AnomalyNan", "run": "a b"}, {}, '[FIRING] AnomalyNan in run "a b"'),
        ({}, {"alertname": "ServiceDown"}, "[FIRING] ServiceDown"),
    ],
)
def test_mail_subject_contains_run_and_rank_if_present(require_server, tmp_path, group, common, subject):
    """Service alerts have no run, and a message about several ranks has no common rank."""
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"status": "firing", "groupLabels": group, "commonLabels": common}))
    (tmp_path / "none.tmpl").write_text("")
    command = [require_server("amtool", "prometheus-alertmanager"), "template", "render", f"--template.data={data}"]
    command += [f"--template.glob={tmp_path}/*.tmpl", f"--template.text={alertmanager.SUBJECT}"]

    assert subject == subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def receivers(by_amtool, require_server):
    """Return a function that returns the receivers of an alert: one gets all alerts, the other only critical ones."""
    path = by_amtool(alertmanager_config(AlertmanagerSettings(rules=DEFAULT_RULES, receivers=(CHAT, ON_CALL))))
    command = [require_server("amtool"), "config", "routes", "test", f"--config.file={path}"]

    def routed(**labels):
        given = [f"{label}={text}" for label, text in labels.items()]
        return subprocess.run([*command, *given], capture_output=True, text=True, check=True).stdout.strip()

    return routed


def test_receivers_get_only_alerts_of_their_severities(receivers):
    """Without receivers no notification is sent."""
    assert ("chat,on-call", "chat") == (receivers(severity="critical"), receivers(severity="warning"))
    assert "none" == alertmanager_config(AlertmanagerSettings(rules=DEFAULT_RULES))["route"]["receiver"]


def test_alerts_that_are_details_of_an_incident_reach_no_receiver(receivers):
    alerts = {alert.name: alert.all_labels() for group in alert_groups() for alert in group.alerts}

    rules = ("AnomalyNan", "AnomalyTurbulence", "ReplicaDesync")
    assert {"ScoreAboveLimit"} | {f"{rule}{ending}" for rule in rules for ending in ("", "Events")} == {
        name for name, labels in alerts.items() if receivers(**labels | {"severity": "critical"}) == "none"
    }


def test_nan_alert_inhibits_only_the_turbulence_alert_of_the_same_tensor():
    rules = (AnomalyNan(name="Broken"), AnomalyTurbulence(name="Wild", threshold=2.0))
    document = alertmanager_config(AlertmanagerSettings(rules=rules))

    broken, wild = ([f'rule="{rule}"', 'tensor!~"|n/a"'] for rule in ("Broken", "Wild"))
    equal = {"equal": ["run", "rank", "tensor"]}
    assert [{"source_matchers": broken, "target_matchers": wild, **equal}] == document["inhibit_rules"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Webhook(url="ftp://x"), "https://alerts.example/hook"),
        (lambda: Mail(to="me", sender="a@b", smarthost="h:25"), "to is 'me'"),
        (lambda: Mail(to="me@x", sender="a@b", smarthost="h"), "host:port"),
        (lambda: Mail(to="me@x", sender="a@b", smarthost="h:25", password="p"), "needs a username"),
        (lambda: AlertmanagerSettings(rules=DEFAULT_RULES, receivers=(CHAT, CHAT)), "must be unique"),
        (lambda: PrometheusSettings(scrape_seconds=0), "scrape_seconds is 0"),
        (lambda: Tls(cert_file="c"), "key_file"),
    ],
)
def test_invalid_settings_are_rejected_with_the_fix(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_default_configuration_discovers_ranks_through_the_service(by_promtool):
    document = prometheus_config(PrometheusSettings(service="127.0.0.1:1", rule_files=()))
    by_promtool(document)
    ranks, service = document["scrape_configs"]

    assert "http://127.0.0.1:1/sd" == ranks["http_sd_configs"][0]["url"]
    assert ["127.0.0.1:1"] == service["static_configs"][0]["targets"]
    assert "authorization" not in ranks
    assert "alerting" not in document
    read = {"url": "http://127.0.0.1:1/api/v1/read", "name": "rankscope-service"}
    assert [read | {"required_matchers": {"job": "rankscope"}}] == document["remote_read"]
    assert "remote_read" not in prometheus_config(PrometheusSettings(with_history=False))


def test_discovery_scrapes_and_remote_read_use_token_and_certificates(by_promtool):
    tls = Tls(ca_file="secret", server_name="service")
    settings = PrometheusSettings(
        service="[::1]:9470", token_file="secret", tls=tls, ranks_tls=Tls(insecure_skip_verify=True), rule_files=()
    )
    document = prometheus_config(settings)
    by_promtool(document)
    ranks, service = document["scrape_configs"]
    discovery, (history,) = ranks["http_sd_configs"][0], document["remote_read"]

    assert "https://[::1]:9470/sd" == discovery["url"]
    assert "https://[::1]:9470/api/v1/read" == history["url"]
    assert "https" == service["scheme"]
    parts = (service, discovery, history)
    assert ["secret"] * 4 == [part["authorization"]["credentials_file"] for part in (ranks, *parts)]
    assert [{"ca_file": "secret", "server_name": "service"}] * 3 == [part["tls_config"] for part in parts]
    assert {"insecure_skip_verify": True} == ranks["tls_config"]
    assert "token" not in as_yaml(document)


def test_duration_uses_the_largest_unit_without_a_fraction():
    texts = {0.25: "250ms", 60: "1m", 90: "90s", 3600: "1h", 1.5: "1500ms", 0: "0ms"}

    assert texts == {seconds: duration(seconds) for seconds in texts}


def test_no_alert_rule_reads_the_store():
    """Selectors with the job of the ranks read the store. Rules must not: they are evaluated every few seconds."""
    expressions = [rule["expr"] for group in rule_file()["groups"] for rule in group["rules"]]

    assert expressions
    assert not [one for one in expressions if re.search(r"""job\s*=\s*['"]rankscope['"]""", one)]


def test_configuration_examples_in_the_documentation_are_valid(by_promtool):
    """The examples for ranks with another job name, and for remote read. Debian's promtool does not support pods."""
    (pods,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", HISTORY_PAGE, re.DOTALL)
    (history,) = re.findall(r"```yaml\n(remote_read:.*?)```", HISTORY_PAGE, re.DOTALL)
    found = yaml.safe_load(pods.replace("kubernetes_sd_configs: [{role: pod}]", "file_sd_configs: [{files: [a.json]}]"))
    by_promtool(found | yaml.safe_load(history.replace("token}", "secret}")))

    assert {"job": "rankscope"} == yaml.safe_load(history)["remote_read"][0]["required_matchers"]
    assert ["rankscope"] == [one["replacement"] for one in found["scrape_configs"][0]["relabel_configs"]]
