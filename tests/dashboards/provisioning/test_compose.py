"""The compose file and the Dockerfile are valid, and the examples of contact points and routes."""

import contextlib
import importlib.resources
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml
from tests.dashboards.grafana.conftest import complete
from tests.dashboards.grafana.contract_server import ContractServer

from rankscope_contract import __version__
from rankscope_contract.model.events import Severity
from rankscope_contract.wire.channel import HEALTH_PATH
from rankscope_dashboards.alerts.groups import alert_groups
from rankscope_dashboards.deploy.alertmanager import DETAIL, SUBJECT
from rankscope_dashboards.grafana.routes import route as deployed_route
from rankscope_dashboards.grafana.rules import Rules
from rankscope_dashboards.grafana.server import Server
from rankscope_dashboards.provisioning.alert_rules import FOLDER
from rankscope_dashboards.provisioning.datasources import DASHBOARDS_PATH
from rankscope_dashboards.provisioning.tree import packaged_boards, tree_files, write_tree

FILES = tree_files(packaged_boards())
COMPOSE = yaml.safe_load(FILES["compose.yaml"])
SERVICES = COMPOSE["services"]
DOCKERFILE = FILES["compose/Dockerfile"]
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-[\w-]+)?")
PORTS = {"rankscope": 9470, "prometheus": 9090, "alertmanager": 9093, "grafana": 3000}


def test_compose_file_conforms_to_the_published_schema():
    """The package check-jsonschema contains the schema that the compose specification publishes."""
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    validator = jsonschema.Draft7Validator(json.loads((folder / "compose-spec.json").read_text(encoding="utf-8")))

    assert [] == [error.message for error in validator.iter_errors(COMPOSE)]
    assert [*validator.iter_errors({**COMPOSE, "service": {}})], "the schema rejects unknown keys"


def test_containers_are_pinned_unprivileged_and_have_health_checks():
    for name, service in SERVICES.items():
        user, _, _ = service["user"].partition(":")

        assert PINNED.fullmatch(service["image"])
        assert int(user) > 0
        assert ["ALL"] == service["cap_drop"]
        assert ["no-new-privileges:true"] == service["security_opt"]
        assert "CMD" == service["healthcheck"]["test"][0]
        assert f":{PORTS[name]}/" in service["healthcheck"]["test"][-1]
    assert f"rankscope:{__version__}" == SERVICES["rankscope"]["image"]
    assert HEALTH_PATH in SERVICES["rankscope"]["healthcheck"]["test"][-1]
    assert f"./dashboards/rankscope:{DASHBOARDS_PATH}:ro" in SERVICES["grafana"]["volumes"]


def test_mounts_and_ports_are_those_of_the_tree_and_of_this_machine():
    """Data is in named volumes, and all other mounts are read-only. Other hosts reach only the service."""
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service["volumes"]]
    volumes = [source for source, _, *mode in mounts if not mode]
    paths = {source.removeprefix("./") for source, *_ in mounts if source.startswith("./")}
    local = {name: [port.startswith("127.0.0.1:") for port in one["ports"]] for name, one in SERVICES.items()}

    assert sorted(COMPOSE["volumes"]) == sorted(volumes)
    assert all(source.startswith("./") and mode == ["ro"] for source, _, *mode in mounts if source not in volumes)
    assert all(any(name == path or name.startswith(f"{path}/") for name in FILES) for path in paths), paths
    assert f"{SERVICES['rankscope']['build']['context'].removeprefix('./')}/Dockerfile" in FILES
    assert {"rankscope": [False], "prometheus": [True], "alertmanager": [True], "grafana": [True]} == local


