"""The contract server answers each recorded request of a deployment as Grafana did, in the order of the recording."""

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from tests.dashboards.grafana.contract_content import NOT_MODELLED, Answer
from tests.dashboards.grafana.contract_server import Pair, pairs, recorded_server

VOLATILE: Final = {"id", "created", "updated", "updatedAt", "createdAt", "accessErrorId", "traceID", "dashboardId"}
"""Keys whose values differ at each recording."""

CREDENTIALS: Final = {
    "admin": "Basic admin:admin",
    "service account token, role Admin": "Bearer glsa_admin",
    "service account token, role Editor": "Bearer glsa_editor",
    "service account token, role Viewer": "Bearer glsa_viewer",
    "service account token that is wrong": "Bearer glsa_wrong",
    "API key, role Admin": "Bearer eyJr_admin",
    "API key that is wrong": "Bearer eyJr_wrong",
    "basic, wrong password": "Basic admin:wrong",
    "basic admin": "Basic admin:admin",
    "service account token of org 1": "Bearer glsa_admin",
    "no credentials": "",
}


def test_every_recorded_answer_is_repeated_with_its_leniency():
    with recorded_server() as server:
        answers = [(one, got) for one in pairs() if (got := _send(server.url, one)).status != NOT_MODELLED.status]
    different = {one.case: (one.answer, got) for one, got in answers if _is_different(one, got)}

    assert different == {}
    accepted = {mistake.rpartition(": ")[2] for mistake in server.alerting.mistakes}
    assert {"folder", "condition", "data source", "uid", "for"} == accepted
    assert (250, 191) == (sum(one.answer is not None for one in pairs()), len(answers))


def _is_different(one: Pair, got: Answer) -> bool:
    """Return True if the server does not answer as recorded, with the part of a document that a deployment reads."""
    if one.answer is None:
        return got.status >= 300
    expected, actual = one.answer.body, got.body
    if isinstance(expected, list) and any(text in one.note for text in ("(first 3", "(body cut to the first")):
        actual = actual[: len(expected)]
    return one.answer.status != got.status or not _is_part(actual, expected)


def _is_part(part: Any, whole: Any) -> bool:
    """Return True if two documents are equal, except for keys that `part` lacks or whose values always differ."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in VOLATILE or (name in whole and _is_part(part[name], whole[name])) for name in part)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(_is_part, part, whole))
    return bool(part == whole)


def _send(url: str, one: Pair) -> Answer:
    kind, _, value = CREDENTIALS[one.sender.partition(", X-Grafana")[0]].partition(" ")
    secret = base64.b64encode(value.encode()).decode() if kind == "Basic" else value
    body, headers = one.request.body, dict(one.request.headers) | {"Authorization": f"{kind} {secret}"}
    is_form = isinstance(body, str)
    headers |= {} if is_form else {"Content-Type": "application/json"}
    data = None if body is None else (body if is_form else json.dumps(body)).encode()
    query = f"?{urllib.parse.urlencode(one.request.query)}" if one.request.query else ""
    request = urllib.request.Request(url + one.request.path + query, data, headers, method=one.request.method)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return Answer(reply.status, _parsed(reply.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _parsed(error.read()))


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else ""
    except ValueError:
        return raw.decode()
