"""A server that answers as the recorded Grafana 9.4 does, with models in memory: `tests/data/grafana_api/README.md`."""

import base64
import json
import re
import threading
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.dashboards.grafana.contract_alerting import Alerting
from tests.dashboards.grafana.contract_content import NOT_MODELLED, Answer, Caller, Content, Request, Role, message

ADMIN: Final = ("admin", "admin")
TOKENS: Final = {  # Service account tokens (`glsa_`) and an API key (`eyJr`), with their roles
    "glsa_admin": Role.ADMIN,
    "glsa_editor": Role.EDITOR,
    "glsa_viewer": Role.VIEWER,
    "eyJr_admin": Role.ADMIN,
}

MOST_WRONG_PASSWORDS: Final = 5
HEALTH: Final = {"commit": "8f3e923057", "database": "ok", "version": "9.4.0-pre"}


def permission(method: str, path: str) -> str | None:
    """Return the permission that a request needs; None if every role has it."""
    if path.startswith("/api/v1/provisioning/"):
        return "alert.provisioning:read" if method == "GET" else "alert.provisioning:write"
    if path.startswith("/api/alertmanager/grafana/config/"):
        return f"alert.notifications:{'read' if method == 'GET' else 'write'}"
    verbs, kind = {"POST": "create", "PUT": "write", "DELETE": "delete"}, path.split("/")[2]
    if (method, kind) == ("POST", "dashboards"):
        return "any of dashboards:create, dashboards:write"
    return f"{kind}:{verbs[method]}" if kind in {"folders", "datasources", "dashboards"} and method in verbs else None


def is_granted(caller: Caller, needed: str) -> bool:
    if caller.role is Role.EDITOR:
        return needed.startswith(("folders:", "dashboards:", "any of dashboards:"))
    return caller.role is Role.ADMIN


@dataclass
class ContractServer:
    """A running server; no caller has the `denied` permissions. `authenticated`: paths of requests with credentials."""

    # `fail_after`: number of requests after which the server closes each connection without an answer.

    content: Content = field(default_factory=Content)
    alerting: Alerting = field(default_factory=Alerting)
    version: str = HEALTH["version"]
    denied: set[str] = field(default_factory=set)
    fail_after: int | None = None
    requests: list[str] = field(default_factory=list)
    authenticated: list[str] = field(default_factory=list)
    wrong_passwords: int = 0
    organisations: dict[int, str] = field(default_factory=lambda: {1: "Main Org."})

    def __post_init__(self) -> None:
        self.content.folder_holds_rules = self.alerting.holds_rules
        self.content.delete_rules = self.alerting.delete_rules
        self.alerting.has_folder = lambda uid: uid in self.content.folders
        self.alerting.has_source = lambda uid: uid in self.content.sources

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"contract": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def writes(self) -> list[str]:
        """Requests that change something, in their order."""
        return [request for request in self.requests if not request.startswith("GET")]

    def answer(self, request: Request) -> Answer:
        self.requests.append(f"{request.method} {request.path}")
        if "Authorization" in request.headers:
            self.authenticated.append(request.path)
        if request.path == "/api/health":
            return Answer(200, HEALTH | {"version": self.version})
        caller = self._caller(request)
        if isinstance(caller, Answer):
            return caller
        needed = permission(request.method, request.path)
        if needed is not None and (needed in self.denied or not is_granted(caller, needed)):
            text = f"You'll need additional permissions to perform this action. Permissions needed: {needed}"
            return Answer(403, {"accessErrorId": "ACE1", "message": text, "title": "Access denied"})
        routes = [("GET", "/api/org", self._organisation), *self.content.routes(), *self.alerting.routes()]
        for method, pattern, handler in routes:
            if method == request.method and (found := re.fullmatch(pattern, request.path)):
                return handler(request, caller, *map(unquote, found.groups()))
        return NOT_MODELLED

    def _caller(self, request: Request) -> Caller | Answer:
        """Return the caller of a request, or the answer to wrong or missing credentials."""
        kind, _, value = request.headers.get("Authorization", "").partition(" ")
        if kind == "Basic":
            return self._user(request, base64.b64decode(value).decode())
        if kind != "Bearer":
            return Answer(401, {"message": "Unauthorized"})
        if value not in TOKENS:
            return message(401 if value.startswith("glsa_") else 500, "invalid API key")
        return Caller(role=TOKENS[value], login="Anonymous", organisation=1)

    def _user(self, request: Request, credentials: str) -> Caller | Answer:
        organisation = int(request.headers.get("X-Grafana-Org-Id", "1"))
        is_locked = self.wrong_passwords >= MOST_WRONG_PASSWORDS
        if credentials != ":".join(ADMIN):
            self.wrong_passwords += 1
        if is_locked or credentials != ":".join(ADMIN) or organisation not in self.organisations:
            return message(401, "invalid username or password")
        return Caller(role=Role.ADMIN, login="admin", organisation=organisation, is_grafana_admin=True)

    def _organisation(self, _request: Request, caller: Caller) -> Answer:
        number = caller.organisation
        return Answer(200, {"id": number, "name": self.organisations[number]})