def test_dockerfile_is_pinned_has_a_health_check_and_a_user_other_than_root():
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    instructions = [line.partition(" ")[::2] for line in lines if not line.startswith("#")]
    names = [name for name, _ in instructions]
    of = dict(instructions)

    assert PINNED.fullmatch(of["FROM"])
    assert 1 == names.count("FROM")
    assert SERVICES["rankscope"]["user"] == of["USER"]
    assert names.index("USER") > names.index("RUN")
    assert f'"{SERVICES["rankscope"]["healthcheck"]["test"][-1]}"' in of["HEALTHCHECK"]
    assert SERVICES["rankscope"]["command"] == json.loads(of["CMD"])
    assert f":{of['VOLUME']}" in "".join(SERVICES["rankscope"]["volumes"])


@dataclass(frozen=True)
class Container:
    """A folder with the mounted files of a container, in which paths and ports are those of this machine."""

    name: str
    root: Path
    ports: dict[str, int]

    @property
    def service(self):
        return SERVICES[self.name]

    def mount(self, tree):
        for source, target in self.mounts():
            path = Path(f"{self.root}{target}")
            if not source.startswith("./"):
                path.mkdir(parents=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.mapped((tree / source).read_text()))
        for name in self.service.get("secrets", ()):
            secret = Path(f"{self.root}/run/secrets/{name}")
            secret.parent.mkdir(parents=True)
            secret.write_text("secret-of-the-test")

    def mounts(self):
        return [mount.split(":")[:2] for mount in self.service["volumes"]]

    def mapped(self, text):
        """Return `text` with mounted paths below the folder, names of containers as loopback, and free ports."""
        for target in [*(target for _, target in self.mounts()), "/run/secrets"]:
            text = re.sub(rf"(?<![\w/]){target}\b", f"{self.root}{target}", text)
        for name, port in self.ports.items():
            text = re.sub(rf"\b{name}:{PORTS[name]}\b", f"127.0.0.1:{port}", text)
            text = re.sub(rf":{PORTS[name]}\b", f":{port}", text)
        return text

    def start(self, program):
        command = [*program, *map(self.mapped, self.service["command"])]
        return subprocess.Popen(command, cwd=self.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_healthy(self):
        """Run the health check. The images contain wget; here Python fetches the same address."""
        *_, last = self.service["healthcheck"]["test"]
        url = re.search(r"http://[^' ]+", self.mapped(last))[0]
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
        return False


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_commands_of_the_compose_file_start_the_programs(tmp_path, require_server, free_port):
    """All commands but Grafana's. Prometheus scrapes the service with the token and knows the Alertmanager."""
    programs = {
        "rankscope": [sys.executable, "-P", "-m", "rankscope"],
        "alertmanager": [require_server("prometheus-alertmanager")],
        "prometheus": [require_server("prometheus")],
    }
    tree = tmp_path / "tree"
    write_tree(tree, FILES)
    ports = {name: free_port + number for number, name in enumerate(programs)}
    containers = {name: Container(name, tmp_path / name, ports) for name in programs}

    def prometheus(path):
        url = f"http://127.0.0.1:{ports['prometheus']}/api/v1/{path}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]

    with contextlib.ExitStack() as stack:
        for name, container in containers.items():
            container.mount(tree)
            process = container.start(programs[name])
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        wait_for(lambda: all(container.is_healthy() for container in containers.values()))
        wait_for(lambda: prometheus("query?query=up==1")["result"])
        wait_for(lambda: prometheus("alertmanagers")["activeAlertmanagers"])

        assert Path(f"{containers['rankscope'].root}/data/history").is_dir()
        assert prometheus("rules")["groups"]


EXAMPLES = {path.name: yaml.safe_load(FILES[str(path)]) for path in map(Path, FILES) if path.match("examples/*/*")}
POINTS = EXAMPLES["contact-points.yaml"]["contactPoints"]
(POLICY,) = EXAMPLES["policies.yaml"]["policies"]
MUTES = EXAMPLES["mute-timings.yaml"]["muteTimes"]
TEMPLATES = EXAMPLES["templates.yaml"]["templates"]

# Keys of the provisioning file format. Grafana ignores other keys without a message.
DOCUMENT_KEYS = {"contactPoints", "policies", "muteTimes", "templates"}
POINT_KEYS = {"orgId", "name", "receivers"}
RECEIVER_KEYS = {"uid", "type", "disableResolveMessage", "settings"}
SETTINGS = {"webhook": {"url", "httpMethod", "maxAlerts"}, "email": {"addresses", "singleEmail", "subject", "message"}}
ROUTE_KEYS = {
    *("receiver", "group_by", "object_matchers", "mute_time_intervals", "continue", "routes"),
    *("group_wait", "group_interval", "repeat_interval"),
}
INTERVAL_KEYS = {"times", "weekdays", "days_of_month", "months", "years", "location"}


def routes(route):
    return [route, *(inner for one in route.get("routes", ()) for inner in routes(one))]


def test_examples_contain_only_keys_that_grafana_reads():
    assert {"examples"} == {name.partition("/")[0] for name in FILES if "/alerting/" in name}, (
        "Grafana reads no example"
    )
    assert "replaces the tree of your server" in FILES["examples/alerting/policies.yaml"]
    assert not [name for name in FILES if name.startswith("examples/") and "$" in FILES[name]]
    for document in EXAMPLES.values():
        assert document.keys() - DOCUMENT_KEYS == {"apiVersion"}
    for point in POINTS:
        assert POINT_KEYS == point.keys()
        for receiver in point["receivers"]:
            assert RECEIVER_KEYS == receiver.keys()
            assert SETTINGS[receiver["type"]] == receiver["settings"].keys()
            assert re.fullmatch(r"[a-z0-9-]{1,40}", receiver["uid"])
    assert all(route.keys() <= ROUTE_KEYS for top in POLICY["routes"] for route in routes(top))
    assert POLICY.keys() <= ROUTE_KEYS | {"orgId"}
    for mute in MUTES:
        assert {"orgId", "name", "time_intervals"} == mute.keys()
        assert all(interval.keys() <= INTERVAL_KEYS for interval in mute["time_intervals"])
    assert all({"orgId", "name", "template"} == template.keys() for template in TEMPLATES)


def test_routes_refer_to_contact_points_and_mute_timings_that_exist():
    inner = [route for top in POLICY["routes"] for route in routes(top)]
    receivers = {route["receiver"] for route in inner}

    assert {point["name"] for point in POINTS} == receivers
    assert "grafana-default-email" == POLICY["receiver"], "other alerts go where a new server sends them"
    assert {mute["name"] for mute in MUTES} == {name for one in inner for name in one.get("mute_time_intervals", ())}


def test_route_of_rankscope_sends_one_message_for_each_incident():
    (route,) = POLICY["routes"]
    details, critical, rest = route["routes"]

    assert [["grafana_folder", "=", FOLDER]] == route["object_matchers"]
    assert (["alertname", "run", "rule", "step"], "5s") == (route["group_by"], route["group_wait"])
    assert [[DETAIL[0], "=", DETAIL[1]]] == details["object_matchers"]
    assert ["rankscope-always"] == details["mute_time_intervals"]
    (always,) = (mute for mute in MUTES if mute["name"] == "rankscope-always")
    assert [{"times": [{"start_time": "00:00", "end_time": "24:00"}]}] == always["time_intervals"]
    assert critical["object_matchers"] == [["severity", "=", Severity.CRITICAL]]
    assert critical["continue"]
    assert {"receiver": "rankscope-chat"} == rest


ALERTMANAGER = yaml.safe_load(FILES["alertmanager/alertmanager.yml"])
ALWAYS_MUTED = {"rankscope-always", "rankscope-details"}
OPERATORS = {"=": re.escape, "=~": str, "!=": lambda text: f"(?!{re.escape(text)}$).*"}


def matches(route, labels):
    texts = [re.fullmatch(r'(\w+)(=~|!=|=)"(.*)"', text).groups() for text in route.get("matchers", ())]
    every = [*texts, *route.get("object_matchers", ())]
    return all(re.fullmatch(OPERATORS[operator](text), labels.get(name, "")) for name, operator, text in every)


def messages(route, labels, group_by=()):
    """Return the receiver and the group of each message about an alert, by the routing of Alertmanager."""
    group_by = route.get("group_by", group_by)
    found = []
    for child in route.get("routes", ()):
        if matches(child, labels):
            found += messages({"receiver": route["receiver"]} | child, labels, group_by)
            if not child.get("continue"):
                return found
    is_muted = ALWAYS_MUTED & {*route.get("mute_time_intervals", ())} or route["receiver"] == "none"
    own = (route["receiver"], *(labels.get(name, "") for name in group_by))
    return found or [None if is_muted else own]


@cache
def settings_of_rules():
    """Return the receiver of each rule on a release of Grafana that keeps it, by the title of the rule."""
    content = complete()
    with ContractServer() as contract:
        server = Server(contract.url, "glsa_admin")
        rules = Rules(server, content.groups, content.rules_folder, receiver="chat", force=False)
        return {change.title: change.payload["notification_settings"] for change in rules.plan()}


TREES = {
    "Alertmanager": lambda labels: messages(ALERTMANAGER["route"], labels),
    "files": lambda labels: messages(POLICY, labels),
    "route of deploy": lambda labels: messages({"receiver": "x", "routes": [deployed_route("chat", FOLDER)]}, labels),
    "rules of deploy": lambda labels: messages(settings_of_rules()[labels["alertname"]], labels),
}


@pytest.mark.parametrize("tree", TREES)
def test_nan_of_one_step_is_one_message_for_each_contact_point(tree):
    """The step of a NaN makes 20 alerts fire: one about its incident, and details. A NaN of a later step is another."""
    series = {"run": "r", "rank": "0", "kind": "grad_local", "grafana_folder": FOLDER}
    every = [alert for group in alert_groups() for alert in group.alerts]
    alerts = {alert.name: {"alertname": alert.name, **alert.all_labels()} for alert in every}
    details = [alerts["AnomalyNan"] | series | {"tensor": f"t{number}", "op": "nans"} for number in range(18)]
    fired = [*details, alerts["AnomalyNanEvents"] | series]
    incident = alerts["AnomalyIncident"] | series | {"rule": "AnomalyNan", "severity": "critical", "tensor": "t0"}

    def sent(steps):
        firing = [labels for step in steps for labels in (*fired, incident | {"step": step})]
        keys = {key for labels in firing for key in TREES[tree](labels)} - {None}
        return Counter(receiver.removeprefix("rankscope-") for receiver, *_ in keys)

    receivers = {"chat"} if "deploy" in tree else {"chat", "on-call"}
    assert dict.fromkeys(receivers, 1) == sent(["150"])
    assert dict.fromkeys(receivers, 2) == sent(["150", "151"])


@pytest.mark.parametrize("run", ["r", None])
def test_templates_render_title_and_texts(require_server, tmp_path, run):
    """Grafana and Alertmanager use the same template language."""
    board = {"board": "https://grafana/d/b?var-run=r"} if run else {}
    data = {
        "status": "firing",
        "groupLabels": {"rule": "RunFailed", "run": run} if run else {},
        "commonLabels": {"alertname": "ServiceDown"},
        "alerts": [{"annotations": {"summary": "S", "description": "D"} | board, "status": "firing"}],
    }
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "rankscope.tmpl").write_text(TEMPLATES[0]["template"])
    command = [require_server("amtool", "prometheus-alertmanager"), "template", "render"]
    command += [f"--template.data={tmp_path / 'data.json'}", f"--template.glob={tmp_path}/*.tmpl"]
    command += ['--template.text={{ template "rankscope.title" . }}|{{ template "rankscope.message" . }}']
    title = '[FIRING] RunFailed in run "r"' if run else "[FIRING] ServiceDown"

    text = "\n".join(("S", "D", *board.values()))
    assert f"{title}|{text}" == subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert SUBJECT in TEMPLATES[0]["template"]
