"""The compose file and the Dockerfile: valid, without root, and with commands that start the programs.

No container engine is used. The commands run on this machine, with the mounted paths and the ports replaced.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import yaml

from rankscope_dashboards.provisioning.compose import compose_file, compose_files
from rankscope_dashboards.provisioning.tree import packaged_boards, tree_files, write_tree

COMPOSE = compose_file()
SERVICES = COMPOSE["services"]
DOCKERFILE = compose_files()["compose/Dockerfile"]
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-[\w-]+)?")
PORTS = {"rankscope": 9470, "prometheus": 9090, "alertmanager": 9093, "grafana": 3000}


def test_compose_file_conforms_to_the_published_schema():
    """The package check-jsonschema contains the schema that the compose specification publishes."""
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    validator = jsonschema.Draft7Validator(json.loads((folder / "compose-spec.json").read_text(encoding="utf-8")))

    assert [] == [error.message for error in validator.iter_errors(COMPOSE)]
    assert [*validator.iter_errors({**COMPOSE, "service": {}})], "the schema rejects unknown keys"
    assert COMPOSE == yaml.safe_load(compose_files()["compose.yaml"])


def test_containers_are_pinned_unprivileged_and_have_health_checks():
    for name, service in SERVICES.items():
        user, _, _ = service["user"].partition(":")

        assert PINNED.fullmatch(service["image"])
        assert int(user) > 0
        assert ["ALL"] == service["cap_drop"]
        assert ["no-new-privileges:true"] == service["security_opt"]
        assert "CMD" == service["healthcheck"]["test"][0]
        assert f":{PORTS[name]}/" in service["healthcheck"]["test"][-1]


def test_mounts_and_ports_are_those_of_the_tree_and_of_this_machine():
    """Data is in named volumes, and all other mounts are read-only. Other hosts reach only the service."""
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service["volumes"]]
    volumes = [source for source, _, *mode in mounts if not mode]
    files = tree_files(packaged_boards())
    paths = {source.removeprefix("./") for source, *_ in mounts if source.startswith("./")}
    local = {name: [port.startswith("127.0.0.1:") for port in one["ports"]] for name, one in SERVICES.items()}

    assert sorted(COMPOSE["volumes"]) == sorted(volumes)
    assert all(source.startswith("./") and mode == ["ro"] for source, _, *mode in mounts if source not in volumes)
    assert all(any(name == path or name.startswith(f"{path}/") for name in files) for path in paths), paths
    assert f"{SERVICES['rankscope']['build']['context'].removeprefix('./')}/Dockerfile" in files
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
    write_tree(tree, tree_files(packaged_boards()))
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