class _Handler(BaseHTTPRequestHandler):
    """Reads one HTTP request and writes the answer of the contract server."""

    contract: ContractServer
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet for headers and body, or each answer waits for a delayed acknowledgement

    def handle_request(self) -> None:
        contract = self.contract
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if contract.fail_after is not None and len(contract.requests) >= contract.fail_after:
            self.close_connection = True
            self.connection.close()
            return
        parts = urlsplit(self.path)
        is_json = "json" in (self.headers.get("Content-Type") or "")
        request = Request(
            method=self.command,
            path=parts.path,
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers=dict(self.headers.items()),
            body=json.loads(raw) if is_json and raw else raw or None,
        )
        answer = contract.answer(request)
        body = b"" if answer.status == 204 or answer.body == "" else json.dumps(answer.body).encode()
        if answer.content_type.startswith("text/") and isinstance(answer.body, str):
            body = answer.body.encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815 - names of the base class

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


DATA: Final = Path(__file__).parents[2] / "data" / "grafana_api"
ALERTS_FOLDER: Final = "mhQtPvgOk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A recorded request and its answer. The answer is None if only the effect of the request is recorded."""

    case: str
    note: str
    sender: str
    request: Request
    answer: Answer | None


@cache
def pairs() -> tuple[Pair, ...]:
    """Return all pairs in the order in which the requests were sent."""
    lines = (DATA / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(_pair(json.loads(line)) for line in lines)


def pair(case: str) -> Pair:
    return next(one for one in pairs() if one.case == case)


def recorded_server() -> ContractServer:
    """Return a server with the state of the first recorded request: everything is provisioned by files."""
    content = Content()
    alerting = Alerting()
    content.add_folder(ALERTS_FOLDER, "Training alerts")
    content.add_folder("rankscope", "Training")
    for uid in ("rankscope-devices", "rankscope-step-time", "rankscope-run-overview"):
        content.add_board(uid, _board(uid), "rankscope", login="Anonymous", file=f"{uid[10:].replace('-', '_')}.json")
    content.add_source(_body("datasource_update_provisioned"), read_only=True)
    for rule in pair("rules_list").answer.body:  # type: ignore[union-attr]
        alerting.add_rule(rule, "file")
    for number in range(4, 17):
        alerting.add_rule(_body("rule_create") | {"uid": f"seed-{number}", "folderUID": ALERTS_FOLDER}, "file")
    return ContractServer(content=content, alerting=alerting, organisations={1: "Main Org.", 2: "Second"})


def _pair(line: dict[str, Any]) -> Pair:
    sent, got = line["request"], line["response"]
    request = Request(
        method=sent["method"], path=sent["path"], query=sent["query"], headers=sent["headers"], body=sent.get("body")
    )
    answer = Answer(got["status"], got["body"], got["content_type"] or "application/json") if got else None
    return Pair(case=line["case"], note=line["note"], sender=sent["as"], request=request, answer=answer)


def _body(case: str) -> dict[str, Any]:
    body: dict[str, Any] = pair(case).request.body
    return body


def _board(uid: str) -> dict[str, Any]:
    """Return the content of a provisioned board. The recording has that of the board *Step time* only."""
    answer = pair("dashboard_get_provisioned").answer
    assert answer is not None
    board: dict[str, Any] = answer.body["dashboard"]
    return board if uid == board["uid"] else board | {"uid": uid, "title": uid}
