"""A Grafana server for the tests: the contract server, or the server at RANKSCOPE_GRAFANA_URL."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
from tests.dashboards.grafana.contract_server import ContractServer

from rankscope_dashboards.grafana.content import Content, read_content
from rankscope_dashboards.grafana.deployment import Options, deploy, undeploy
from rankscope_dashboards.grafana.routes import CONFIGURATION, POLICIES
from rankscope_dashboards.grafana.server import EDITABLE, Server, read_credentials

PROMETHEUS = "http://127.0.0.1:9090"


@cache
def complete() -> Content:
    """Return the deployment of all committed files."""
    return read_content()


def few() -> Content:
    """Return a deployment with one board and the first two rules of two groups, which needs few requests."""
    content = complete()
    groups = tuple(replace(group, rules=group.rules[:2]) for group in content.groups[:2])
    return replace(content, boards=content.boards[:1], groups=groups)


@dataclass
class Grafana:
    """A Grafana server, and the requests of a user to it. `lines` is the output of the last command."""

    url: str
    credentials: str | tuple[str, str]
    folder: Path
    content: Content
    lines: list[str] = field(default_factory=list)

    @cached_property
    def user(self) -> Server:
        return Server(self.url, self.credentials)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def options(self, **options: Any) -> Options:
        urls = {"rankscope-live": PROMETHEUS, "rankscope-history": PROMETHEUS}
        return Options(**{"urls": urls, "copies": self.folder} | options)

    def deploy(self, content: Content | None = None, server: Server | None = None, **options: Any) -> int:
        self.lines.clear()
        return deploy(server or self.user, content or self.content, self.options(**options), self.lines.append)

    def undeploy(self, **options: Any) -> list[str]:
        self.lines.clear()
        return undeploy(self.user, self.content, self.options(**options), self.lines.append)

    def board(self) -> dict[str, Any]:
        found: dict[str, Any] = self.user.get(f"/dashboards/uid/{self.content.boards[0]['uid']}")
        return found

    def rules(self) -> dict[str, dict[str, Any]]:
        return {rule["uid"]: rule for rule in self.user.get("/v1/provisioning/alert-rules")}

    def save_board(self, board: dict[str, Any], folder: str | None = None) -> None:
        """Save a board as a user does, in the folder of the boards by default."""
        where = self.content.boards_folder.uid if folder is None else folder
        self.user.post("/dashboards/db", {"dashboard": board, "folderUid": where, "overwrite": False})

    def save_rule(self, rule: dict[str, Any]) -> None:
        """Save a rule as a user does in the UI."""
        path, is_new = "/v1/provisioning/alert-rules", rule["uid"] not in self.rules()
        send, where = (self.user.post, path) if is_new else (self.user.put, f"{path}/{rule['uid']}")
        send(where, rule, headers=EDITABLE)


@pytest.fixture
def contract() -> Iterator[ContractServer]:
    """Yield an empty contract server. Grafana accepts rules that cannot work; a deployment must never send one."""
    with ContractServer() as server:
        yield server

    assert [] == server.alerting.mistakes


URL = os.environ.get("RANKSCOPE_GRAFANA_URL")
needs_server = pytest.mark.skipif(URL is None, reason="make test-grafana")
"""Mark of tests that only a real server can pass, with its own rules, notifications or pages."""


def real_server(folder: Path, content: Content) -> Grafana:
    """Return the real server."""
    assert URL is not None
    credentials = read_credentials(Path(os.environ["RANKSCOPE_GRAFANA_TOKEN_FILE"]))
    return Grafana(url=URL, credentials=credentials, folder=folder, content=content)


def save_policies(user: Server, tree: dict[str, Any]) -> None:
    """Save the tree of notification policies as Grafana's pages do."""
    found = user.get(CONFIGURATION)
    user.post(CONFIGURATION, found | {"alertmanager_config": found["alertmanager_config"] | {"route": tree}})


@contextmanager
def same_policies(user: Server) -> Iterator[None]:
    """Restore the tree of notification policies at the end of the context."""
    tree = user.get(POLICIES)
    yield
    save_policies(user, tree)


@pytest.fixture
def grafana(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Grafana]:
    """Yield a server without any of our objects, and remove them afterwards from a real one."""
    if URL is None:
        server = request.getfixturevalue("contract")
        yield Grafana(url=server.url, credentials="glsa_admin", folder=tmp_path, content=few())
        return
    made = real_server(tmp_path, few())
    made.undeploy(force=True)
    with same_policies(made.user):
        yield made
    made.undeploy(force=True)


@pytest.fixture
def local(contract: ContractServer, tmp_path: Path) -> Grafana:
    """Return the contract server, for answers that a real server cannot be made to give."""
    return Grafana(url=contract.url, credentials="glsa_admin", folder=tmp_path, content=few())
