"""The recorded pairs of requests and answers, and the state of the server at the start of the recording."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.dashboards.grafana.contract_alerting import Alerting
from tests.dashboards.grafana.contract_answers import Answer, Request
from tests.dashboards.grafana.contract_content import Content
from tests.dashboards.grafana.contract_server import ContractServer

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
    """Return the pair of one case."""
    return next(one for one in pairs() if one.case == case)


def webhooks() -> list[dict[str, Any]]:
    """Return the recorded messages that Grafana sent to a webhook."""
    return [json.loads(line) for line in (DATA / "webhooks.jsonl").read_text(encoding="utf-8").splitlines()]


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
